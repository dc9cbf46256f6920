#pragma once
#include "worker/task.cuh"

namespace etc {

template <class Task>
struct score_row {
  static void run(const Task& task) {
    const auto query = task.template operand<0>();
    const auto key = task.template operand<1>();
    const auto score = task.template operand<2>();
    if (task.thread != 0) return;
    float sum = 0;
    for (i32 k = 0; k < key.size[1]; ++k) sum += *query.at(0, k) * *key.at(0, k);
    *score.at(0) = sum;
  }
};

template <class Task>
struct weigh_rows {
  static void run(const Task& task) {
    const auto scores = task.template operand<0>();
    const auto values = task.template operand<1>();
    const auto y = task.template operand<2>();
    for (i32 k = task.thread; k < y.size[1]; k += Task::threads) {
      float sum = 0;
      for (i32 r = 0; r < scores.size[0]; ++r) sum += *scores.at(r) * *values.at(r, k);
      *y.at(0, k) = sum;
    }
  }
};

}  // namespace etc
