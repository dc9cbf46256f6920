// Lays the rows of all experts out in tiles: how many tokens of earlier blocks chose each
// expert, where its rows begin, and for each tile its expert, rows and first rank. If asked to,
// lists the rows' tokens too.
#pragma once
#include "ptx/warp.cuh"
#include "worker/task.cuh"

namespace etc {

template <class Task>
struct plan_tiles {
  static constexpr int kExperts = Task::kExperts, kTileRows = Task::kTileRows;
  static constexpr int kPadding = 32;  // an expert's rows and its tiles begin at a multiple
  static_assert(kTileRows % kPadding == 0);
  static_assert(kExperts <= 256);

  ETC_DEVICE static void run(const Task& task) {
    const Layout layout(task.scratch);
    count_all(task, layout);
    task.sync();
    if (task.thread < 32) lay_out(task, layout);
    task.sync();
    fill(task, layout);
    list(task, layout);
  }

 private:
  // In scratch, by expert: its tokens, first row, first tile.
  struct Layout {
    u32 *tokens, *row, *tile;
    ETC_DEVICE explicit Layout(u32* scratch)
        : tokens(scratch), row(scratch + kExperts), tile(scratch + 2 * kExperts) {}
  };

  // 2^bits neighbouring lanes go through an expert's blocks, four blocks a lane.
  ETC_DEVICE static void count_all(const Task& task, const Layout& layout) {
    constexpr int kWarps = Task::threads / 32, kEach = (kExperts + kWarps - 1) / kWarps;
    // NOTE: of few blocks, fewer at once: code that is run once costs more than its loads.
    constexpr int kMost = kEach < 8 ? kEach : 8, kFew = kEach < 2 ? kEach : 2;
    constexpr i32 kFewBlocks = 64;
    const i32 blocks = task.template operand<0>().size[1];
    const i32 bits = 32 - __clz((minimum(blocks, 128) - 1) / 4);
    if (Task::threads >> bits >= kExperts) {
      count<1, false>(task, layout, bits);
    } else if (blocks % 4 == 0 && blocks <= kFewBlocks) {
      count<kFew, true>(task, layout, bits);
    } else if (blocks % 4 == 0) {
      count<kMost, true>(task, layout, bits);
    } else {
      count<kMost, false>(task, layout, bits);
    }
  }

