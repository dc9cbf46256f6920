// The CUDA bodies of examples/bin_sums.py.
#pragma once
#include "worker/task.cuh"

namespace etc {

// A thread for each bin: simple, and slow where there are many rows.
template <class Task>
struct count_bins {
  static void run(const Task& task) {
    const auto keys = task.template operand<0>();
    const auto counts = task.template operand<1>();
    const auto starts = task.template operand<2>();
    const auto place = task.template operand<3>();
    const i32 rows = keys.size[0], bins = counts.size[0];
    for (i32 bin = task.thread; bin < bins; bin += Task::threads) {
      i32 count = 0;
      for (i32 row = 0; row < rows; ++row) count += *keys.at(row) == bin;
      *counts.at(bin) = count;
    }
    task.sync();
    for (i32 bin = task.thread; bin < bins; bin += Task::threads) {
      i32 next = 0;
      for (i32 earlier = 0; earlier < bin; ++earlier) next += *counts.at(earlier);
      *starts.at(bin) = next;
      for (i32 row = 0; row < rows; ++row) {
        if (*keys.at(row) == bin) *place.at(row) = next++;
      }
    }
  }
};

template <class Task>
struct pack_row {
  static void run(const Task& task) {
    const auto row = task.template operand<0>();
    const auto packed = task.template operand<1>();
    for (i32 column = task.thread; column < row.size[1]; column += Task::threads) {
      *packed.at(0, column) = *row.at(0, column);
    }
  }
};

template <class Task>
struct sum_bin {
  static void run(const Task& task) {
    const auto rows = task.template operand<0>();
    const auto total = task.template operand<1>();
    for (i32 column = task.thread; column < total.size[1]; column += Task::threads) {
      float sum = 0;
      for (i32 row = 0; row < rows.size[0]; ++row) sum += *rows.at(row, column);
      *total.at(0, column) = sum;
    }
  }
};

}  // namespace etc
