// Divides the rows of all experts into tiles: the first row of each expert; for each tile its expert,
// its rows and the index of its first token in the lists of all experts; how many groups of tiles are
// needed.
#pragma once
#include "ptx/warp.cuh"
#include "worker/task.cuh"

namespace etc {

template <class Task>
struct plan_tiles {
  static constexpr int kExperts = Task::kExperts, kTileRows = Task::kTileRows;
  static constexpr int kPadding = 16;  // alignment of an expert's rows and of its tiles
  static constexpr int kTogether = 4;  // tiles of a group
  static_assert(kTileRows % kPadding == 0);
  static_assert(kExperts <= 512);

  ETC_DEVICE static void run(const Task& task) {
    const Layout layout(task.scratch);
    if (ptx::warp() == 0) lay_out(task, layout);
    task.sync();
    fill(task, layout);
    if (task.thread == 0) {
      constexpr int kLast = kExperts - 1;
      const i32 num_tiles = i32(layout.tile[kLast] + tiles_of(layout.tokens[kLast]));
      *task.template operand<7>().at() = (num_tiles + kTogether - 1) / kTogether;
    }
  }

 private:
  // In scratch memory, per expert: number of tokens, first row, first tile.
  struct Layout {
    u32 *tokens, *row, *tile;
    ETC_DEVICE explicit Layout(u32* scratch)
        : tokens(scratch), row(scratch + kExperts), tile(scratch + 2 * kExperts) {}
  };

  // By one warp; each lane has adjacent experts.
  ETC_DEVICE static void lay_out(const Task& task, const Layout& layout) {
    constexpr int kPerLane = (kExperts + 31) / 32;
    const auto counts = task.template operand<0>();
    const auto expert_row = task.template operand<2>();
    u32 tokens[kPerLane], num_tiles = 0, rows = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const i32 expert = task.thread * kPerLane + i;
      tokens[i] = expert < kExperts ? ptx::load4_l2(u64(counts.at(expert))) : 0;
    }
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      num_tiles += tiles_of(tokens[i]);
      rows += padded(tokens[i]);
    }
    num_tiles = ptx::warp_sum_before(num_tiles);
    rows = ptx::warp_sum_before(rows);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const i32 expert = task.thread * kPerLane + i;
      if (expert < kExperts) {
        layout.tokens[expert] = tokens[i];
        *expert_row.at(expert) = i32(layout.row[expert] = rows);
        layout.tile[expert] = num_tiles;
      }
      num_tiles += tiles_of(tokens[i]);
      rows += padded(tokens[i]);
    }
  }

  // As few tiles as possible, as equal as possible; 0 for unused tiles.
  ETC_DEVICE static void fill(const Task& task, const Layout& layout) {
    const auto tile_expert = task.template operand<3>();
    const auto tile_row = task.template operand<4>();
    const auto tile_rows = task.template operand<5>();
    const auto tile_first = task.template operand<6>();
    const i32 num_tiles = tile_expert.size[0], most = task.template operand<1>().size[0];
#pragma unroll 1
    for (i32 tile = task.thread; tile < num_tiles; tile += Task::threads) {
      const i32 expert = expert_of(layout, tile);
      const u32 tokens = layout.tokens[expert], tile_idx = tile - layout.tile[expert];
      const u32 least = tiles_of(tokens);
      const u32 share = padded((tokens + least - 1) / maximum(least, 1));
      const bool is_used = tile_idx < least;
      const i32 first = is_used ? i32(tile_idx * share) : 0;
      *tile_expert.at(tile) = is_used ? expert : 0;
      *tile_row.at(tile) = is_used ? i32(layout.row[expert]) + first : 0;
      *tile_rows.at(tile) = is_used ? minimum(share, i32(tokens) - first) : 0;
      *tile_first.at(tile) = is_used ? expert * most + first : 0;
    }
  }

  // The last expert whose first tile is at most this one.
  ETC_DEVICE static i32 expert_of(const Layout& layout, i32 tile) {
    i32 expert = 0;
#pragma unroll
    for (i32 step = kExperts > 256 ? 256 : 128; step > 0; step /= 2) {
      if (expert + step < kExperts && i32(layout.tile[expert + step]) <= tile) expert += step;
    }
    return expert;
  }
  ETC_DEVICE static u32 tiles_of(u32 tokens) { return (tokens + kTileRows - 1) / kTileRows; }
  ETC_DEVICE static u32 padded(u32 rows) { return (rows + kPadding - 1) / kPadding * kPadding; }
};

}  // namespace etc
