// What the engines of matrix multiplication share: a ring of four stages that one thread
// fills and two warpgroups of each worker of a pair empty, and a buffer on the way of
// finished tiles.
#pragma once
#include "ptx/bulk_copy.cuh"
#include "ptx/wgmma.cuh"
#include "worker/shared.cuh"
#include "worker/task.cuh"
#include "worker/trace.cuh"

namespace etc {

// kRows: of x in a stage; kOutBytes: what a warpgroup puts out in a round; kCopiers: threads
// that may copy parts of a stage beside the one that issues bulk copies.
template <u32 kRows, u32 kOutBytes, u32 kCopiers = 0>
struct TileRing {
  static constexpr u32 kGatherers = kCopiers;
  static constexpr u32 kDepth = 64;  // k of a stage
  static constexpr u32 kStages = 4;
  static constexpr u32 kBytesX = kRows * kDepth * 2, kBytesW = 256 * kDepth * 2;
  static constexpr u32 kStageBytes = kBytesX + kBytesW;
  static constexpr u32 kRoundBytes = kOutBytes;
  static constexpr u32 kOutOffset = Shared::kEngineOffset + kStages * kStageBytes;
  static constexpr u32 kSharedBytes = kOutOffset + 2 * kRoundBytes;
  // Between tiles, the output buffer is free for tasks of other kinds.
  static constexpr u32 kScratchOffset = kOutOffset;
  static_assert(2 * kRoundBytes >= Shared::kScratchBytes);
  static constexpr u32 kConsumerWarps = 8;

  // Shared-memory addresses. `full`/`free`: stages of the ring; `filled`/`emptied`: the
  // output buffer of each warpgroup; `ready`/`sent`: two images of a scratch ring.
  u32 base;
  ETC_DEVICE u32 stage(u32 s) const { return base + Shared::kEngineOffset + s * kStageBytes; }
  ETC_DEVICE u32 full(u32 s) const { return base + 8 * s; }
  ETC_DEVICE u32 free(u32 s) const { return base + 64 + 8 * s; }
  ETC_DEVICE u32 filled(u32 wg) const { return base + 128 + 8 * wg; }
  ETC_DEVICE u32 emptied(u32 wg) const { return base + 144 + 8 * wg; }
  ETC_DEVICE u32 ready(u32 image) const { return base + 160 + 8 * image; }
  ETC_DEVICE u32 sent(u32 image) const { return base + 176 + 8 * image; }
  ETC_DEVICE u32 out(u32 wg) const { return base + kOutOffset + wg * kRoundBytes; }

  ETC_DEVICE void init() const {
    for (u32 s = 0; s < kStages; ++s) {
      ptx::mbarrier_init(full(s), 1 + kGatherers);
      ptx::mbarrier_init(free(s), 2 * kConsumerWarps);  // both workers' consumers
    }
    for (u32 i = 0; i < 2; ++i) {
      ptx::mbarrier_init(filled(i), 128);
      ptx::mbarrier_init(emptied(i), 1);
      ptx::mbarrier_init(ready(i), 1);
      ptx::mbarrier_init(sent(i), 2);
    }
  }

  // Where stage s begins, as descriptors count: in units of 16 bytes.
  // NOTE: a shared address bears the worker's place in its cluster above bit 23: cut it off.
  ETC_DEVICE u32 descriptor_base() const {
    return ((base + Shared::kEngineOffset) & 0x3ffffu) >> 4;
  }

  // k steps of a product whose left operand is operand 0.
  template <class Call, class Program>
  ETC_DEVICE static u32 num_steps(const Run<Program>& run, const typename Call::Coord& c) {
    const auto x = Call::template operand<0>(run.g, c);
    return (u32(x.size[x.kRank - 1]) + kDepth - 1) / kDepth;
  }

  // Named in what is left out where no call gathers.
  template <class Call, class Program, class Coord>
  bool gather(const Run<Program>&, const Coord&, u32, u32&) const;
  static u32 num_stages(u32 size);

