// y = silu(x @ gate.T) * (x @ up.T).
#pragma once
#include "functions/epilogue.cuh"

namespace etc {

template <class Task>
struct swiglu : Epilogue {
  static constexpr bool kOnlyRounds = true;

  ETC_DEVICE static float combine(float gate, float up) { return silu(gate) * up; }
};

}  // namespace etc
