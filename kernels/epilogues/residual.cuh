// y = x @ w.T + residual.
#pragma once
#include "functions/epilogue.cuh"

namespace etc {

template <class Task>
struct residual : Epilogue {
  ETC_DEVICE static void apply(const Task& task, i32 row, i32 column, float (&values)[8]) {
    float addend[8];
    load_eight(task.template operand<0>().at(row, column), addend);
#pragma unroll
    for (u32 i = 0; i < 8; ++i) values[i] += addend[i];
  }
};

}  // namespace etc
