#pragma once
#include "worker/task.cuh"

namespace etc {

template <class Task>
struct add_to_row {
  static void run(const Task& task) {
    const auto x = task.template operand<0>();
    const auto total = task.template operand<1>();
    for (i32 k = task.thread; k < total.size[1]; k += Task::threads) {
      *total.at(0, k) += *x.at(0, k);
    }
  }
};

}  // namespace etc
