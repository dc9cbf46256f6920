// Copies chosen rows to adjacent places. Warps take the rows in turn.
#pragma once
#include "functions/copy_row.cuh"
#include "worker/task.cuh"

namespace etc {

template <class Task>
struct pack_rows {
  static constexpr int kUnroll = 8;
  static constexpr i32 kWarps = Task::threads / 32;
  static_assert(Task::threads % 32 == 0);

  ETC_DEVICE static void run(const Task& task) {
    const auto x = task.template operand<0>();
    const auto numbers = task.template operand<1>();
    const auto packed = task.template operand<2>();
    const u32 bytes = u32(x.size[1]) * u32(sizeof(*x.base));
#pragma unroll 1
    for (i32 n = task.thread / 32; n < numbers.size[0]; n += kWarps) {
      const i32 row = i32(ptx::load4_l2(u64(numbers.at(n))));
      copy_row<kUnroll>(task.thread % 32, u64(packed.at(n)), u64(x.at(row)), bytes);
    }
  }
};

}  // namespace etc
