#pragma once
#include "worker/task.cuh"

namespace etc {

template <class Task>
struct fill_ones {
  static void run(const Task& task) {
    const auto y = task.template operand<0>();
    for (i32 n = task.thread; n < y.size[0]; n += Task::threads) *y.at(n) = 1;
  }
};

}  // namespace etc
