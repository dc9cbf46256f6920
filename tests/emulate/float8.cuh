#pragma once
#include "worker/task.cuh"

namespace etc {

template <class Task>
struct halve {
  static void run(const Task& task) {
    const auto x = task.template operand<0>();
    const auto y = task.template operand<1>();
    const auto z = task.template operand<2>();
    for (i32 n = task.thread; n < x.size[0]; n += Task::threads) {
      *y.at(n) = *x.at(n) / 2;
      *z.at(n) = e4m3::from(*x.at(n) / 2);
    }
  }
};

}  // namespace etc
