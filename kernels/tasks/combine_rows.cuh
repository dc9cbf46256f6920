// The weighted sum of each token's rows: fp32, in the order in which they were chosen.
// kSplit: of some choices, or all, other ranks have the rows; without any, nothing is done.
#pragma once
#include "worker/task.cuh"

namespace etc {

template <class Task>
struct combine_rows {
  // Where other ranks have some of a token's experts, this one has few.
  static constexpr int kTopK = Task::kTopK, kMost = Task::kSplit ? 4 : 8;
  static constexpr int kAtOnce = kTopK < kMost ? kTopK : kMost;
  static_assert(Task::threads == 32);

  ETC_DEVICE static void run(const Task& task) {
    const auto place = task.template operand<0>();
    const auto product = task.template operand<2>();
    const auto weights = task.template operand<1>();
    const auto y = task.template operand<3>();
    // The last two axes are tokens and columns; there may be one of ranks before them.
    constexpr int kAxis = decltype(y)::kRank - 2;
    const i32 lane = task.thread, tokens = y.size[kAxis], columns = y.size[kAxis + 1];
    const u64 stride = u64(y.stride[kAxis]) * sizeof(*y.base);
#pragma unroll 1
    for (i32 token = 0; token < tokens; ++token) {
      i32 row = 0;
      float weight = 0.0f;
      if (lane < kTopK) {
        row = i32(ptx::load4_l2(u64(place.at(token, lane))));
        weight = __uint_as_float(ptx::load4_l2(u64(weights.at(token, lane))));
      }
      i32 count = kTopK;
      if constexpr (Task::kSplit) {
        count = move_own(row, weight);
        if (count == 0) continue;
      }
      // NOTE: rows and weights are handed round for each part, to save registers.
#pragma unroll 1
      for (i32 first = 0; first < columns; first += 256) {
        const i32 column = first + lane * 8;
        const bool inside = column < columns;
        Sum8<Task::kIsHalf> sum;
#pragma unroll 1
        for (int begin = 0; begin < count; begin += kAtOnce) {
          uint4 v[kAtOnce];
#pragma unroll
          for (int k = 0; k < kAtOnce; ++k) {
            const u64 from = u64(product.at(__shfl_sync(~0u, row, begin + k), column));
            v[k] = inside && begin + k < count ? ptx::load16_l2(from) : uint4{};
          }
#pragma unroll
          for (int k = 0; k < kAtOnce; ++k) {
            sum.add(v[k], __shfl_sync(~0u, weight, begin + k));
          }
        }
        if (inside) ptx::store16(u64(y.at()) + token * stride + column * 2, sum.rounded());
      }
    }
  }

 private:
  // Moves the rows and weights that this rank has to the first lanes; how many they are.
  ETC_DEVICE static i32 move_own(i32& row, float& weight) {
    const i32 lane = threadIdx.x % 32;
    const u32 own = __ballot_sync(~0u, lane < kTopK && row >= 0), count = __popc(own);
    u32 rest = own;
    for (i32 n = 0; n < lane; ++n) rest &= rest - 1;
    const i32 from = rest ? __ffs(rest) - 1 : 0;
    row = __shfl_sync(~0u, row, from);
    weight = __shfl_sync(~0u, weight, from);
    return i32(count);
  }
};

}  // namespace etc
