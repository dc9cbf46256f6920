// The mainloop of dense tiles, and the exchange of sums between threads.
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
  const uint4 v = ptx::load_shared16(shared);
  f(d[4 * j], __uint_as_float(v.x)), f(d[4 * j + 1], __uint_as_float(v.y));
  f(d[4 * j + 2], __uint_as_float(v.z)), f(d[4 * j + 3], __uint_as_float(v.w));
}

// mbarriers of the two workers of a pair, which send each other sums.
struct PairBarriers {
  u32 control;

  // Of exchanges in the buffer. `arrived`: the other worker's sums for this worker's part. `ready`:
  // the other worker can receive sums.
  ETC_DEVICE u32 arrived() const { return control; }
  ETC_DEVICE u32 ready() const { return control + 8; }
  // Of exchanges in stages: the other worker has a stage for sums.
  ETC_DEVICE u32 room() const { return control + 16; }
  ETC_DEVICE void init() const {
    ptx::mbarrier_init(arrived(), 1);
    ptx::mbarrier_init(ready(), 1);
    ptx::mbarrier_init(room(), 1);
  }
};

// kIsWhole: worker n of the pair receives all sums of warpgroup n; otherwise those of half of the
// rows, for the first warpgroup. kEights: the rows, in groups of eight.
template <u32 kEights, bool kIsWhole>
struct PairExchange : PairBarriers {
  // The groups of rows that warpgroup `wg` of this worker finishes: [first, end).
  ETC_DEVICE static u32 first(u32) { return kIsWhole ? 0 : begin_of(ptx::worker() & 1); }
  ETC_DEVICE static u32 end(u32 wg) {
    const u32 half = ptx::worker() & 1;
    return kIsWhole ? (wg == half ? kEights : 0) : begin_of(half + 1);
  }

  // One thread, when a task begins: this worker's buffer is free, so the other worker may send.
  // NOTE: a phase of ready() ends for each task, as `n` of add() counts. If the other worker receives
  // nothing, this one arrives at its own ready(): it would not wait for an arrival of the other.
  ETC_DEVICE void begin() const {
    const u32 half = ptx::worker() & 1;
    ptx::mbarrier_arrive_expect(arrived(), received(half) * 2048);
    if (received(half ^ 1) == 0) ptx::mbarrier_arrive(ready());
    if (received(half) > 0) ptx::mbarrier_arrive_cluster_release(ready(), half ^ 1);
  }

  // A warpgroup sends the sums that the other worker finishes, and adds those that it receives, at
  // shared address `sums`. `n` counts the tasks. True if the run was aborted.
  template <class Program>
  ETC_DEVICE bool add(
      const Run<Program>& run, float (&d)[kEights * 4], u32 wg, u32 sums, u32 n,
      bool lost) const {
    const u32 half = ptx::worker() & 1;
    const u32 first = PairExchange::first(wg), end = PairExchange::end(wg);
    const bool receives = first < end, sends = end - first < kEights;
    if (!lost && sends) lost = !wait_mbarrier<true>(run, ready(), n & 1);
    if (ptx::named_barrier_any<128>(2 + wg, lost)) return true;
    sums += (ptx::thread() & 127) * 16;
    const u32 place = !kIsWhole && half == 0 ? end : 0;  // the other worker's first group
    const u32 to = ptx::cluster_address(sums, half ^ 1);
    const u32 counter = ptx::cluster_address(arrived(), half ^ 1);
#pragma unroll
    for (u32 j = 0; j < kEights; ++j) {
      if (j >= first && j < end) continue;
      ptx::store16_async_cluster(to + (j - place) * 2048, d + 4 * j, counter);
    }
    if (receives) lost = !wait_mbarrier(run, arrived(), n & 1);
    const auto add = [](float& sum, float other) { sum += other; };
#pragma unroll
    for (u32 j = 0; j < kEights; ++j) {
      if (j >= first && j < end) combine_four(d, j, sums + (j - first) * 2048, add);
    }
    return ptx::named_barrier_any<128>(2 + wg, lost);
  }

 private:
  // The groups of rows whose sums worker `half` receives.
  ETC_DEVICE static u32 received(u32 half) {
    return kIsWhole ? kEights : begin_of(half + 1) - begin_of(half);
  }
  ETC_DEVICE static u32 begin_of(u32 half) { return (half * kEights + 1) / 2; }
};

// Worker n of the pair finishes the sums of warpgroup n. The other worker's come in a stage of the
// ring, after those of the tile. columns: of wgmma's N that the tile has.
struct StageExchange : PairBarriers {
  u32 columns;

  ETC_DEVICE static bool finishes(u32 wg) { return wg == (ptx::worker() & 1); }

  // A warpgroup that finishes its sums adds those of the other worker to them. The others send
  // theirs. `n` counts the exchanges. True if the run was aborted.
  template <u32 kCount, class Program>
  ETC_DEVICE bool add(
      const Run<Program>& run, StageReader<Program>& stages, float (&d)[kCount], u32 wg, u32 n,
      bool lost) const {
    const u32 at = stages.next(exchanged_bytes(columns));
    const u32 own = stages.address(at) + (ptx::thread() & 127) * 16;
    if (finishes(wg)) {
      if (!lost) lost = !stages.wait_full(run);
#pragma unroll
      for (u32 j = 0; j < kCount / 4; ++j) {
        if (j * 8 >= columns) continue;
        combine_four(d, j, own + j * 2048, [](float& sum, float other) { sum += other; });
      }
      ptx::fence_proxy_async_shared();  // before copies that reuse it
    } else {
      if (!lost) lost = !wait_mbarrier<true>(run, room(), n & 1);
      lost = __any_sync(~0u, lost);
      const u32 other = (ptx::worker() & 1) ^ 1, full = ptx::cluster_address(stages.full(), other);
      const u32 to = ptx::cluster_address(own, other), end = lost ? 0 : columns;
#pragma unroll
      for (u32 j = 0; j < kCount / 4; ++j) {
        if (j * 8 < end) ptx::store16_async_cluster(to + j * 2048, d + 4 * j, full);
      }
    }
    lost = __any_sync(~0u, lost);
    __syncwarp();  // the sums have been read
    if (!lost) stages.template release<true>(stages.count() - 1);
    return lost;
  }
};

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
    float (&d)[kCount]) {
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
  const bool lost = multiply_stages(run, stages, count, boxes.bytes, false, multiply);
#pragma unroll
  for (u32 i = 0; i < kColumns / 2; ++i) ptx::keep_order(d[i]);
  return lost;
}

// Each warpgroup stores its tile through its half of the buffer. Before:
//   alternate boxes   the first half receives the sums of the second warpgroup, the second half
//                     those of the other worker;
//   half the columns  the whole buffer receives the sums of the other worker.
// All compute threads synchronise after a task, so that the buffer is free for the next one.
constexpr u32 kHalfBuffer = 8192;

}  // namespace etc
