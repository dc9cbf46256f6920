// The top-k experts of up to kMostRows tokens, and their weights. With kMarks, also for each expert a
// word with one bit for each token that chose it. With kFills, further rows have expert -1, weight 0.
// With kHasCount, so have those of tokens from the number in operand 1 on.
#pragma once
#include "functions/router.cuh"

namespace etc {

template <class Task>
struct choose_experts {
  using Choice = ExpertChoice<Task>;
  static constexpr i32 kExperts = Task::kExperts, kWarps = Task::threads / 32;
  static constexpr i32 kEach = (Task::kMostRows + kWarps - 1) / kWarps;  // rows of a warp
  // Rows that a warp chooses for in parallel. NOTE: with more keys, registers are spilled.
  static constexpr i32 kAtOnce = Choice::kEach > 8 && kEach > 2 ? 2 : kEach;
  static_assert(!Task::kMarks || Task::kMostRows <= 32);

  ETC_DEVICE static void run(const Task& task) {
    run(task, [] { return true; });
  }
  // ready() waits for the logits; false after an abort.
  template <class Ready>
  ETC_DEVICE static void run(const Task& task, Ready ready) {
    if constexpr (Task::kMarks) {
      each_expert(task, [&](i32 expert) { task.scratch[expert] = 0; });
    }
    if (!ready()) return;
    if constexpr (Task::kMarks) task.sync();  // scratch is cleared
    const i32 rows = task.template operand<0>().size[0];
    if constexpr (Task::kFills) fill(task, rows);
    if (kEach == 1 || rows <= kWarps) {
      choose<1>(task, 0);
    } else {
#pragma unroll
      for (i32 first = 0; first < kEach * kWarps; first += kAtOnce * kWarps) {
        choose<kAtOnce>(task, first);
      }
    }
    if constexpr (Task::kMarks) {
      task.sync();
      each_expert(task, [&](i32 expert) {
        *task.template operand<Task::kReads + 2>().at(expert) = i32(task.scratch[expert]);
      });
    }
  }

 private:
  template <int kRows>
  ETC_DEVICE static void choose(const Task& task, i32 first) {
    if constexpr (Task::kFills) {
      if (task.template operand<0>().size[0] == 0) return;  // no logits to read
    }
    Choice::template choose<kRows>(
        task, first, task.template operand<Task::kReads>(),
        task.template operand<Task::kReads + 1>(), [&](i32 row, i32, i32 expert) {
          if constexpr (Task::kHasCount) {
            if (expert < 0) return;
          }
          if constexpr (Task::kMarks) atomicOr(&task.scratch[expert], 1u << row);
        });
  }

  // The rows from `first` on, which no token has.
  ETC_DEVICE static void fill(const Task& task, i32 first) {
    const auto ids = task.template operand<Task::kReads>();
    const auto weights = task.template operand<Task::kReads + 1>();
    const i32 count = ids.size[0] * Task::kTopK;
    for (i32 i = first * Task::kTopK + task.thread; i < count; i += Task::threads) {
      *ids.at(i / Task::kTopK, i % Task::kTopK) = -1;
      *weights.at(i / Task::kTopK, i % Task::kTopK) = 0.0f;
    }
  }

  template <class F>
  ETC_DEVICE static void each_expert(const Task& task, F f) {
    constexpr i32 kSteps = (kExperts + Task::threads - 1) / Task::threads;
#pragma unroll
    for (i32 n = 0; n < kSteps; ++n) {
      const i32 expert = task.thread + n * Task::threads;
      if (expert < kExperts) f(expert);
    }
  }
};

}  // namespace etc
