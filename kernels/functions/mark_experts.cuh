// For each expert a word with one bit for each of 32 tokens that chose it; and the largest
// id, by its bits, that is neither an expert's nor -1, or 0 if there is none.
#pragma once
#include "worker/task.cuh"

namespace etc {

template <class Task>
struct mark_experts {
  ETC_DEVICE static void run(const Task& task) {
    constexpr i32 kExperts = Task::kExperts, kTopK = Task::kTopK;
    const auto ids = task.template operand<0>();
    for (i32 i = task.thread; i <= kExperts; i += Task::threads) task.scratch[i] = 0;
    task.sync();
    const i32 num_choices = ids.size[0] * kTopK;
    for (i32 i = task.thread; i < num_choices; i += Task::threads) {
      const i32 token = i / kTopK;
      const u32 id = ptx::load4_l2(u64(ids.at(token, i % kTopK)));
      if (id < u32(kExperts)) {
        atomicOr(&task.scratch[id], 1u << token);
      } else if (id != ~0u) {
        atomicMax(&task.scratch[kExperts], id);
      }
    }
    task.sync();
    for (i32 i = task.thread; i < kExperts; i += Task::threads) {
      *task.template operand<1>().at(i) = i32(task.scratch[i]);
    }
    if (task.thread == 0) *task.template operand<2>().at() = i32(task.scratch[kExperts]);
  }
};

}  // namespace etc
