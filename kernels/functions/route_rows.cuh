// The top-k experts of up to 128 rows, their weights, and the tiles of the experts' rows.
#pragma once
#include "functions/best_experts.cuh"
#include "worker/task.cuh"

namespace etc {

template <class Task>
struct route_rows {
  static constexpr i32 kTopK = Task::kTopK, kExperts = Task::kExperts;
  static constexpr i32 kWarps = Task::threads / 32;
  static constexpr i32 kTogether = 2;           // rows for which a warp chooses in parallel
  static constexpr i32 kMost = 128, kWords = kMost / 32;  // rows, and words with a bit for each
  static constexpr i32 kPerLane = (kExperts + 31) / 32;   // adjacent experts of a lane
  static constexpr u32 kNone = 0xffff;          // the choice of an unused row
  using Best = BestExperts<kExperts, kTopK, Task::kNormalize>;

  ETC_DEVICE static void run(const Task& task) {
    run(task, [] { return true; });
  }
  // ready(): the logits are there.
  template <class Ready>
  ETC_DEVICE static void run(const Task& task, Ready ready) {
    static_assert(kExperts <= Task::threads);
    static_assert(Layout::kBytes <= Shared::kScratchBytes);
    const Layout layout(task.scratch);
    const i32 rows = task.template operand<0>().size[0];
    for (i32 i = task.thread; i < kExperts * kWords; i += Task::threads) layout.chosen[i] = 0;
    if (!ready()) return;
    task.sync();
    if (rows <= kWarps) {
      choose<1>(task, layout, 0, rows);
    } else {
#pragma unroll 1
      for (i32 first = 0; first < rows; first += kWarps * kTogether) {
        choose<kTogether>(task, layout, first, rows);
      }
    }
    task.sync();
    const i32 most = task.number_tile_rows(task.g);
    const bool gathers = task.number_gathers(task.g) != 0;
    if (task.thread < 32) number_tiles(task.thread, layout, most, gathers);
    task.sync();
    list_tiles(task, layout, most, gathers, rows);
    locate(task, layout, most, gathers, rows);
  }

 private:
  // In scratch memory: for each expert a bit for each row that chose it, and its first tile, then
  // the number of all tiles; and the choices of each row.
  struct Layout {
    static constexpr i32 kBytes = (kExperts * (kWords + 1) + 1) * 4 + kMost * kTopK * 2;
    u32 *chosen, *tile;
    u16* choice;

    ETC_DEVICE explicit Layout(u32* scratch)
        : chosen(scratch),
          tile(scratch + kExperts * kWords),
          choice(reinterpret_cast<u16*>(tile + kExperts + 1)) {}
    // The number of rows that chose an expert, of those before row `end`.
    ETC_DEVICE i32 count(i32 expert, i32 end = kMost) const {
      i32 sum = 0;
#pragma unroll
      for (i32 w = 0; w < kWords; ++w) {
        const i32 left = end - w * 32;
        const u32 mask = left >= 32 ? ~0u : left <= 0 ? 0u : (1u << left) - 1;
        sum += __popc(chosen[expert * kWords + w] & mask);
      }
      return sum;
    }
  };

  // Each warp chooses for kRows rows in parallel.
  template <int kRows>
  ETC_DEVICE static void choose(const Task& task, const Layout& layout, i32 first, i32 rows) {
    const auto logits = task.template operand<0>();
    const auto position = task.template operand<1>();
    const u32 lane = task.thread % 32;
    typename Best::template Picks<kRows> picks = {};
    float all[kRows] = {};
    bool is_used[kRows];
    const auto row = [&](int n) { return first + task.thread / 32 + n * kWarps; };
#pragma unroll
    for (int n = 0; n < kRows; ++n) {
      // Rows after the last one read it again.
      const i32 known = minimum(row(n), rows - 1);
      is_used[n] = i32(ptx::load4_l2(u64(position.at() + known))) >= 0;
      Best::read(u64(logits.at(known, lane * Best::kEach)), lane, picks.keys[n]);
    }
#pragma unroll
    for (int n = 0; n < kRows; ++n) all[n] = Best::sum_all(picks.keys[n]);
    picks.sort_keys();
    picks.pick(lane, 0, kTopK);
#pragma unroll
    for (int n = 0; n < kRows; ++n) {
      const float weight = Best::weight(picks.logit[n], all[n]);
      if (row(n) < rows && lane < kTopK) {
        write(task, layout, row(n), picks.chosen[n], weight, is_used[n]);
      }
    }
  }

