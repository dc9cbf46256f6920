// Matrix multiplication on tiles of 256 x 256 by clusters of two workers, 128 rows each.
//
// Per worker two compute warpgroups multiply 64 x 256 each. The pair shares w by multicast.
// Finished tiles go through the buffer to the store warp. A tile for another rank goes to a scratch
// ring in local memory, from where two warps forward it: stores from here to a peer would delay the
// loads of the next tiles.
#pragma once
#include "functions/mainloop.cuh"
#include "ptx/wgmma_columns.cuh"

namespace etc {

template <bool kIsHalf, bool kWeightIsKN>
struct Matmul {
  static constexpr u32 kRows = 128, kColumns = 256;  // of a worker's part of a tile
  static constexpr u32 kBytesX = kRows * kStageDepth * 2, kBytesW = kColumns * kStageDepth * 2;
  static constexpr u32 kStageBytes = kBytesX + kBytesW;
  static constexpr u32 kRounds = 2;  // in which a warpgroup stores its four chunks
  static constexpr u32 kRoundBytes = 2 * kChunkBytes;
  static constexpr u32 kImageBytes = kRows * kColumns * 2;

  u32 control, buffer;
  static constexpr u32 kControlBytes = 64;
  // Rounds of the buffer, images of the scratch ring.
  struct Counters {
    u32 round, images;
  };

  // mbarriers. `filled`, `emptied`: of each warpgroup's half of the buffer; `ready`, `sent`: of the
  // two images of the scratch ring.
  ETC_DEVICE u32 filled(u32 wg) const { return control + 8 * wg; }
  ETC_DEVICE u32 emptied(u32 wg) const { return control + 16 + 8 * wg; }
  ETC_DEVICE u32 ready(u32 image) const { return control + 32 + 8 * image; }
  ETC_DEVICE u32 sent(u32 image) const { return control + 48 + 8 * image; }
  template <class Program>
  ETC_DEVICE u32 out(u32 wg) const {
    static_assert(2 * kRoundBytes <= Program::kBufferBytes);
    return buffer + wg * (Program::kBufferBytes / 2);
  }

  ETC_DEVICE void init() const {
    for (u32 i = 0; i < 2; ++i) {
      ptx::mbarrier_init(filled(i), 128);
      ptx::mbarrier_init(emptied(i), 1);
      ptx::mbarrier_init(ready(i), 1);
      ptx::mbarrier_init(sent(i), 2);
    }
  }

  template <class Program>
  ETC_DEVICE bool wait_buffer(const Run<Program>& run, const Counters& counters) const {
    return wait_mbarrier(run, emptied(threadIdx.x >> 7), (counters.round & 1) ^ 1);
  }

  template <u32 kVariants, class Program>
  ETC_DEVICE bool compute(
      const Run<Program>& run, StageReader<Program>& stages, const Work& work,
      Counters& counters) const {
    const u32 wg = __shfl_sync(~0u, threadIdx.x >> 7, 0);
    // NOTE: kept warp-uniform, so that descriptors stay in uniform registers.
    const u32 own = stages.descriptor_base();
    const u32 x0 = __shfl_sync(~0u, (own + wg * (kBytesX / 32)) | 0x10000u, 0);
    const u32 w0 = __shfl_sync(~0u, (own + kBytesX / 16) | kLeadingOfW<kWeightIsKN>, 0);
    float d[128];
    if constexpr (ComputesOf<typename Program::TensorCalls>::kCount > 1) {
      // NOTE: ends the life of the registers where other code of the lane's loop needs them.
#pragma unroll
      for (float& v : d) v = 0;
    }
    bool lost = multiply_stages(run, stages, work.size, kStageBytes, false, [&](u32 at, u32 k) {
      const u32 x = x0 + (at >> 4), w = w0 + (at >> 4);
      ptx::wgmma_box<kIsHalf, kColumns, false, kWeightIsKN>(
          d, ptx::matrix_descriptor(x), ptx::matrix_descriptor(w), k != 0);
    });
    if (!lost) lost = !put(run, d, wg, counters.round);
    return !ptx::named_barrier_any<128>(2 + wg, lost);
  }

  // The store warp takes a finished tile out of the buffer, in `count` rounds: store(wg, h) issues
  // the bulk stores of round h of warpgroup wg, on one thread.
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
  // The store warp, after the last bulk store of a task: all threads can see its data.
  ETC_DEVICE static void finish_stores() {
    if (threadIdx.x % 32 == 0) {
      ptx::wait_stores<0>();
      ptx::fence_proxy_async();
    }
    __syncwarp();
  }

