// Copies the rows of tokens that chose experts of a rank to this rank.
#pragma once
#include "functions/copy_row.cuh"
#include "worker/task.cuh"

namespace etc {

template <class Task>
struct push_tokens {
  // See push_rows. NOTE: with eight, programs with few choices per token spill registers.
  static constexpr int kUnroll = Task::kTopK < 4 ? 4 : 8;
  static constexpr i32 kWarps = Task::threads / 32;

  ETC_DEVICE static void run(const Task& task) {
    const auto x = task.template operand<0>();
    const auto ids = task.template operand<1>();
    const auto target = task.template operand<3>();
    const i32 lower = task.template operand<2>().size[0];
    const u32 bytes = u32(x.size[1]) * sizeof(*x.base);
    const i32 lane = task.thread % 32;
#pragma unroll 1
    for (i32 token = task.thread / 32; token < x.size[0]; token += kWarps) {
      i32 expert = -1;
      if (lane < Task::kTopK) {
        expert = i32(ptx::load4_l2(u64(ids.at(token, lane)))) - lower;
      }
      if (!__any_sync(~0u, u32(expert) < u32(Task::kExperts))) continue;
      copy_row<kUnroll>(lane, u64(target.at(token)), u64(x.at(token)), bytes);
    }
  }
};

}  // namespace etc
