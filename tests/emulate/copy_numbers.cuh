// Copies numbers one by one or through scratch, or writes the first one unconditionally.
#pragma once
#include "worker/task.cuh"

namespace etc {

// to [n] = from [n].
template <class Task>
struct copy_numbers {
  ETC_DEVICE static void run(const Task& task) {
    const auto from = task.template operand<0>();
    const auto to = task.template operand<1>();
    for (i32 n = task.thread; n < to.size[0]; n += Task::threads) *to.at(n) = *from.at(n);
  }
};

// to [1, n] = from [1, n] from the last one on, by the first n words of scratch.
template <class Task>
struct turn_numbers {
  ETC_DEVICE static void run(const Task& task) {
    const auto from = task.template operand<0>();
    const auto to = task.template operand<1>();
    const i32 count = to.size[1];
    u32* const words = task.scratch;
    for (i32 n = task.thread; n < count; n += Task::threads) {
      words[n] = *reinterpret_cast<const u16*>(from.at(0, n));
    }
    task.sync();
    for (i32 n = task.thread; n < count; n += Task::threads) {
      *reinterpret_cast<u16*>(to.at(0, n)) = u16(words[count - 1 - n]);
    }
  }
};

// to [n], of which the first one becomes from [0].
template <class Task>
struct set_first {
  ETC_DEVICE static void run(const Task& task) {
    if (task.thread == 0) {
      *task.template operand<1>().at(0) = *task.template operand<0>().at(0);
    }
  }
};

}  // namespace etc
