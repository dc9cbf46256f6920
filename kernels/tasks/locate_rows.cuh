// Where the rows of 32 tokens lie: one row for each expert that a token chose.
// kSplit: the rows of some experts only, those after as many as there are in operand 4; -1
// for the others.
#pragma once
#include "worker/task.cuh"

namespace etc {

template <class Task>
struct locate_rows {
  static_assert(Task::threads == 32);

  ETC_DEVICE static void run(const Task& task) {
    const auto ids = task.template operand<0>();
    const auto chosen = task.template operand<1>();
    const auto before = task.template operand<2>();
    const auto expert_row = task.template operand<3>();
    const auto place = task.template operand<Task::kReads>();
    i32 lower = 0;
    if constexpr (Task::kSplit) lower = task.template operand<4>().size[0];
    const i32 token = task.thread;
    if (token >= ids.size[0]) return;
#pragma unroll 4
    for (i32 k = 0; k < Task::kTopK; ++k) {
      const i32 e = i32(ptx::load4_l2(u64(ids.at(token, k)))) - lower;
      if (Task::kSplit && u32(e) >= u32(Task::kExperts)) {
        *place.at(token, k) = -1;
        continue;
      }
      const u32 earlier = ptx::load4_l2(u64(chosen.at(e))) & ((1u << token) - 1);
      const u32 rank = ptx::load4_l2(u64(before.at(e))) + __popc(earlier);
      *place.at(token, k) = i32(ptx::load4_l2(u64(expert_row.at(e))) + rank);
    }
  }
};

}  // namespace etc
