// RMSNorm of the sum of a residual and the weighted outputs of a row's experts.
#pragma once
#include "functions/rms_norm.cuh"

namespace etc {

// The weighted sum of a row's outputs, in float, in the order of its choices. Lane k of a warp has
// the k-th choice; a place below 0 has no output. kShared: the operands of a shared expert: its
// output, which is added last, and a number whose sigmoid is the weight of it.
template <class Task>
struct AddedExperts {
  using Vectors = RowVectors<Task>;
  static constexpr int kTopK = Task::kTopK;
  static constexpr int kTogether = kTopK < 8 ? kTopK : 8;  // outputs in flight
  static_assert(kTopK <= 32);

  u64 first, row_bytes;
  i32 place;
  float weight;
  u64 shared;
  float shared_weight;

  ETC_DEVICE explicit AddedExperts(const Task& task) {
    const auto places = task.template operand<0>();
    const auto weights = task.template operand<1>();
    const auto outputs = task.template operand<2>();
    const i32 k = minimum(task.thread % 32, kTopK - 1);
    place = i32(ptx::load4_l2(u64(places.at() + k)));
    weight = __uint_as_float(ptx::load4_l2(u64(weights.at() + k)));
    first = u64(outputs.at()), row_bytes = u64(outputs.stride[0]) * 2;
    if constexpr (Task::kShared > 0) shared = u64(task.template operand<3>().at());
    if constexpr (Task::kShared > 1) {
      const u64 logit = u64(task.template operand<4>().at());
      shared_weight = sigmoid(__uint_as_float(ptx::load4_l2(logit)));
    }
  }

  // NOTE: one vector after the other, since the outputs of all would need too many registers.
  ETC_DEVICE void add(i32 column, i32 columns, typename Vectors::Sums& sums) const {
#pragma unroll
    for (int i = 0; i < Vectors::kAtOnce; ++i) {
      const i32 own_column = column + i * Vectors::kStep;
      // A warp's vectors are neighbours: the first lane's is inside if any is.
      if (__shfl_sync(~0u, own_column, 0) >= columns) break;
#pragma unroll 1
      for (int k = 0; k < kTopK; k += kTogether) {
        add_some(k, own_column * 2, own_column < columns, sums[i]);
      }
      if constexpr (Task::kShared > 0) {
        const uint4 words = ptx::load16_l2_if(own_column < columns, shared + own_column * 2);
        sums[i].add(words, Task::kShared > 1 ? shared_weight : 1.0f);
      }
    }
  }

 private:
  ETC_DEVICE void add_some(
      int begin, i32 bytes, bool is_inside, Sum8<Task::kIsHalf>& sum) const {
    uint4 vectors[kTogether];
    i32 row_idx[kTogether];
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      row_idx[k] = __shfl_sync(~0u, place, (begin + k) & 31);
      if (begin + k >= kTopK) row_idx[k] = -1;
      const u64 row = first + u64(maximum(row_idx[k], 0)) * row_bytes;
      vectors[k] = ptx::load16_l2_if(is_inside && row_idx[k] >= 0, row + bytes);
    }
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      const float own_weight = __shfl_sync(~0u, weight, (begin + k) & 31);
      if (row_idx[k] >= 0) sum.add(vectors[k], own_weight);
    }
  }
};

template <class Task>
struct add_experts_norm : NormalizedRow<Task, AddedExperts<Task>> {};

}  // namespace etc
