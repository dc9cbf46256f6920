// Matrix multiplication on 256 x 256 tiles by clusters of two workers, 128 rows each.
//
// Per worker: two consumer warpgroups (64 x 256 each) fed by one loading warp through a
// ring of four stages; the pair shares w by multicast. Finished tiles leave through a
// small buffer, by one storing warp. A tile for another rank goes to a scratch ring in
// local memory, from where the two warps of the transfer lane forward it:
// stores straight to a peer would make the loads of the next tiles queue behind them.
#pragma once
#include "functions/tile_ring.cuh"

namespace etc {

struct Matmul : TileRing<128, 128 * 128> {
  static constexpr u32 kRows = 128, kColumns = 256;  // of a worker's share of a tile
  static constexpr u32 kChunkBytes = 64 * 64 * 2;    // 64 x 64 elements of the output
  static constexpr u32 kRounds = 2;                  // in which a warpgroup's 4 chunks leave
  static constexpr u32 kImageBytes = kRows * kColumns * 2;

  // What the roles of a worker have to know of a task: its steps.
  template <class Call, class Program>
  ETC_DEVICE static u32 size(const Run<Program>& run, const typename Call::Coord& c) {
    return num_steps<Call>(run, c);
  }

  // One thread loads x and w for a tile: `ring` counts stages since the program began; after
  // each, the n-th, loaded(n, stages) is called.
  template <class Call, class Program, class Loaded>
  ETC_DEVICE bool load(
      const Run<Program>& run, const typename Call::Coord& c, u32 steps, u32& ring,
      Loaded loaded) const {
    const u32 half = blockIdx.x & 1;
    Box x = Call::template box<0>(run.g, c), w = Call::template box<1>(run.g, c);
    x.y += half * kRows;
    if constexpr (Call::kGated) {
      // Columns 0..127 of the product are the gate's, 128..255 the other weight's.
      if (half == 1) w = Call::template box<2>(run.g, c);
    }
    for (u32 k = 0; k < steps; ++k, ++ring) {
      const u32 s = ring % kStages, stage = this->stage(s);
      if (!wait_free(run, ring)) return false;
      ptx::mbarrier_arrive_expect(full(s), kStageBytes);
      ptx::load_box(stage, {x.map, x.x + i32(k * kDepth), x.y, x.z}, full(s));
      const u32 share = stage + kBytesX + half * (kBytesW / 2);
      if constexpr (Call::kWeightIsKN) {
        // [k][n]: two boxes of 64 k x 64 n, one a 64-column chunk.
        const i32 n = w.x + i32(half) * 128, at = w.y + i32(k * kDepth);
        ptx::load_box_multicast(share, {w.map, n, at, w.z}, full(s), 3);
        ptx::load_box_multicast(share + kChunkBytes, {w.map, n + 64, at, w.z}, full(s), 3);
      } else {
        const i32 row = w.y + (Call::kGated ? 0 : i32(half) * 128);
        const Box part = {w.map, w.x + i32(k * kDepth), row, w.z};
        ptx::load_box_multicast(share, part, full(s), 3);
      }
      loaded(k + 1, steps);
    }
    return true;
  }

  // A consumer warpgroup multiplies one tile and puts it into the output buffer; a gated
  // tile of 256 columns becomes silu(left half) * right half.
  template <bool kIsHalf, bool kWeightIsKN, class Program>
  ETC_DEVICE bool consume(
      const Run<Program>& run, u32 steps, bool gated, u32& ring, u32& round) const {
    const u32 lane = threadIdx.x & 31, wg = __shfl_sync(~0u, threadIdx.x >> 7, 0);
    // NOTE: kept warp-uniform, so that descriptors stay in uniform registers.
    const u32 own = descriptor_base();
    const u32 x0 = __shfl_sync(~0u, (own + wg * (kBytesX / 32)) | 0x10000u, 0);
    const u32 leading = kWeightIsKN ? (kChunkBytes >> 4) << 16 : 0x10000u;
    const u32 w0 = __shfl_sync(~0u, (own + kBytesX / 16) | leading, 0);
    constexpr u32 kStepW = kWeightIsKN ? 128 : 2;  // 16 k further, in units of 16 bytes
    float d[128];
    bool lost = multiply_steps(run, steps, false, ring, lane, [&](u32 s, u32 k) {
      const u32 x = x0 + s * (kStageBytes >> 4), w = w0 + s * (kStageBytes >> 4);
#pragma unroll
      for (u32 q = 0; q < 4; ++q) {
        ptx::wgmma_64x256x16<kIsHalf, kWeightIsKN>(
            d, ptx::matrix_descriptor(x + 2 * q), ptx::matrix_descriptor(w + kStepW * q),
            (k | q) != 0);
      }
    });
    if (Program::kHasGate && gated) {
#pragma unroll
      for (int i = 0; i < 64; ++i) d[i] = silu(d[i]) * d[i + 64];
    }
    if (!lost) lost = !put<kIsHalf>(run, d, gated ? kRounds / 2 : kRounds, wg, round);
    return !ptx::named_barrier_any<128>(2 + wg, lost);
  }

