// The top-k experts of a step's rows and their weights.
#pragma once
#include "functions/best_experts.cuh"
#include "worker/task.cuh"

namespace etc {

template <class Task>
struct RowChoices {
  static constexpr i32 kTopK = Task::kTopK, kWarps = Task::threads / 32;
  using Best = BestExperts<Task::kExperts, kTopK, Task::kNormalize>;

  // Each warp chooses for up to kRows rows in parallel. A row with a position below 0 has expert -1
  // and weight 0. Calls mark(row, k, expert) for choice k of each row.
  template <int kRows, class Logits, class Position, class Ids, class Weights, class Mark>
  ETC_DEVICE static void choose(
      const Task& task, const Logits& logits, const Position& position, const Ids& ids,
      const Weights& weights, Mark mark) {
    const i32 lane = task.thread % 32, rows = logits.size[0];
    typename Best::template Picks<kRows> picks = {};
    float all[kRows] = {};
    bool is_used[kRows];
    const auto row = [&](int n) { return task.thread / 32 + n * kWarps; };
#pragma unroll
    for (int n = 0; n < kRows; ++n) {
      // NOTE: beyond the last row, that row is read again.
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
        const i32 expert = is_used[n] ? i32(picks.chosen[n]) : -1;
        *at_choice(ids, row(n), lane) = expert;
        *at_choice(weights, row(n), lane) = is_used[n] ? weight : 0.0f;
        mark(row(n), lane, expert);
      }
    }
  }

  // The element of choice k of a row. The last axes are rows and choices, others have size 1.
  template <class Choices>
  ETC_DEVICE static auto* at_choice(const Choices& choices, i32 row, i32 k) {
    return choices.at() + row * choices.stride[Choices::kRank - 2] + k;
  }
};

}  // namespace etc