  // Each lane has one choice.
  ETC_DEVICE static void write(
      const Task& task, const Layout& layout, i32 row, u32 expert, float weight, bool is_used) {
    const i32 lane = task.thread % 32;
    auto ids = task.template operand<2>();
    *at_choice(ids, row, lane) = is_used ? i32(expert) : -1;
    *task.template operand<3>().at(row, lane) = is_used ? weight : 0.0f;
    layout.choice[row * kTopK + lane] = u16(is_used ? expert : kNone);
    if (is_used) atomicOr(&layout.chosen[expert * kWords + row / 32], 1u << row % 32);
  }

  // The element of a row's choice; axes before these two have one index each.
  template <class Choices>
  ETC_DEVICE static auto* at_choice(const Choices& choices, i32 row, i32 k) {
    return choices.at() + row * choices.stride[Choices::kRank - 2] + k;
  }

  ETC_DEVICE static i32 tiles_of(i32 rows, i32 most, bool gathers) {
    return gathers ? (rows + most - 1) / most : minimum(rows, 1);
  }

  // By one warp.
  ETC_DEVICE static void number_tiles(
      i32 lane, const Layout& layout, i32 most, bool gathers) {
    i32 tiles[kPerLane], sum = 0;
#pragma unroll
    for (i32 i = 0; i < kPerLane; ++i) {
      const i32 expert = lane * kPerLane + i;
      tiles[i] = expert < kExperts ? tiles_of(layout.count(expert), most, gathers) : 0;
      sum += tiles[i];
    }
    u32 first = ptx::warp_sum_before(sum);
    if (lane == 31) layout.tile[kExperts] = first + sum;
#pragma unroll
    for (i32 i = 0; i < kPerLane; ++i) {
      const i32 expert = lane * kPerLane + i;
      if (expert < kExperts) layout.tile[expert] = first;
      first += tiles[i];
    }
  }

  // A thread writes the tiles of an expert, then all threads the unused ones.
  ETC_DEVICE static void list_tiles(
      const Task& task, const Layout& layout, i32 most, bool gathers, i32 rows) {
    const auto listed = task.template operand<5>();
    constexpr int kAxis = decltype(listed)::kRank - 2;
    const auto write = [&](i32 tile, i32 expert, i32 count) {
      ptx::store8(u64(listed.at() + 2 * tile), u32(expert), u32(count));
    };
    if (task.thread < kExperts) {
      const i32 count = layout.count(task.thread), first = i32(layout.tile[task.thread]);
      const i32 tiles = tiles_of(count, most, gathers);
#pragma unroll 1
      for (i32 i = 0; i < tiles; ++i) {
        write(first + i, task.thread, gathers ? minimum(count - i * most, most) : rows);
      }
    }
    const i32 used = i32(layout.tile[kExperts]);
    if (task.thread == 0) *task.template operand<6>().at() = used;
#pragma unroll 1
    for (i32 tile = used + task.thread; tile < listed.size[kAxis]; tile += Task::threads) {
      write(tile, 0, 0);
    }
  }

  ETC_DEVICE static void locate(
      const Task& task, const Layout& layout, i32 most, bool gathers, i32 rows) {
    const auto place = task.template operand<4>();
    const i32 stride = task.number_stride(task.g);
#pragma unroll 1
    for (i32 i = task.thread; i < rows * kTopK; i += Task::threads) {
      const i32 row = i / kTopK;
      const u32 expert = layout.choice[i];
      i32 found = -1;
      if (expert != kNone) {
        const i32 number = gathers ? layout.count(expert, row) : row, tile = number / most;
        found = (i32(layout.tile[expert]) + tile) * stride + number - tile * most;
      }
      *at_choice(place, row, i % kTopK) = found;
    }
  }
};

}  // namespace etc
