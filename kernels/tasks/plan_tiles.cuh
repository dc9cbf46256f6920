// Lays the rows of all experts out in tiles: how many tokens of earlier blocks chose each
// expert, where its rows begin, and for each tile its expert, rows and first ranks.
#pragma once
#include "ptx/warp.cuh"
#include "worker/task.cuh"

namespace etc {

template <class Task>
struct plan_tiles {
  static constexpr int kExperts = Task::kExperts, kTileRows = 256;
  static constexpr int kPieceRows = 8, kPieces = kTileRows / kPieceRows;
  static constexpr int kPadding = 32;  // an expert's rows and its tiles begin at a multiple
  static_assert(kExperts <= 256 && kExperts <= Task::threads);

  ETC_DEVICE static void run(const Task& task) {
    const Layout layout(task.scratch);
    count(task, layout);
    task.sync();
    if (task.thread < 32) lay_out(task, layout);
    task.sync();
    fill(task, layout);
  }

 private:
  // In scratch, by expert: its tokens, first row, rows of a tile, first tile.
  struct Layout {
    u32 *tokens, *row, *share, *tile;
    ETC_DEVICE explicit Layout(u32* scratch)
        : tokens(scratch),
          row(scratch + kExperts),
          share(scratch + 2 * kExperts),
          tile(scratch + 3 * kExperts) {}
  };

  ETC_DEVICE static void count(const Task& task, const Layout& layout) {
    if (task.template operand<0>().size[1] == 1) {
      count_block(task, layout);
    } else {
      count_blocks(task, layout);
    }
  }
  // Of a single block: a thread has one expert.
  ETC_DEVICE static void count_block(const Task& task, const Layout& layout) {
    if (task.thread >= kExperts) return;
    const u64 from = u64(task.template operand<0>().at(task.thread, 0));
    layout.tokens[task.thread] = __popc(ptx::load4_l2(from));
    *task.template operand<1>().at(task.thread, 0) = 0;
  }
  // A warp goes through its experts, by four where their number allows it, and through
  // their blocks by 32 * kRows.
  ETC_DEVICE static void count_blocks(const Task& task, const Layout& layout) {
    constexpr int kWarps = Task::threads / 32, kEach = (kExperts + kWarps - 1) / kWarps;
    constexpr bool kByFour = kEach % 4 == 0 && kExperts % 4 == 0;
    constexpr bool kByTwo = kEach % 2 == 0 && kExperts % 2 == 0;
    constexpr int kAtOnce = kByFour ? 4 : kByTwo ? 2 : 1, kRows = 4;
    const auto chosen = task.template operand<0>();
    const auto before = task.template operand<1>();
    const i32 lane = task.thread % 32, blocks = chosen.size[1];
#pragma unroll 1
    for (i32 e = task.thread / 32 * kEach; e < (task.thread / 32 + 1) * kEach; e += kAtOnce) {
      if (e >= kExperts) break;
      u32 sum[kAtOnce] = {};
#pragma unroll 1
      for (i32 first = 0; first < blocks; first += 32 * kRows) {
        u32 bits[kAtOnce][kRows];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const i32 b = first + r * 32 + lane;
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) {
            bits[i][r] = b < blocks ? ptx::load4_l2(u64(chosen.at(e + i, b))) : 0;
          }
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const i32 b = first + r * 32 + lane;
          if (b - lane >= blocks) break;
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) {
            const u32 own = __popc(bits[i][r]), at = sum[i] + ptx::warp_sum_before(own);
            if (b < blocks) *before.at(e + i, b) = i32(at);
            sum[i] = __shfl_sync(~0u, at + own, 31);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (lane == 0) layout.tokens[e + i] = sum[i];
      }
    }
  }

  // One warp; each lane has neighbouring experts.
  ETC_DEVICE static void lay_out(const Task& task, const Layout& layout) {
    constexpr int kOfLane = (kExperts + 31) / 32;
    const auto expert_row = task.template operand<6>();
    u32 tokens[kOfLane], share[kOfLane], tiles = 0, rows = 0;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      const i32 e = task.thread * kOfLane + i;
      tokens[i] = e < kExperts ? layout.tokens[e] : 0;
      // As few tiles as can be, as equal as can be.
      const u32 least = (tokens[i] + kTileRows - 1) / kTileRows;
      share[i] = padded(least > 0 ? (tokens[i] + least - 1) / least : 1);
      tiles += (tokens[i] + share[i] - 1) / share[i];
      rows += padded(tokens[i]);
    }
    tiles = ptx::warp_sum_before(tiles);
    rows = ptx::warp_sum_before(rows);
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      const i32 e = task.thread * kOfLane + i;
      if (e < kExperts) {
        *expert_row.at(e) = i32(layout.row[e] = rows);
        layout.share[e] = share[i];
        layout.tile[e] = tiles;
      }
      tiles += (tokens[i] + share[i] - 1) / share[i];
      rows += padded(tokens[i]);
    }
  }

  ETC_DEVICE static u32 padded(u32 rows) { return (rows + kPadding - 1) / kPadding * kPadding; }

  ETC_DEVICE static void fill(const Task& task, const Layout& layout) {
    const auto tile_expert = task.template operand<2>();
    const auto tile_row = task.template operand<3>();
    const auto tile_rows = task.template operand<4>();
    const auto piece_first = task.template operand<5>();
    for (i32 tile = task.thread; tile < tile_expert.size[0]; tile += Task::threads) {
      // The last expert whose first tile is not behind this one.
      i32 e = 0;
#pragma unroll
      for (i32 step = 128; step > 0; step /= 2) {
        if (e + step < kExperts && i32(layout.tile[e + step]) <= tile) e += step;
      }
      const i32 share = i32(layout.share[e]), number = tile - i32(layout.tile[e]);
      const i32 rank = number * share, left = i32(layout.tokens[e]) - rank;
      *tile_expert.at(tile) = left > 0 ? e : 0;
      *tile_row.at(tile) = left > 0 ? i32(layout.row[e]) + rank : 0;
      *tile_rows.at(tile) = left > 0 ? minimum(share, left) : 0;
      const u64 to = u64(piece_first.at(tile, 0));
#pragma unroll
      for (u32 p = 0; p < kPieces; p += 4) {
        const u32 first = rank + p * kPieceRows;
        ptx::store16(
            to + p * 4,
            left > 0 ? make_uint4(
                           first, first + kPieceRows, first + 2 * kPieceRows,
                           first + 3 * kPieceRows)
                     : uint4{});
      }
    }
  }
};

}  // namespace etc
