// y = x @ w.T in fp32, of scores that select. A sum of half of the boxes along k is more exact than one
// of all.
#pragma once
#include "functions/epilogue.cuh"

namespace etc {

template <class Task>
struct logits : Epilogue {
  static constexpr bool kHasTwoSums = true;
};

}  // namespace etc
