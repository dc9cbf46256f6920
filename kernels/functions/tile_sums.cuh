// The mainloop of dense tiles, and the exchange of sums between warpgroups.
#pragma once
#include "functions/mainloop.cuh"
#include "functions/tile_shape.cuh"
#include "ptx/wgmma_columns.cuh"

namespace etc {

// Stores a thread's four sums of group j of eight columns in shared memory.
template <u32 kCount>
ETC_DEVICE void store_four(const float (&d)[kCount], u32 j, u32 shared) {
  ptx::store_shared16(
      shared, {__float_as_uint(d[4 * j]), __float_as_uint(d[4 * j + 1]),
               __float_as_uint(d[4 * j + 2]), __float_as_uint(d[4 * j + 3])});
}
// Calls f(sum, other) for each of these, with another thread's sums from shared memory.
template <u32 kCount, class F>
ETC_DEVICE void combine_four(float (&d)[kCount], u32 j, u32 shared, F f) {
  const uint4 words = ptx::load_shared16(shared);
  f(d[4 * j], __uint_as_float(words.x)), f(d[4 * j + 1], __uint_as_float(words.y));
  f(d[4 * j + 2], __uint_as_float(words.z)), f(d[4 * j + 3], __uint_as_float(words.w));
}

// The boxes of a stage that a warpgroup multiplies. w, x: descriptors of the first ones in the
// ring's first stage; next_w, next_x: bytes from one box to the next.
struct Boxes {
  u32 w, x, next_w, next_x;
  u32 bytes;  // of a stage
  u32 rows;   // of the M of wgmma whose sums are used
};

// The mainloop of a warpgroup, with kBoxes boxes of each stage: adds to the first kColumns / 2 sums
// of a thread. kIsKN: w is stored [k, n]. kIsSwapped: rows of w are the M of wgmma. Returns whether
// a wait has failed.
template <
    bool kIsHalf, bool kIsKN, bool kIsSwapped, u32 kBoxes, u32 kColumns, u32 kCount, class Program>
ETC_DEVICE bool multiply_boxes(
    const Run<Program>& run, StageReader<Program>& stages, u32 count, const Boxes& boxes,
    float (&d)[kCount], bool is_gathered = false) {
  const auto multiply = [&](u32 begin, u32) {
#pragma unroll
    for (u32 box = 0; box < kBoxes; ++box) {
      const u32 at_w = boxes.w + (begin + box * boxes.next_w) / 16;
      const u32 at_x = boxes.x + (begin + box * boxes.next_x) / 16;
      const u64 rows = ptx::matrix_descriptor(kIsSwapped ? at_w : at_x);
      const u64 columns = ptx::matrix_descriptor(kIsSwapped ? at_x : at_w);
      ptx::wgmma_box<kIsHalf, kColumns, kIsKN && kIsSwapped, kIsKN && !kIsSwapped>(
          d, rows, columns, 1, boxes.rows);
    }
  };
  const bool is_lost = multiply_stages(run, stages, count, boxes.bytes, is_gathered, multiply);
#pragma unroll
  for (u32 i = 0; i < kColumns / 2; ++i) ptx::keep_order(d[i]);
  return is_lost;
}

// Each warpgroup stores its tile through its half of the buffer. If they multiply alternate boxes,
// the first half receives the sums of the second warpgroup before.
// All compute threads synchronise after a task, so that the buffer is free for the next one.
constexpr u32 kHalfBuffer = 8192;

}  // namespace etc
