// The CUDA bodies of examples/add_row_sum.py. Operands are numbered as in the call: first
// its reads, then its writes; their sizes are cut off at the tensor's edge.
#pragma once
#include "worker/task.cuh"

namespace etc {

template <class Task>
struct add {
  static void run(const Task& task) {
    const auto a = task.template operand<0>();
    const auto b = task.template operand<1>();
    const auto y = task.template operand<2>();
    const i32 columns = y.size[1];
    for (i32 e = task.thread; e < y.size[0] * columns; e += Task::threads) {
      const i32 row = e / columns, column = e % columns;
      *y.at(row, column) = *a.at(row, column) + *b.at(row, column);
    }
  }
};

// A warp sums a row; on the transfer lane the task has just one warp.
template <class Task>
struct row_sum {
  static void run(const Task& task) {
    const auto y = task.template operand<0>();
    const auto total = task.template operand<1>();
    const i32 lane = task.thread % 32;
    for (i32 row = task.thread / 32; row < y.size[0]; row += Task::threads / 32) {
      float sum = 0;
      for (i32 column = lane; column < y.size[1]; column += 32) sum += *y.at(row, column);
      for (i32 step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
      if (lane == 0) *total.at(row) = sum;
    }
  }
};

}  // namespace etc
