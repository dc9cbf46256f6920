// RMSNorm of the sum of a residual and the parts of a row that all ranks have sent.
#pragma once
#include "functions/rms_norm.cuh"

namespace etc {

// The sum of the parts, in float, in rank order.
template <class Task>
struct AddedRanks {
  using Vectors = RowVectors<Task>;
  static constexpr int kWorld = Task::kWorld;
  static constexpr int kTogether = kWorld < 4 ? kWorld : 4;  // ranks whose parts are in flight

  u64 first, rank_bytes;

  ETC_DEVICE explicit AddedRanks(const Task& task) {
    const auto parts = task.template operand<0>();
    first = u64(parts.at()), rank_bytes = u64(parts.stride[0]) * 2;
  }

  ETC_DEVICE void add(i32 column, i32 columns, typename Vectors::Sums& sums) const {
#pragma unroll
    for (int begin = 0; begin < kWorld; begin += kTogether) {
      uint4 vectors[kTogether][Vectors::kAtOnce];
#pragma unroll
      for (int r = 0; r < kTogether; ++r) {
        if (begin + r < kWorld) {
          Vectors::fetch(first + (begin + r) * rank_bytes, column, columns, vectors[r]);
        }
      }
#pragma unroll
      for (int r = 0; r < kTogether; ++r) {
#pragma unroll
        for (int i = 0; i < Vectors::kAtOnce; ++i) {
          if (begin + r < kWorld) sums[i].add(vectors[r][i]);
        }
      }
    }
  }
};

template <class Task>
struct add_ranks_norm : NormalizedRow<Task, AddedRanks<Task>> {};

}  // namespace etc
