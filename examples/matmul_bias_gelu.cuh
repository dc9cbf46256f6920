// The CUDA half of examples/matmul_bias_gelu.py: eight neighbouring columns of a row.
#pragma once
#include "functions/epilogue.cuh"

namespace etc {

template <class Task>
struct bias_gelu : Epilogue {
  static void apply(const Task& task, i32 row, i32 column, float (&v)[8]) {
    float bias[8];
    load_eight(task.template operand<0>().at(column), bias);
    for (i32 i = 0; i < 8; ++i) {
      const float a = v[i] + bias[i], half = 0.5f * a;
      v[i] = half + half * ptx::tanh(a * (0.7978845608f + 0.0356774081f * a * a));
    }
  }
};

}  // namespace etc