 private:
  template <class Program>
  ETC_DEVICE bool put(
      const Run<Program>& run, float (&d)[128], u32 wg, u32& round) const {
    const u32 lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
    const u32 row = warp * 16 + ((lane >> 3) & 1) * 8 + (lane & 7);
    const u32 unit = lane >> 4;
    const u32 origin = out<Program>(wg) + row * 128;
#pragma unroll
    for (u32 h = 0; h < kRounds; ++h, ++round) {
      const bool came = wait_mbarrier(run, emptied(wg), (round & 1) ^ 1);
      if (!__all_sync(~0u, came)) return false;
#pragma unroll
      for (u32 chunk = 0; chunk < 2; ++chunk) {
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
          const int b = ((h * 2 + chunk) * 8 + j * 2) * 4;
          ptx::store_matrix4(
              origin + chunk * kChunkBytes + (((j * 2 + unit) ^ (row & 7)) << 4),
              pack<kIsHalf>(d[b], d[b + 1]), pack<kIsHalf>(d[b + 2], d[b + 3]),
              pack<kIsHalf>(d[b + 4], d[b + 5]), pack<kIsHalf>(d[b + 6], d[b + 7]));
        }
      }
      ptx::fence_proxy_async_shared();
      ptx::mbarrier_arrive(filled(wg));
    }
    return true;
  }
};

// The size of a task: its steps.
template <class Call>
struct MatmulRoles : Roles {
  using Compute = Matmul<Call::kIsHalf, Call::kWeightIsKN>;
  using Coord = typename Call::Coord;
  static constexpr u32 kUniformStageBytes = Compute::kStageBytes;
  static constexpr bool kMulticast = true;

  template <class Program>
  ETC_DEVICE static u32 size(const Run<Program>& run, const Coord& c) {
    return num_steps<Call>(run, c);
  }
  template <class Program>
  ETC_DEVICE static RingStages stages(const Run<Program>&, u32 steps) {
    return {steps, Compute::kStageBytes};
  }

  template <class Program, class Publish, class Loaded>
  ETC_DEVICE static bool load(
      const Run<Program>& run, StageLoader<Program>& stages, const Coord& c, u32 steps,
      Publish publish, Loaded loaded) {
    publish();
    const u32 half = blockIdx.x & 1;
    Box x = Call::template operand<0>(run.g, c).box(), w = Call::template operand<1>(run.g, c).box();
    x.y += half * Compute::kRows;
    for (u32 k = 0; k < steps; ++k) {
      Stage stage;
      constexpr u32 kBytes = Compute::kStageBytes;
      if (!stages.begin(run, kBytes, kBytes, false, stage)) return false;
      const i32 depth = i32(k * kStageDepth);
      ptx::load_box(stage.at, {x.map, x.x + depth, x.y, x.z}, stage.full);
      const u32 part = stage.at + Compute::kBytesX + half * (Compute::kBytesW / 2);
      if constexpr (Call::kWeightIsKN) {
        // [k][n]: two boxes of 64 k x 64 n, one a 64-column chunk.
        const i32 n = w.x + i32(half) * 128, at = w.y + depth;
        ptx::load_box_multicast(part, {w.map, n, at, w.z}, stage.full, 3);
        ptx::load_box_multicast(
            part + kChunkBytes, {w.map, n + 64, at, w.z}, stage.full, 3);
      } else {
        const i32 row = w.y + i32(half) * 128;
        ptx::load_box_multicast(part, {w.map, w.x + depth, row, w.z}, stage.full, 3);
      }
      loaded(k + 1);
    }
    return true;
  }
};

// The tile stays on this rank: row-major, through a tensor map that clips it.
template <class Call>
struct matmul_store : MatmulRoles<Call> {
  using Compute = typename MatmulRoles<Call>::Compute;