 private:
  template <bool kIsHalf, class Program>
  ETC_DEVICE bool put(
      const Run<Program>& run, float (&d)[128], u32 rounds, u32 wg, u32& round) const {
    const u32 lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
    const u32 row = warp * 16 + ((lane >> 3) & 1) * 8 + (lane & 7);
    const u32 unit = lane >> 4;
    const u32 origin = out(wg) + row * 128;
#pragma unroll
    for (u32 h = 0; h < kRounds; ++h, ++round) {
      if (Program::kHasGate && h == rounds) break;
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

// The tile stays on this rank: row-major, through a tensor map that clips it.
template <class Task>
struct matmul_store {
  template <class Call, class Program>
  ETC_DEVICE static bool store(
      const Matmul& matmul, const Run<Program>& run, const typename Call::Coord& c, u32, u32& round,
      u32&, u32& entered, Waiter who) {
    Box y = Call::template box<Call::kReads>(run.g, c);
    y.y += (blockIdx.x & 1) * Matmul::kRows;
    constexpr u32 kCount = Call::kGated ? Matmul::kRounds / 2 : Matmul::kRounds;
    const bool done = matmul.drain_tile(run, kCount, round, [&](u32 wg, u32 h) {
#pragma unroll
      for (u32 chunk = 0; chunk < 2; ++chunk) {
        const i32 column = y.x + i32((h * 2 + chunk) * 64);
        ptx::store_box(
            {y.map, column, y.y + i32(wg * 64), y.z},
            matmul.out(wg) + chunk * Matmul::kChunkBytes);
      }
    });
    if (!done) return false;
    if constexpr (Call::kNotifies > 0) Matmul::finish_stores();
    return Matmul::notify_kept<Call>(run, c, entered, who);
  }
};

// silu(x @ gate.T) * (x @ up.T), 128 columns wide.
template <class Task>
struct matmul_gated : matmul_store<Task> {};

// The tile goes to the slot of its owner, as the workers' shared-memory images.
template <class Task>
struct matmul_send {
  static constexpr int kUnroll = 8;  // 16-byte stores in flight a thread; 16 is slower

  ETC_DEVICE static u64 scratch(u64 workspace, u32 image) {
    return workspace + (u64(blockIdx.x) * 2 + (image & 1)) * Matmul::kImageBytes;
  }

  // `images` counts tiles that went through the scratch ring.
  template <class Call, class Program>
  ETC_DEVICE static bool store(
      const Matmul& matmul, const Run<Program>& run, const typename Call::Coord& c, u32, u32& round,
      u32& images, u32&, Waiter who) {
    const auto slot = Call::template operand<2>(run.g, c);
    const bool own = slot.rank == run.g.rank;
    u64 to = u64(slot.at()) + (blockIdx.x & 1) * Matmul::kImageBytes;
    if (!own) {
      to = scratch(run.g.workspace, images);
      const u32 parity = (images / 2 & 1) ^ 1;
      const bool came = wait_mbarrier(run, matmul.sent(images & 1), parity);
      if (!__all_sync(~0u, came)) return false;
      ptx::fence_proxy_async();  // generic reads of the scratch before the next bulk store
    }
    const bool done = matmul.drain_tile(run, Matmul::kRounds, round, [&](u32 wg, u32 h) {
      const u64 at = to + wg * (Matmul::kImageBytes / 2) + h * Matmul::kRoundBytes;
      ptx::store_bytes(at, matmul.out(wg), Matmul::kRoundBytes);
    });
    if (!done) return false;
    Matmul::finish_stores();
    if (own) {
      notify_all<Program, Call>(run, c, 2);
    } else {
      if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(matmul.ready(images & 1));
      ++images;
    }
    return true;
  }

  // One warp of the transfer lane forwards its half of an image; `idle()` may use the
  // time until the image is ready, and returns false if the program was aborted.
  template <class Call, class Program, class Idle>
  ETC_DEVICE static bool send(
      const Matmul& matmul, const Run<Program>& run, const typename Call::Coord& c, u32 half,
      u32& images, u32& entered, Waiter who, Tracer<Program>& trace, Idle idle) {
    const auto slot = Call::template operand<2>(run.g, c);
    if (slot.rank == run.g.rank) return true;
    const u32 lane = threadIdx.x & 31;
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
    const u64 share = half * (Matmul::kImageBytes / 2) + lane * 16;
    const u64 from = scratch(run.g.workspace, images) + share;
    const u64 to = u64(slot.at()) + (blockIdx.x & 1) * Matmul::kImageBytes + share;
#pragma unroll 1
    for (u32 i = 0; i < Matmul::kImageBytes / 1024; i += kUnroll) {
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
