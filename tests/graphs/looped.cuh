#pragma once
#include "worker/task.cuh"

namespace etc {

// A thread for each element of the result.
template <class Task>
struct add_layer {
  static void run(const Task& task) {
    const auto x = task.template operand<0>();
    const auto own = task.template operand<1>();
    const auto w = task.template operand<2>();
    const auto kept = task.template operand<3>();
    const auto part = task.template operand<4>();
    const i32 n = x.size[2], columns = part.size[2];
    for (i32 at = task.thread; at < part.size[1] * columns; at += Task::threads) {
      const i32 row = at / columns, column = at % columns;
      float squares = 0, product = 0;
      for (i32 k = 0; k < n; ++k) {
        squares += *x.at(0, row, k) * *x.at(0, row, k);
        product += *x.at(0, row, k) * *w.at(0, k, column);
      }
      product *= rsqrtf(squares / n + 1);
      *kept.at(0, row, column) += product;
      *part.at(0, row, column) = *own.at(0, row, column) + product;
    }
  }
};

template <class Task>
struct count_up {
  static void run(const Task& task) {
    const auto before = task.template operand<0>();
    const auto after = task.template operand<1>();
    for (i32 k = task.thread; k < 4; k += Task::threads) *after.at(0, 0, k) = *before.at(0, 0, k) + 1;
  }
};

template <class Task>
struct double_up {
  static void run(const Task& task) {
    const auto before = task.template operand<0>();
    const auto after = task.template operand<1>();
    for (i32 k = task.thread; k < 4; k += Task::threads) *after.at(0, 0, k) = 2 * *before.at(0, 0, k);
  }
};

}  // namespace etc
