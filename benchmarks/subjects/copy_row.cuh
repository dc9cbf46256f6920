// The least that a task can do: copy one row of 32 numbers.
#pragma once
#include "worker/task.cuh"

namespace etc {

template <class Task>
struct copy_row {
  ETC_DEVICE static void run(const Task& task) {
    const auto from = task.template operand<0>();
    const auto to = task.template operand<1>();
    if (task.thread < to.size[1]) *to.at(0, task.thread) = *from.at(0, task.thread);
  }
};

}  // namespace etc
