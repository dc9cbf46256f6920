// Tiles of which x and w are codes of e4m3, and their mainloop.
//
// A block is 128 elements of k. Each row of x has a scale for each block, and each 128 rows of w:
// y is the sum over blocks, in the order of k, of both scales times x @ w.T of the block. A block is
// multiplied by wgmma into separate sums, which are then multiplied and added in fp32.
#pragma once
#include "functions/scaled_weights.cuh"
#include "functions/tile_sums.cuh"
#include "functions/wgmma_turns.cuh"
#include "ptx/wgmma_codes.cuh"

namespace etc {

// Codes [m, k] and [n, k]. A box has a block. Element: of the scales of w.
template <class Element_>
struct ScaledOperands {
  using Element = Element_;
  static constexpr bool kIsKN = false, kIsScaled = false, kAreCodes = true;
  static constexpr u32 kRowBytes = 128, kBoxDepth = kBlockDepth, kWords = 10;
};

// The scales of a task, in words of a work item. x, w, up: the addresses of the first row's scale of
// the first block; w: of gate in a gated tile, otherwise equal to up. x_pitch, w_pitch: bytes from a
// row of scales to the next; w_pitch is 0 if the tile has none. rows: of x. first: how many of the
// tile's rows of w, or of gate and of up, have the first row of scales. num_blocks: of k.
struct OperandScales {
  u64 x, w, up;
  u32 x_pitch, w_pitch;
  i32 rows, first;
  u32 num_blocks;

  ETC_DEVICE void write(u32* words) const {
    words[0] = u32(x), words[1] = u32(x >> 32), words[2] = u32(w), words[3] = u32(w >> 32);
    words[4] = u32(up), words[5] = u32(up >> 32), words[6] = x_pitch, words[7] = w_pitch;
    words[8] = u32(rows) | u32(first) << 16, words[9] = num_blocks;
  }
  ETC_DEVICE static OperandScales read(u32 shared) {
    const auto word = [&](u32 n) { return ptx::load_shared(shared + 4 * n); };
    const auto address = [&](u32 n) { return u64(word(n)) | u64(word(n + 1)) << 32; };
    const u32 row_bits = word(8);
    return {address(0), address(2), address(4), word(6), word(7),
            i32(row_bits & 0xffffu), i32(row_bits >> 16), word(9)};
  }
};

// The scales of two rows, of x or of w, for one block of k after the other. Each of kLanes lanes has
// those of one of kLanes blocks, and of one of the blocks after these, which arrive meanwhile. Tasks
// of other workers have written those of x.
// NOTE: the compiler waits in each block for loads whose registers are copied or read elsewhere.
template <class Element, u32 kLanes>
struct RowScales {
  u64 first, second;
  u32 end_block, block;
  u32 own_bits[2] = {}, later[2] = {};  // their bits

  ETC_DEVICE RowScales(u64 first_row, u64 second_row, u32 num_blocks)
      : first(first_row), second(second_row), end_block(num_blocks), block(ptx::lane() % kLanes) {
    load();
  }
  // Those of block n; called for one n after the other.
  ETC_DEVICE float2 of(u32 n) {
    if (n % kLanes == 0) {
      own_bits[0] = later[0], own_bits[1] = later[1], block += kLanes;
      ptx::keep_order(own_bits[0]), ptx::keep_order(own_bits[1]);  // copied before they are loaded
      load();
    }
    return make_float2(scale(own_bits[0], n), scale(own_bits[1], n));
  }

