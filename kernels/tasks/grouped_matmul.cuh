// Grouped matrix multiplication: tiles of up to 256 rows of x, all of one group, by 512
// rows of that group's weight, by clusters of two workers.
//
// How many rows a tile has is known only at run time. So the weight's rows are the rows of
// the tensor cores' tile, 64 at a time, and the rows of x its columns, of which any number
// of 16 can be had. Two warpgroups multiply 2 x 64 rows of the weight each. Of a short tile
// (up to 128 rows, where the weight's bytes are what takes time) each worker of the pair
// computes all rows by half of the weight; of a long one half of the rows, by both halves
// one after the other, each of which the pair shares by multicast. The finished tile is
// transposed on its way to the output buffer.
#pragma once
#include "ptx/warp.cuh"
#include "ptx/wgmma_columns.cuh"
#include "tasks/tile_ring.cuh"

namespace etc {

struct GroupedMatmul : TileRing {
  static constexpr u32 kPiece = 16;      // rows of y that one bulk copy moves,
  static constexpr u32 kLoadPiece = 32;  // and rows of x
  static constexpr u32 kMaxRows = 128;   // of a worker
  static_assert(kMaxRows * 128 == kRoundBytes);

  // What the roles have to know of a task; no rows for an empty tile.
  struct Size {
    u32 steps, rows;  // of a worker
    bool is_long;

    ETC_DEVICE u32 packed() const { return steps | rows << 16 | u32(is_long) << 24; }
    ETC_DEVICE static Size of(u32 v) { return {v & 0xffffu, v >> 16 & 0xffu, v >> 24 != 0}; }
    // A long tile's halves of the weight come in turn, a short one's one a worker.
    ETC_DEVICE u32 turns() const { return is_long ? 2 : 1; }
    ETC_DEVICE u32 weight_half(u32 turn) const { return is_long ? turn : blockIdx.x & 1; }
    ETC_DEVICE u32 first_row() const { return is_long ? (blockIdx.x & 1) * rows : 0; }
  };
  template <class Call, class Program>
  ETC_DEVICE static u32 size(const Run<Program>& run, const typename Call::Coord& c) {
    const u32 rows = minimum(Call::template operand<0>(run.g, c).size[0], 2 * kMaxRows);
    if (rows == 0) return 0;
    const bool is_long = rows > kMaxRows;
    const u32 share = is_long ? (rows + 1) / 2 : rows;
    const u32 padded = (share + kPiece - 1) / kPiece * kPiece;
    return Size{num_steps<Call>(run, c), padded, is_long}.packed();
  }

  // One thread. The rows of x end where the tile ends, not where a bulk copy does: what
  // lies behind them is multiplied too, and stored behind the tile's own rows.
  template <class Call, class Program>
  ETC_DEVICE bool load(
      const Run<Program>& run, const typename Call::Coord& c, u32 packed, u32& ring,
      Waiter who) const {
    if (packed == 0) return true;
    const Size size = Size::of(packed);
    const u32 own = blockIdx.x & 1;
    const Box x = Call::template box<0>(run.g, c), w = Call::template box<1>(run.g, c);
    Box other = w;  // the second 128 rows of a stage
    if constexpr (Call::kGated) {
      other = Call::template box<2>(run.g, c);
    } else {
      other.y += 128;
    }
    constexpr u32 kHalf = Call::kGated ? 128 : 256;
    const u32 loaded = (size.rows + kLoadPiece - 1) / kLoadPiece * kLoadPiece;
    for (u32 turn = 0; turn < size.turns(); ++turn) {
      const i32 offset = i32(size.weight_half(turn) * kHalf);
      for (u32 k = 0; k < size.steps; ++k, ++ring) {
        const u32 s = ring % kStages, at = stage(s);
        const i32 depth = i32(k * kDepth);
        if (!wait_mbarrier(run, free(s), (ring / kStages & 1) ^ 1, who)) return false;
        ptx::mbarrier_arrive_expect(full(s), loaded * (kDepth * 2) + kBytesW);
        auto rows = [&](u32 i) -> Box { return {x.map, x.x + depth, x.y + i32(i), x.z}; };
        auto weight = [&](const Box& part) -> Box {
          return {part.map, part.x + depth, part.y + offset, part.z};
        };
        if (size.is_long) {
          ptx::load_box_multicast(
              at + kBytesX + own * (kBytesW / 2), weight(own ? other : w), full(s), 3);
          for (u32 i = 0; i < loaded; i += kLoadPiece) {
            ptx::load_box(at + i * (kDepth * 2), rows(size.first_row() + i), full(s));
          }
        } else {
          ptx::load_box(at + kBytesX, weight(w), full(s));
          ptx::load_box(at + kBytesX + kBytesW / 2, weight(other), full(s));
          for (u32 i = own * kLoadPiece; i < loaded; i += 2 * kLoadPiece) {
            ptx::load_box_multicast(at + i * (kDepth * 2), rows(i), full(s), 3);
          }
        }
      }
    }
    return true;
  }