  // Who fills stages: the next one is free, where `ring` counts those before.
  template <class Program>
  ETC_DEVICE bool wait_free(const Run<Program>& run, u32 ring) const {
    return wait_mbarrier(run, free(ring % kStages), (ring / kStages & 1) ^ 1);
  }

  // A consumer warpgroup goes through `steps` stages: `multiply(s, k)` issues the products of
  // step k, which lies in stage s. True if it was lost on the way. is_gathered: part of the
  // stages was not loaded in bulk.
  // NOTE: a warp whose wait was given up goes on multiplying what lies in shared memory
  // until the tile ends: wgmma needs all four warps, and they may learn of an abort at
  // different steps. They agree, once a tile, whether to leave.
  template <class Program, class Multiply>
  ETC_DEVICE bool multiply_steps(
      const Run<Program>& run, u32 steps, bool is_gathered, u32& ring, u32 lane,
      Multiply multiply) const {
    bool lost = false;
    for (u32 k = 0; k < steps; ++k, ++ring) {
      const u32 s = ring % kStages;
      if (!lost) lost = !wait_mbarrier(run, full(s), ring / kStages & 1);
      lost = __any_sync(~0u, lost);
      if (is_gathered) ptx::fence_proxy_async_shared();
      ptx::wgmma_fence();
      multiply(s, k);
      ptx::wgmma_commit();
      if (k > 0) {
        ptx::wgmma_wait<1>();
        if (lane < 2 && !lost) ptx::mbarrier_arrive_cluster(free((ring - 1) % kStages), lane);
      }
    }
    ptx::wgmma_wait<0>();
    if (lane < 2 && !lost) ptx::mbarrier_arrive_cluster(free((ring - 1) % kStages), lane);
    return lost;
  }

  // The compute threads: the output buffer is empty, after `round` rounds.
  template <class Program>
  ETC_DEVICE bool wait_emptied(const Run<Program>& run, u32 round) const {
    return wait_mbarrier(run, emptied(threadIdx.x >> 7), (round & 1) ^ 1);
  }

  // The storing warp takes a finished tile out of the buffer, in `count` rounds: `store(wg, h)`
  // issues the bulk stores of round h of warpgroup wg, on one thread.
  template <class Program, class Store>
  ETC_DEVICE bool drain_tile(
      const Run<Program>& run, u32 count, u32& round, Store store) const {
    bool came = true;
    if (threadIdx.x % 32 == 0) {
      for (u32 h = 0; h < count && came; ++h) {
#pragma unroll
        for (u32 wg = 0; wg < 2; ++wg) {
          came = came && wait_mbarrier(run, filled(wg), (round + h) & 1);
          if (!came) break;
          store(wg, h);
          ptx::commit_stores();
        }
        ptx::wait_stores_read<1>();
        ptx::mbarrier_arrive(emptied(0));
        ptx::wait_stores_read<0>();
        ptx::mbarrier_arrive(emptied(1));
      }
    }
    round += count;
    return __shfl_sync(~0u, int(came), 0);
  }

  // The storing warp, after the last bulk store of a task: its data can be seen by all.
  ETC_DEVICE static void finish_stores() {
    if (threadIdx.x % 32 == 0) {
      ptx::wait_stores<0>();
      ptx::fence_proxy_async();
    }
    __syncwarp();
  }
  // For a task whose tile stays on this rank.
  template <class Call, class Program>
  ETC_DEVICE static bool notify_kept(
      const Run<Program>& run, const typename Call::Coord& c, u32& entered, Waiter who) {
    if constexpr (Call::kNotifies > 0) {
      bool started = true;
      if (threadIdx.x % 32 == 0) started = wait_peers<Program, Call>(run, c, who, entered);
      if (!__shfl_sync(~0u, int(started), 0)) return false;
      notify_all<Program, Call>(run, c, 1);
    }
    return true;
  }
};

}  // namespace etc
