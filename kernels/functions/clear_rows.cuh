// Clears rows.
#pragma once
#include "worker/task.cuh"

namespace etc {

template <class Task>
struct clear_rows {
  ETC_DEVICE static void run(const Task& task) {
    const auto y = task.template operand<0>();
    const i32 across = y.size[1] / 8;  // units of eight elements
#pragma unroll 1
    for (i32 i = task.thread; i < y.size[0] * across; i += Task::threads) {
      ptx::store16(u64(y.at(i / across, i % across * 8)), uint4{});
    }
  }
};

}  // namespace etc
