#pragma once
#include "worker/task.cuh"

namespace etc {

template <class Task>
struct scale {
  static void run(const Task& task) {
    const auto x = task.template operand<0>();
    const auto y = task.template operand<1>();
    const auto z = task.template operand<2>();
    for (i32 n = task.thread; n < x.size[0]; n += Task::threads) {
      const auto v = *x.at(n);
      *y.at(n) = v * 0.75f;
      *z.at(n) = decltype(v)::from(v * 0.75f);
    }
  }
};

}  // namespace etc
