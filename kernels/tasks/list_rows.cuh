// Lists the tokens that chose an expert, in their order: counted block by block.
#pragma once
#include "ptx/warp.cuh"
#include "worker/task.cuh"

namespace etc {

template <class Task>
struct list_rows {
  static constexpr int kAtOnce = 4;  // blocks of a lane
  static_assert(Task::threads == 32);

  ETC_DEVICE static void run(const Task& task) {
    const auto chosen = task.template operand<0>();
    const auto before = task.template operand<1>();
    const auto tokens = task.template operand<2>();
    const i32 blocks = chosen.size[1];
    u32 sum = 0;  // of the tokens so far
#pragma unroll 1
    for (i32 first = task.thread; first - task.thread < blocks; first += kAtOnce * 32) {
      u32 word[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        // Behind the last one it is read again, so that nothing stands between loads.
        word[i] = ptx::load4_l2(u64(chosen.at(0, minimum(first + i * 32, blocks - 1))));
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const i32 b = first + i * 32;
        if (b - task.thread >= blocks) break;
        if (b >= blocks) word[i] = 0;
        const u32 count = __popc(word[i]);
        u32 row = sum + ptx::warp_sum_before(count);
        sum = __shfl_sync(~0u, row + count, 31);
        if (b < blocks) *before.at(0, b) = i32(row);
#pragma unroll 1
        for (; word[i] != 0; word[i] &= word[i] - 1, ++row) {
          *tokens.at(row) = b * 32 + __ffs(word[i]) - 1;
        }
        __syncwarp();
      }
    }
    if (task.thread == 0) *task.template operand<3>().at() = i32(sum);
  }
};

}  // namespace etc
