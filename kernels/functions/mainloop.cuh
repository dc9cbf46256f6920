// The mainloop of a GEMM, and further code that the GEMM functions share.
#pragma once
#include "ptx/bulk_copy.cuh"
#include "ptx/wgmma.cuh"
#include "worker/computes.cuh"
#include "worker/stage_ring.cuh"
#include "worker/task.cuh"
#include "worker/trace.cuh"

namespace etc {

constexpr u32 kStageDepth = 64;  // k of a box, and of most stages

// The bytes of 64 rows of 64 elements, of weights [k, n] or of a tile of y.
constexpr u32 kChunkBytes = 64 * 64 * 2;
// The bits of w's matrix descriptor that hold the leading dimension's byte offset.
template <bool kIsKN>
constexpr u32 kLeadingOfW = (kIsKN ? kChunkBytes >> 4 : 1u) << 16;

// Sets sums to 0, here and not in a later branch.
template <u32 kCount>
ETC_DEVICE void clear(float (&d)[kCount]) {
#pragma unroll
  for (float& sum : d) {
    sum = 0;
    ptx::keep_order(sum);
  }
}

// The number of boxes of kDepth along the k of a task, whose first operand is x.
template <class Call, u32 kDepth = kStageDepth, class Program>
ETC_DEVICE u32 num_steps(const Run<Program>& run, const typename Call::Coord& c) {
  const auto x = Call::template operand<0>(run.g, c);
  return (u32(x.size[x.kRank - 1]) + kDepth - 1) / kDepth;
}

// A compute warpgroup reads stages of `stage_bytes`: multiply(place, k) issues the wgmmas of stage
// k, which begins `place` bytes after the ring's first one. Returns whether a wait has failed.
// is_gathered: threads have written to the stages, not only bulk copies.
// NOTE: after an abort a warp reads all stages without waits: wgmma needs all four warps, and
// they may observe the abort at different stages. They agree at the end of the tile.
template <class Program, class Multiply>
ETC_DEVICE bool multiply_stages(
    const Run<Program>& run, StageReader<Program>& stages, u32 num_stages, u32 stage_bytes,
    bool is_gathered, Multiply multiply) {
  bool is_lost = false;
  for (u32 k = 0; k < num_stages; ++k) {
    const u32 place = stages.next(stage_bytes);
    if (!is_lost) is_lost = !stages.wait_full(run);
    is_lost = __any_sync(~0u, is_lost);
    if (is_gathered) ptx::fence_proxy_async_shared();
    ptx::wgmma_fence();
    multiply(place, k);
    ptx::wgmma_commit();
    if (k > 0) {
      ptx::wgmma_wait<1>();
      if (!is_lost) stages.release(stages.count() - 2);
    }
  }
  ptx::wgmma_wait<0>();
  if (!is_lost) stages.release(stages.count() - 1);
  return is_lost;
}

// The store warp notifies, once the result of a task is in this rank's memory.
template <class Call, class Program>
ETC_DEVICE bool notify_own_rank(
    const Run<Program>& run, const typename Call::Coord& c, u32& entered, Waiter who) {
  if constexpr (Call::kNotifies > 0) {
    bool has_started = true;
    if (threadIdx.x % 32 == 0) has_started = wait_peers<Program, Call>(run, c, who, entered);
    if (!__shfl_sync(~0u, int(has_started), 0)) return false;
    notify_all<Program, Call>(run, c);
  }
  return true;
}

}  // namespace etc
