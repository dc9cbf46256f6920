#pragma once
#include "worker/task.cuh"

namespace etc {

template <class Task>
struct add_before {
  static void run(const Task& task) {
    const auto x = task.template operand<0>();
    const auto before = task.template operand<1>();
    const auto y = task.template operand<2>();
    for (i32 k = task.thread; k < y.size[1]; k += Task::threads) {
      float sum = *x.at(0, k);
      for (i32 row = 0; row < before.size[0]; ++row) sum += *before.at(row, k);
      *y.at(0, k) = sum;
    }
  }
};

}  // namespace etc
