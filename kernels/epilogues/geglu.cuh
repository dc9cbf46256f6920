// y = gelu(x @ gate.T) * (x @ up.T), with the approximation of GELU by tanh.
#pragma once
#include "functions/epilogue.cuh"

namespace etc {

template <class Task>
struct geglu : Epilogue {
  static constexpr bool kOnlyRounds = true;

  // v / 2 * (1 + tanh(u)) = v / (1 + exp(-2 u)): exact also where tanh is about -1.
  ETC_DEVICE static float combine(float gate, float up) {
    const float u = 0.7978845608f * (gate + 0.044715f * gate * gate * gate);
    return __fdividef(gate, 1.0f + ptx::exp2(u * -2.8853900817779268f)) * up;
  }
};

}  // namespace etc
