// Copies the choices of 32 tokens to a rank: for each of its experts the word of tokens that chose
// it, and all choices with their weights.
#pragma once
#include "worker/task.cuh"

namespace etc {

template <class Task>
struct share_choices {
  ETC_DEVICE static void run(const Task& task) {
    const auto choice_bits = task.template operand<0>();
    const auto target = task.template operand<3>();
    for (i32 e = task.thread; e < choice_bits.size[0]; e += Task::threads) {
      *target.at(e) = i32(ptx::load4_l2(u64(choice_bits.at(e))));
    }
    copy(task, task.template operand<1>(), task.template operand<4>());
    copy(task, task.template operand<2>(), task.template operand<5>());
  }

 private:
  // Whole rows of 4-byte elements, contiguous on both sides.
  template <class From, class To>
  ETC_DEVICE static void copy(const Task& task, const From& x, const To& y) {
    const i32 count = x.size[0] * x.size[1];
    const u64 source = u64(x.at()), target = u64(y.at());
#pragma unroll 4
    for (i32 i = task.thread; i < count; i += Task::threads) {
      *reinterpret_cast<u32*>(target + i * 4) = ptx::load4_l2(source + i * 4);
    }
  }
};

}  // namespace etc
