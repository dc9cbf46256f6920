// Lists the tokens that chose an expert, in order, and counts them per block.
#pragma once
#include "ptx/warp.cuh"
#include "worker/task.cuh"

namespace etc {

template <class Task>
struct list_rows {
  static constexpr int kThreads = Task::threads, kWarps = kThreads / 32;
  static constexpr int kAtOnce = kWarps < 4 ? 4 / kWarps : 1;  // blocks per thread

  ETC_DEVICE static void run(const Task& task) {
    const auto choice_bits = task.template operand<0>();
    const auto before = task.template operand<1>();
    const auto tokens = task.template operand<2>();
    const i32 num_blocks = choice_bits.size[1];
    u32 sum = 0;  // tokens so far
    // NOTE: counted for all threads, not from each one's first block: see ptx::warp().
#pragma unroll 1
    for (i32 begin = 0; begin < num_blocks; begin += kAtOnce * kThreads) {
      const i32 first = begin + task.thread;
      u32 word[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        // Indices after the last block read it again, so that loads need no branch.
        word[i] = ptx::load4_l2(
            u64(choice_bits.at(0, minimum(first + i * kThreads, num_blocks - 1))));
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const i32 block = first + i * kThreads;
        if (begin + i * kThreads >= num_blocks) break;
        if (block >= num_blocks) word[i] = 0;
        u32 row = count(task, __popc(word[i]), sum);
        if (block < num_blocks) *before.at(0, block) = i32(row);
#pragma unroll 1
        for (; word[i] != 0; word[i] &= word[i] - 1, ++row) {
          *tokens.at(row) = block * 32 + __ffs(word[i]) - 1;
        }
        __syncwarp();
      }
    }
    if (task.thread == 0) *task.template operand<3>().at() = i32(sum);
  }

 private:
  // Returns `sum` plus the exclusive prefix sum of `num_own`; adds the total of `num_own` to `sum`.
  ETC_DEVICE static u32 count(const Task& task, u32 num_own, u32& sum) {
    u32 row = sum + ptx::warp_sum_before(num_own);
    if constexpr (kWarps == 1) {
      sum = __shfl_sync(~0u, row + num_own, 31);
    } else {
      const i32 warp = task.thread / 32;
      if (task.thread % 32 == 31) task.scratch[warp] = row + num_own - sum;
      task.sync();
#pragma unroll
      for (i32 w = 0; w < kWarps; ++w) {
        const u32 of_warp = task.scratch[w];
        if (w < warp) row += of_warp;
        sum += of_warp;
      }
      task.sync();  // before it is written again
    }
    return row;
  }
};

}  // namespace etc
