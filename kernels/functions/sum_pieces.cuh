// Sums pieces of row-major tiles in order, in fp32.
#pragma once
#include "functions/add_partials.cuh"

namespace etc {

template <class Task>
struct sum_pieces {
  static constexpr int kAtOnce = 4;  // pieces in flight

  ETC_DEVICE static void run(const Task& task) {
    const auto pieces = task.template operand<0>();
    const auto y = last_axes<2>(task.template operand<1>());
    const i32 rows = minimum(pieces.size[1], y.size[0]);
    const i32 columns = minimum(pieces.size[2], y.size[1]);
    Partials<Task>::each(task, rows, columns, [&](i32 row, i32 column) {
      const u64 target = u64(y.at(row, column));
      if constexpr (sizeof(*pieces.base) == 4) {
        typename Partials<Task>::Sum sum = {};
        Partials<Task>::add(pieces, row, column, sum);
        Partials<Task>::template store<sizeof(*y.base)>(target, sum);
      } else {
        ptx::store16(target, sum_of(pieces, row, column));
      }
    });
  }

 private:
  template <class Operand>
  ETC_DEVICE static uint4 sum_of(const Operand& pieces, i32 row, i32 column) {
    const u64 stride = u64(pieces.stride[0]) * 2, source = u64(pieces.at(0, row, column));
    const i32 count = pieces.size[0];
    Sum8<Task::kIsHalf> sum;
#pragma unroll 1
    for (i32 first = 0; first < count; first += kAtOnce) {
      uint4 part[kAtOnce];
#pragma unroll
      for (int p = 0; p < kAtOnce; ++p) {
        part[p] = first + p < count ? ptx::load16_l2(source + (first + p) * stride) : uint4{};
      }
#pragma unroll
      for (int p = 0; p < kAtOnce; ++p) sum.add(part[p]);
    }
    return sum.rounded();
  }
};

}  // namespace etc