  // kAtOnce experts a lane. NOTE: behind the last expert and the last block these are read
  // again, so that nothing stands between loads.
  template <int kAtOnce, bool kAligned>
  ETC_DEVICE static void count(const Task& task, const Layout& layout, i32 bits) {
    const auto chosen = task.template operand<0>();
    const auto before = task.template operand<1>();
    const i32 blocks = chosen.size[1], lane = task.thread % 32, last = (1 << bits) - 1;
    const i32 place = lane & last, own = task.thread >> bits, step = Task::threads >> bits;
#pragma unroll 1
    for (i32 first = 0; first < kExperts; first += kAtOnce * step) {
      const auto expert = [&](int i) {
        return minimum(first + i * step + own, kExperts - 1);
      };
      u32 sum[kAtOnce] = {};  // of the expert's tokens up to this lane's last
#pragma unroll 1
      for (i32 begin = 0; begin < blocks; begin += 4 << bits) {
        const i32 b = begin + place * 4;
        u32 tokens[kAtOnce][4];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) read<kAligned>(chosen, expert(i), b, tokens[i]);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const u32 earlier = __shfl_sync(~0u, sum[i], lane | last);
          sum[i] = place == 0 ? earlier : 0;
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            tokens[i][j] = b + j < blocks ? __popc(tokens[i][j]) : 0;
            sum[i] += tokens[i][j];
          }
        }
#pragma unroll 1
        for (i32 distance = 1; distance <= last; distance *= 2) {
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) {
            const u32 other = __shfl_up_sync(~0u, sum[i], distance);
            if (place >= distance) sum[i] += other;
          }
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          write<kAligned>(before, expert(i), b, tokens[i], sum[i]);
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (place == last) layout.tokens[expert(i)] = sum[i];
      }
    }
  }

  template <bool kAligned, class Words>
  ETC_DEVICE static void read(const Words& words, i32 e, i32 b, u32 (&word)[4]) {
    const i32 last = words.size[1] - 1;
    if constexpr (kAligned) {
      const uint4 v = ptx::load16_l2(u64(words.at(e, minimum(b, last - 3))));
      word[0] = v.x, word[1] = v.y, word[2] = v.z, word[3] = v.w;
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        word[j] = ptx::load4_l2(u64(words.at(e, minimum(b + j, last))));
      }
    }
  }

  // The counts before four blocks, of `tokens` each; with them there are `sum`.
  template <bool kAligned, class Words>
  ETC_DEVICE static void write(
      const Words& words, i32 e, i32 b, const u32 (&tokens)[4], u32 sum) {
    u32 at[4];
#pragma unroll
    for (int j = 3; j >= 0; --j) {
      sum -= tokens[j];
      at[j] = sum;
    }
    if constexpr (kAligned) {
      if (b < words.size[1]) {
        ptx::store16(u64(words.at(e, b)), make_uint4(at[0], at[1], at[2], at[3]));
      }
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (b + j < words.size[1]) *words.at(e, b + j) = i32(at[j]);
      }
    }
  }

  // One warp; each lane has neighbouring experts.
  ETC_DEVICE static void lay_out(const Task& task, const Layout& layout) {
    constexpr int kOfLane = (kExperts + 31) / 32;
    const auto expert_row = task.template operand<6>();
    u32 tokens[kOfLane], tiles = 0, rows = 0;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      const i32 e = task.thread * kOfLane + i;
      tokens[i] = e < kExperts ? layout.tokens[e] : 0;
      tiles += tiles_of(tokens[i]);
      rows += padded(tokens[i]);
    }
    tiles = ptx::warp_sum_before(tiles);
    rows = ptx::warp_sum_before(rows);
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      const i32 e = task.thread * kOfLane + i;
      if (e < kExperts) {
        *expert_row.at(e) = i32(layout.row[e] = rows);
        layout.tile[e] = tiles;
      }
      tiles += tiles_of(tokens[i]);
      rows += padded(tokens[i]);
    }
  }

  // As few tiles as can be, as equal as can be; 0 for those that are not needed.
  ETC_DEVICE static void fill(const Task& task, const Layout& layout) {
    const auto tile_expert = task.template operand<2>();
    const auto tile_row = task.template operand<3>();
    const auto tile_rows = task.template operand<4>();
    const auto tile_first = task.template operand<5>();
    const i32 tiles = tile_expert.size[0];
#pragma unroll 1
    for (i32 tile = task.thread; tile < tiles; tile += Task::threads) {
      const i32 e = expert_of(layout, tile);
      const u32 tokens = layout.tokens[e], number = tile - layout.tile[e];
      const u32 least = tiles_of(tokens);
      const u32 share = padded((tokens + least - 1) / maximum(least, 1));
      const bool is_needed = number < least;
      const i32 first = is_needed ? i32(number * share) : 0;
      *tile_expert.at(tile) = is_needed ? e : 0;
      *tile_row.at(tile) = is_needed ? i32(layout.row[e]) + first : 0;
      *tile_rows.at(tile) = is_needed ? minimum(share, i32(tokens) - first) : 0;
      *tile_first.at(tile) = first;
    }
  }

  // NOTE: what each thread reads of the counts, others wrote before the last barrier.
  ETC_DEVICE static void list(const Task& task, const Layout& layout) {
    const auto tokens = task.template operand<7>();
    if (tokens.size[0] == 0) return;
    const auto chosen = task.template operand<0>();
    const auto before = task.template operand<1>();
    const i32 blocks = chosen.size[1];
#pragma unroll 1
    for (i32 i = task.thread; i < kExperts * blocks; i += Task::threads) {
      const i32 e = i / blocks, b = i - e * blocks;
      u32 word = ptx::load4_l2(u64(chosen.at(e, b)));
      i32 row = i32(layout.row[e] + ptx::load4_l2(u64(before.at(e, b))));
#pragma unroll 1
      for (; word != 0; word &= word - 1, ++row) *tokens.at(row) = b * 32 + __ffs(word) - 1;
    }
  }

  // The last expert whose first tile is not behind this one.
  ETC_DEVICE static i32 expert_of(const Layout& layout, i32 tile) {
    i32 e = 0;
#pragma unroll
    for (i32 step = 128; step > 0; step /= 2) {
      if (e + step < kExperts && i32(layout.tile[e + step]) <= tile) e += step;
    }
    return e;
  }
  ETC_DEVICE static u32 tiles_of(u32 tokens) { return (tokens + kTileRows - 1) / kTileRows; }
  ETC_DEVICE static u32 padded(u32 rows) { return (rows + kPadding - 1) / kPadding * kPadding; }
};

}  // namespace etc
