// The experts that one token picks, and their weights, by one warp.
#pragma once
#include "functions/best_experts.cuh"
#include "worker/task.cuh"

namespace etc {

template <class Task>
struct pick_token {
  ETC_DEVICE static void run(const Task& task) {
    if (task.thread >= 32) return;
    using Best = typename BestExperts<Task::kExperts, Task::kTopK, Task::kNormalize>::OneToken;
    Best best(u64(task.template operand<0>().at()));
    best.pick_first(Task::kTopK);
    const float weight = best.weight();
    if (task.thread < Task::kTopK) {
      *task.template operand<1>().at(0, task.thread) = i32(best.expert());
      *task.template operand<2>().at(0, task.thread) = weight;
    }
  }
};

}  // namespace etc