 private:
  // NOTE: lanes without a block keep other numbers, which are not used.
  ETC_DEVICE void load() {
    const u32 offset = block * sizeof(Element);
    ptx::load_l2_into<sizeof(Element)>(later[0], block < end_block, first + offset);
    ptx::load_l2_into<sizeof(Element)>(later[1], block < end_block, second + offset);
  }
  ETC_DEVICE static float scale(u32 bits, u32 n) {
    const u32 shared = __shfl_sync(~0u, bits, n % kLanes, kLanes);
    return number_of<Element>(shared);
  }
};

// The columns of a tile in steps of which its scales may change: it begins at a multiple of its
// columns.
ETC_DEVICE constexpr u32 scale_step(u32 columns) {
  return minimum(i32(columns & ~(columns - 1)), i32(kBlockDepth));
}

// d += the scales times the sums of a block, for the columns from kFirst on. A thread has two rows:
// in columns before `end` they have the scales `near`, in others `far`. end: a multiple of kStep.
template <u32 kFirst, u32 kStep, u32 kPart, u32 kCount>
ETC_DEVICE void add_part(
    float (&d)[kCount], const float (&sums)[kPart], float2 near, float2 far, u32 end) {
#pragma unroll
  for (u32 i = 0; i < kPart; i += 4) {
    const bool is_near = (kFirst + 2 * i) / kStep * kStep < end;
    const float upper = is_near ? near.x : far.x, lower = is_near ? near.y : far.y;
    float* const total = d + kFirst / 2 + i;
    total[0] = __fmaf_rn(upper, sums[i], total[0]);
    total[1] = __fmaf_rn(upper, sums[i + 1], total[1]);
    total[2] = __fmaf_rn(lower, sums[i + 2], total[2]);
    total[3] = __fmaf_rn(lower, sums[i + 3], total[3]);
  }
}

// The mainloop of a warpgroup with 64 rows of x and kColumns rows of w: adds to the first
// kColumns / 2 sums of a thread. A stage has one box of each operand. Returns whether a wait has
// failed.
// NOTE: wide tiles are multiplied in two parts, since a thread has the sums of a block in addition
// to those of all blocks before. Of a gated tile, the second part has the rows of up.
template <class Operands, u32 kColumns, bool kMayBeGated, u32 kCount, class Program>
ETC_DEVICE bool multiply_codes(
    const Run<Program>& run, StageReader<Program>& stages, u32 count, const Boxes& boxes,
    const OperandScales& scales, u32 wg, bool is_gated, float (&d)[kCount]) {
  constexpr u32 kParts = kColumns > 128 ? 2 : 1, kPart = kColumns / kParts;
  constexpr bool kHasUp = kMayBeGated && kParts == 2;
  using OfWeights = RowScales<typename Operands::Element, 32>;
  const u32 thread = ptx::thread() & 127, lane = thread & 31;
  const i32 row = i32(wg * 64 + thread / 32 * 16 + lane / 4), last = scales.rows - 1;
  const auto row_of_x = [&](i32 n) { return scales.x + u64(u32(minimum(n, last))) * scales.x_pitch; };
  RowScales<float, 4> x(row_of_x(row), row_of_x(row + 8), scales.num_blocks);
  OfWeights w(scales.w, scales.w + scales.w_pitch, scales.num_blocks);
  OfWeights up(scales.up, scales.up + scales.w_pitch, scales.num_blocks);
  constexpr u32 kStep = scale_step(kHasUp ? kPart : kColumns);
  bool is_lost = false;
  const auto wait = [&]() ETC_INLINE {
    if (!is_lost) is_lost = !stages.wait_full(run);
    is_lost = __any_sync(~0u, is_lost);
  };
  u32 place = stages.next(boxes.bytes);
  const WgmmaTurns turns{wg};
  turns.begin();
  wait();
#pragma unroll 1
  for (u32 n = 0; n < count; ++n) {
    const bool is_last = n + 1 == count;
    bool has_next = false;
    float2 rows, near, far;
    const auto multiply = [&](auto part) ETC_INLINE {
      constexpr u32 kFirst = decltype(part)::value * kPart;
      constexpr bool kIsLast = kFirst + kPart == kColumns;
      const u32 end = u32(scales.first) + (kHasUp && is_gated ? kFirst : 0);
      const u64 a = ptx::matrix_descriptor(boxes.x + place / 16);
      const u64 b = ptx::matrix_descriptor(boxes.w + place / 16 + kFirst * 128 / 16);
      float sums[kPart / 2];
      turns.wait();
      ptx::wgmma_fence();
      ptx::wgmma_half_codes<kPart>(sums, a, b, 0);
      ptx::wgmma_commit();
      ptx::wgmma_half_codes<kPart>(sums, a + 4, b + 4, 1);
      ptx::wgmma_commit();
      if constexpr (kFirst == 0) rows = x.of(n);
      if constexpr (kFirst == 0 || kHasUp) {
        const float2 scale_pair = kFirst == 0 ? w.of(n) : up.of(n);
        near = make_float2(rows.x * scale_pair.x, rows.y * scale_pair.x);
        far = make_float2(rows.x * scale_pair.y, rows.y * scale_pair.y);
      }
      // NOTE: long before the next stage is read, since then the latency of the test is hidden.
      if constexpr (kIsLast) has_next = stages.has_next();
      ptx::wgmma_wait<1>();
      turns.pass(kIsLast && is_last);
      ptx::wgmma_wait<0>();
#pragma unroll
      for (float& sum : sums) ptx::keep_order(sum);
      if (kIsLast && !is_lost) stages.release(stages.count() - 1);
      add_part<kFirst, kStep>(d, sums, near, far, end);
    };
    multiply(Number<0u>{});
    if constexpr (kParts == 2) multiply(Number<1u>{});
    place = stages.next_if(!is_last, boxes.bytes, place);
    if (!is_last && !has_next) wait();
  }
  return is_lost;
}

}  // namespace etc
