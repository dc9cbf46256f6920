#pragma once
#include "worker/task.cuh"

namespace etc {

// A row's place among all rows sorted by expert, and each expert's first row and number.
template <class Task>
struct plan_rows {
  static void run(const Task& task) {
    const auto expert = task.template operand<0>();
    const auto count = task.template operand<1>();
    const auto first = task.template operand<2>();
    const auto place = task.template operand<3>();
    for (i32 e = task.thread; e < count.size[0]; e += Task::threads) {
      i32 mine = 0, before = 0;
      for (i32 i = 0; i < expert.size[0]; ++i) {
        mine += *expert.at(i) == e;
        before += *expert.at(i) < e;
      }
      *count.at(e) = mine;
      *first.at(e) = before;
    }
    for (i32 i = task.thread; i < place.size[0]; i += Task::threads) {
      i32 before = 0;
      for (i32 k = 0; k < expert.size[0]; ++k) {
        before += *expert.at(k) < *expert.at(i) || (*expert.at(k) == *expert.at(i) && k < i);
      }
      *place.at(i) = before;
    }
  }
};

template <class Task>
struct move_row {
  static void run(const Task& task) {
    const auto x = task.template operand<0>();
    const auto packed = task.template operand<1>();
    for (i32 k = task.thread; k < packed.size[1]; k += Task::threads) {
      *packed.at(0, k) = *x.at(0, k);
    }
  }
};

template <class Task>
struct double_rows {
  static void run(const Task& task) {
    const auto packed = task.template operand<0>();
    const auto y = task.template operand<1>();
    const i32 columns = y.size[1];
    for (i32 k = task.thread; k < y.size[0] * columns; k += Task::threads) {
      *y.at(k / columns, k % columns) = 2 * *packed.at(k / columns, k % columns);
    }
  }
};

}  // namespace etc
