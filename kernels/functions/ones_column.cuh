// Fills a matrix: kFirst in the first column, else 0.
#pragma once
#include "worker/task.cuh"

namespace etc {

template <class Task>
struct ones_column {
  ETC_DEVICE static void run(const Task& task) {
    const auto y = task.template operand<0>();
    const i32 across = y.size[1] / 8;  // units of eight elements
#pragma unroll 1
    for (i32 i = task.thread; i < y.size[0] * across; i += Task::threads) {
      const i32 row = i / across, unit = i % across;
      const u32 first = unit == 0 ? pack<Task::kIsHalf>(Task::kFirst, 0.0f) : 0;
      ptx::store16(u64(y.at(row, unit * 8)), make_uint4(first, 0, 0, 0));
    }
  }
};

}  // namespace etc