  template <class Program>
  ETC_DEVICE static bool store(
      const Run<Program>& run, const Compute& matmul, const typename Call::Coord& c, u32,
      typename Compute::Counters& counters, u32& entered, Waiter who) {
    Box y = Call::template operand<Call::kReads>(run.g, c).box();
    y.y += (blockIdx.x & 1) * Compute::kRows;
    const bool done = matmul.drain_tile(run, Compute::kRounds, counters.round, [&](u32 wg, u32 h) {
#pragma unroll
      for (u32 chunk = 0; chunk < 2; ++chunk) {
        const i32 column = y.x + i32((h * 2 + chunk) * 64);
        ptx::store_box(
            {y.map, column, y.y + i32(wg * 64), y.z},
            matmul.template out<Program>(wg) + chunk * kChunkBytes);
      }
    });
    if (!done) return false;
    if constexpr (Call::kNotifies > 0) Compute::finish_stores();
    return notify_own_rank<Call>(run, c, entered, who);
  }
};

// The tile goes to the slot of its owner, as the workers' shared-memory images.
template <class Call>
struct matmul_send : MatmulRoles<Call> {
  using Compute = typename MatmulRoles<Call>::Compute;
  static constexpr int kUnroll = 8;  // 16-byte stores in flight a thread; 16 is slower

  ETC_DEVICE static u64 scratch(u64 workspace, u32 image) {
    return workspace + (u64(blockIdx.x) * 2 + (image & 1)) * Compute::kImageBytes;
  }

  template <class Program>
  ETC_DEVICE static bool store(
      const Run<Program>& run, const Compute& matmul, const typename Call::Coord& c, u32,
      typename Compute::Counters& counters, u32&, Waiter) {
    const auto slot = Call::template operand<2>(run.g, c);
    const bool own = slot.rank == run.g.rank;
    u32& images = counters.images;
    u64 to = u64(slot.at()) + (blockIdx.x & 1) * Compute::kImageBytes;
    if (!own) {
      to = scratch(run.g.workspace, images);
      const u32 parity = (images / 2 & 1) ^ 1;
      const bool came = wait_mbarrier(run, matmul.sent(images & 1), parity);
      if (!__all_sync(~0u, came)) return false;
      ptx::fence_proxy_async();  // generic reads of the scratch before the next bulk store
    }
    const bool done = matmul.drain_tile(run, Compute::kRounds, counters.round, [&](u32 wg, u32 h) {
      const u64 at = to + wg * (Compute::kImageBytes / 2) + h * Compute::kRoundBytes;
      ptx::store_bytes(at, matmul.template out<Program>(wg), Compute::kRoundBytes);
    });
    if (!done) return false;
    Compute::finish_stores();
    if (own) {
      notify_all<Program, Call>(run, c, 2);
    } else {
      if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(matmul.ready(images & 1));
      ++images;
    }
    return true;
  }

  // Each of two warps forwards its half of an image.
  template <class Program, class Idle>
  ETC_DEVICE static bool forward(
      const Run<Program>& run, const Compute& matmul, const typename Call::Coord& c, u32 half,
      typename Compute::Counters& counters, u32& entered, Waiter who, Tracer<Program>& trace,
      Idle idle) {
    const auto slot = Call::template operand<2>(run.g, c);
    if (slot.rank == run.g.rank) return true;
    const u32 lane = threadIdx.x & 31;
    u32& images = counters.images;
    const bool came = spin<false, true>(run, 2 * run.g.wait_limit, [&] {
      const bool is_ready =
          __all_sync(~0u, ptx::mbarrier_try_wait(matmul.ready(images & 1), images / 2 & 1));
      return is_ready || (idle(), false);
    });
    if (!came) return false;
    bool started = true;
    if (lane == 0) started = wait_peers<Program, Call>(run, c, who, entered);
    if (!__shfl_sync(~0u, int(started), 0)) return false;
    __syncwarp();

    const u64 begin = trace.now();
    const u64 part = half * (Compute::kImageBytes / 2) + lane * 16;
    const u64 from = scratch(run.g.workspace, images) + part;
    const u64 to = u64(slot.at()) + (blockIdx.x & 1) * Compute::kImageBytes + part;
#pragma unroll 1
    for (u32 i = 0; i < Compute::kImageBytes / 1024; i += kUnroll) {
      uint4 v[kUnroll];
#pragma unroll
      for (u32 u = 0; u < kUnroll; ++u) v[u] = ptx::load16_l2(from + (i + u) * 512);
#pragma unroll
      for (u32 u = 0; u < kUnroll; ++u) ptx::store16(to + (i + u) * 512, v[u]);
    }
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(matmul.sent(images & 1));
    notify_all<Program, Call>(run, c, 1);
    trace.add(kTransferLane, Call::kCall, who.task, begin);
    ++images;
    return true;
  }
};

}  // namespace etc
