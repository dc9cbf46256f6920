// y = x @ w.T, and the sum of squares of each row of a strip: of an RMSNorm that follows.
#pragma once
#include "functions/epilogue.cuh"

namespace etc {

template <class Task>
struct row_squares : Epilogue {
  ETC_DEVICE static float measure(float value) { return value * value; }
  ETC_DEVICE static float reduce(float a, float b) { return a + b; }
  ETC_DEVICE static void store_row(const Task& task, i32 strip, i32 row, float sum) {
    *task.template operand<1>().at(strip, row) = sum;
  }
};

}  // namespace etc
