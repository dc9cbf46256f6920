// y = x @ w.T.
#pragma once
#include "functions/epilogue.cuh"

namespace etc {

template <class Task>
struct store : Epilogue {
  static constexpr bool kOnlyRounds = true;
};

}  // namespace etc
