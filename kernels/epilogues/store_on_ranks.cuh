// y = x @ w.T, at the same place on several ranks.
#pragma once
#include "functions/epilogue.cuh"

namespace etc {

template <class Task>
struct store_on_ranks : Epilogue {
  static constexpr bool kOnlyRounds = true;
};

}  // namespace etc
