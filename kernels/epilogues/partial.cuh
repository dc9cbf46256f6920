// Partial sums in fp32, of a slice of k: stored without rounding.
#pragma once
#include "functions/epilogue.cuh"

namespace etc {

template <class Task>
struct partial : Epilogue {};

}  // namespace etc
