// y = the activation of x @ gate.T and x @ up.T.
#pragma once
#include "functions/activation.cuh"
#include "functions/epilogue.cuh"

namespace etc {

template <class Task>
struct activated : Epilogue {
  static constexpr bool kOnlyRounds = true;

  ETC_DEVICE static float combine(float gate, float up) {
    return ActivationOf<Task>::apply(gate, up);
  }
};

}  // namespace etc
