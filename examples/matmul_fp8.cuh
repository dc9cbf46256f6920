// The CUDA half of examples/matmul_fp8.py.
#pragma once
#include "functions/epilogue.cuh"

namespace etc {

template <class Task>
struct quantise : Epilogue {
  static float measure(float v) { return fabsf(v); }
  static float reduce(float a, float b) { return fmaxf(a, b); }
  static void store_row(const Task& task, i32 strip, i32 row, float largest) {
    *task.template operand<1>().at(strip, row) = fmaxf(largest, 1e-30f) / 448;
  }
  static void finish(const Task& task, i32 row, i32 column, float (&v)[8], float largest) {
    const float factor = 448 / fmaxf(largest, 1e-30f);
    for (i32 i = 0; i < 8; ++i) v[i] *= factor;
  }
};

}  // namespace etc
