#pragma once
#include "worker/task.cuh"

namespace etc {

template <class Task>
struct negate {
  static void run(const Task& task) {
    const auto x = task.template operand<0>();
    const auto y = task.template operand<1>();
    for (i32 k = task.thread; k < y.size[1]; k += Task::threads) *y.at(0, k) = -*x.at(0, k);
  }
};

// An odd row needs only the early operand, and does not wait. An even row waits twice.
template <class Task>
struct add_if_even {
  template <class Wait>
  static void run(const Task& task, Wait wait) {
    const auto first = task.template operand<0>();
    const auto second = task.template operand<1>();
    const auto y = task.template operand<2>();
    const i32 k = task.thread;
    const i32 begun = *first.at(0, minimum(k, y.size[1] - 1));
    const bool is_even = *first.at(0, 0) % 2 == 0;
    if (is_even && (!wait() || !wait())) return;
    if (k < y.size[1]) *y.at(0, k) = is_even ? begun + *second.at(0, k) : begun;
  }
};

}  // namespace etc
