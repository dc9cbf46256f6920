// The CUDA halves of epilogues.py.
#pragma once
#include "functions/epilogue.cuh"

namespace etc {

template <class Task>
struct all_kinds : Epilogue {
  static void apply(const Task& task, i32 row, i32 column, float (&v)[8]) {
    float bias[8];
    load_eight(task.template operand<0>().at(column), bias);
    const float factor = *task.template operand<1>().at(row);
    store_eight(task.template operand<3>().at(row, column), v);
    for (int i = 0; i < 8; ++i) v[i] = v[i] * factor + bias[i];
  }
  static float measure(float v) { return fabsf(v); }
  static float reduce(float a, float b) { return fmaxf(a, b); }
  static void store_row(const Task& task, i32 strip, i32 row, float largest) {
    *task.template operand<4>().at(strip, row) = largest;
  }
  static void finish(const Task&, i32, i32, float (&v)[8], float largest) {
    for (int i = 0; i < 8; ++i) v[i] -= Task::kFactor * largest;
  }
};

template <class Task>
struct gated_sums : Epilogue {
  static float combine(float gate, float up) { return fmaxf(gate, 0) * up; }
  static void apply(const Task& task, i32 row, i32 column, float (&v)[8]) {
    float other[8];
    load_eight(task.template operand<0>().at(row, column), other);
    for (int i = 0; i < 8; ++i) v[i] += other[i];
  }
  static float measure(float v) { return v; }
  static float reduce(float a, float b) { return a + b; }
  static void store_row(const Task& task, i32 strip, i32 row, float sum) {
    *task.template operand<2>().at(strip, row) = sum;
  }
};

template <class Task>
struct only_rounded : Epilogue {
  static constexpr bool kOnlyRounds = true;
  static float combine(float gate, float up) { return gate * up; }
};

template <class Task>
struct unchanged : Epilogue {};

}  // namespace etc
