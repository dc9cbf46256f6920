// The CUDA body of examples/norm_matmul.py: a warp for each row.
#pragma once
#include "worker/task.cuh"

namespace etc {

template <class Task>
struct rms_norm {
  static void run(const Task& task) {
    const auto x = task.template operand<0>();
    const auto gain = task.template operand<1>();
    const auto y = task.template operand<2>();
    const i32 lane = task.thread % 32, k = x.size[1];
    for (i32 row = task.thread / 32; row < x.size[0]; row += Task::threads / 32) {
      float sum = 0;
      for (i32 column = lane; column < k; column += 32) {
        const float v = *x.at(row, column);
        sum += v * v;
      }
      for (i32 step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
      const float scale = rsqrtf(sum / k + Task::kEps);
      for (i32 column = lane; column < k; column += 32) {
        *y.at(row, column) = bf16::from(*x.at(row, column) * scale * *gain.at(column));
      }
    }
  }
};

}  // namespace etc