  // A consumer warpgroup multiplies its share of a tile and puts it into the output buffer.
  template <bool kIsHalf, bool kWeightIsKN, class Program>
  ETC_DEVICE bool consume(
      const Run<Program>& run, u32 packed, bool gated, u32& ring, u32& round, Waiter who) const {
    static_assert(!kWeightIsKN);
    const Size size = Size::of(packed);
    bool going = true;
    for (u32 turn = 0; turn < size.turns() && going; ++turn) {
      with_columns<kPiece>(size.rows, [&](auto columns) {
        going = multiply<kIsHalf, decltype(columns)::value>(
            run, size.steps, gated, ring, round, who);
      });
    }
    return going;
  }

 private:
  template <int n>
  struct Columns {
    static constexpr int value = n;
  };
  template <u32 n, class F>
  ETC_DEVICE static void with_columns(u32 rows, F f) {
    if (rows == n) {
      f(Columns<n>{});
    } else if constexpr (n < kMaxRows) {
      with_columns<n + kPiece>(rows, f);
    }
  }

  template <bool kIsHalf, int kColumns, class Program>
  ETC_DEVICE bool multiply(
      const Run<Program>& run, u32 steps, bool gated, u32& ring, u32& round, Waiter who) const {
    const u32 thread = ptx::thread();
    const u32 lane = thread & 31, wg = __shfl_sync(~0u, thread >> 7, 0);
    const u32 own = descriptor_base();
    const u32 x0 = __shfl_sync(~0u, own | 0x10000u, 0);
    const u32 w0 = __shfl_sync(~0u, (own + (kBytesX + wg * 8192) / 16) | 0x10000u, 0);
    // NOTE: set, though the first product need not add: otherwise they would be alive all
    // through the lane's loop, those of each number of columns beside the others.
    float d[2][kColumns / 2] = {};
    bool lost = multiply_steps(run, steps, ring, lane, who, [&](u32 s, u32 k) {
      const u32 x = x0 + s * (kStageBytes >> 4), w = w0 + s * (kStageBytes >> 4);
#pragma unroll
      for (u32 q = 0; q < 4; ++q) {
#pragma unroll
        for (u32 b = 0; b < 2; ++b) {
          ptx::wgmma_columns<kIsHalf, kColumns>(
              d[b], ptx::matrix_descriptor(w + b * (kBytesW / 32) + 2 * q),
              ptx::matrix_descriptor(x + 2 * q), (k | q) != 0);
        }
      }
    });
    if (gated) {
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) {
        d[0][i] = __fdividef(d[0][i], 1.0f + __expf(-d[0][i])) * d[1][i];
      }
    }
    if (!lost) lost = !put<kIsHalf, kColumns>(run, d[0], wg, round, who);
    if (!gated && !lost) lost = !put<kIsHalf, kColumns>(run, d[1], wg, round, who);
    return !ptx::named_barrier_any<128>(2 + wg, lost);
  }

  // 64 rows of the weight by kColumns rows of x become kColumns rows of 64 elements.
  template <bool kIsHalf, int kColumns, class Program>
  ETC_DEVICE bool put(
      const Run<Program>& run, const float (&d)[kColumns / 2], u32 wg, u32& round,
      Waiter who) const {
    const u32 thread = ptx::thread(), lane = thread & 31, warp = (thread >> 5) & 3;
    const u32 row = (lane >> 4) * 8 + (lane & 7);  // and 16 more each time
    const u32 unit = warp * 2 + ((lane >> 3) & 1);
    const u32 origin = out(wg) + row * 128 + ((unit ^ (row & 7)) << 4);
    const bool came = wait_mbarrier(run, emptied(wg), (round & 1) ^ 1, who);
    ++round;
    if (!__all_sync(~0u, came)) return false;
#pragma unroll
    for (int j = 0; j < kColumns / 16; ++j) {
      const float* v = d + j * 8;
      ptx::store_matrix4_transposed(
          origin + j * 2048, pack<kIsHalf>(v[0], v[1]), pack<kIsHalf>(v[2], v[3]),
          pack<kIsHalf>(v[4], v[5]), pack<kIsHalf>(v[6], v[7]));
    }
    ptx::fence_proxy_async_shared();
    ptx::mbarrier_arrive(filled(wg));
    return true;
  }
};

// The tile stays on this rank, through a tensor map that clips it.
template <class Task>
struct grouped_store {
  template <class Call, class Program>
  ETC_DEVICE static bool store(
      const GroupedMatmul& matmul, const Run<Program>& run, const typename Call::Coord& c,
      u32 packed, u32& round, u32&, u32& entered, Waiter who) {
    const auto size = GroupedMatmul::Size::of(packed);
    const Box y = Call::template box<Call::kReads>(run.g, c);
    constexpr u32 kHalf = Call::kGated ? 128 : 256;
    for (u32 turn = 0; turn < size.turns() && size.rows > 0; ++turn) {
      const i32 column = y.x + i32(size.weight_half(turn) * kHalf);
      const i32 row = y.y + i32(size.first_row());
      const bool done = matmul.drain_tile<kHalf / 128>(run, round, who, [&](u32 wg, u32 h) {
        for (u32 i = 0; i < size.rows; i += GroupedMatmul::kPiece) {
          ptx::store_box(
              {y.map, column + i32(h * 128 + wg * 64), row + i32(i), y.z},
              matmul.out(wg) + i * 128);
        }
      });
      if (!done) return false;
    }
    return GroupedMatmul::notify_stored<Call>(run, c, entered, who);
  }
};

// silu(x @ gate.T) * (x @ up.T).
template <class Task>
struct grouped_gated : grouped_store<Task> {};

}  // namespace etc
