// y = kCap * tanh(x @ w.T / kCap).
#pragma once
#include "functions/epilogue.cuh"

namespace etc {

template <class Task>
struct soft_cap : Epilogue {
  ETC_DEVICE static void apply(const Task&, i32, i32, float (&values)[8]) {
#pragma unroll
    for (float& value : values) {
      const float power = ptx::exp2(value * (2.8853900817779268f / Task::kCap));  // exp(2 x)
      value = Task::kCap * (1.0f - __fdividef(2.0f, 1.0f + power));
    }
  }
};

}  // namespace etc
