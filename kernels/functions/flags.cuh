// Sums over ranks by flagged words. Bodies return whether all words have come.
#pragma once
#include "event/flags.cuh"
#include "worker/task.cuh"

namespace etc {

template <class Task>
struct push_flagged {
  template <class Flags>
  ETC_DEVICE static bool run(const Task& task, const Flags& flags) {
    const auto x = task.template operand<0>();
    const i32 columns = x.size[decltype(x)::kRank - 1];
    u64 to[Task::kCopies];
    each_copy(task, to);
#pragma unroll 1
    for (i32 column = task.thread * 8; column < columns; column += Task::threads * 8) {
      const uint4 v = ptx::load16_l2(u64(x.at()) + column * 2);
#pragma unroll
      for (int c = 0; c < Task::kCopies; ++c) flags.store16(to[c] + column * 4, v);
    }
    return true;
  }

 private:
  template <int c = 0>
  ETC_DEVICE static void each_copy(const Task& task, u64 (&to)[Task::kCopies]) {
    to[c] = u64(task.template operand<1 + c>().at());
    if constexpr (c + 1 < Task::kCopies) each_copy<c + 1>(task, to);
  }
};

template <class Task>
struct add_flagged {
  static constexpr int kWorld = Task::kWorld;

  template <class Flags>
  ETC_DEVICE static bool run(const Task& task, const Flags& flags) {
    const auto x = task.template operand<0>();
    const auto parts = task.template operand<1>();
    const auto y = task.template operand<2>();
    const i32 columns = y.size[decltype(y)::kRank - 1];
    const u64 step = u64(parts.stride[0]) * sizeof(*parts.base);
    bool wanted[kWorld];
#pragma unroll
    for (int r = 0; r < kWorld; ++r) wanted[r] = r != task.g.rank;
#pragma unroll 1
    for (i32 column = task.thread * 8; column < columns; column += Task::threads * 8) {
      const uint4 own = ptx::load16_l2(u64(x.at()) + column * 2);
      uint4 part[kWorld];
      if (!flags.template load16<kWorld>(u64(parts.at()) + column * 4, step, wanted, part)) {
        return false;
      }
      Sum8<Task::kIsHalf> sum;
#pragma unroll
      for (int r = 0; r < kWorld; ++r) sum.add(wanted[r] ? part[r] : own);
      ptx::store16(u64(y.at()) + column * 2, sum.rounded());
    }
    return true;
  }
};

}  // namespace etc
