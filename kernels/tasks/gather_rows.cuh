// Copies the rows of up to 8 tokens of one expert, found by their rank among those that
// chose it, side by side.
#pragma once
#include "tasks/copy_rows.cuh"
#include "worker/task.cuh"

namespace etc {

template <class Task>
struct gather_rows {
  // NOTE: programs of several ranks have no registers for two rows.
  static constexpr int kTogether = Task::kWorld > 1 ? 1 : 2, kUnroll = 8;
  static_assert(Task::threads == 32);

  ETC_DEVICE static void run(const Task& task) {
    const auto packed = task.template operand<4>();
    const i32 rows = packed.size[0];
    if (rows == 0) return;
    const auto x = task.template operand<0>();
    const auto first = task.template operand<3>();
    Window window(task, i32(ptx::load4_l2(u64(first.at()))));
    const u32 bytes = u32(x.size[1]) * sizeof(*x.base);
#pragma unroll 1
    for (i32 row = 0; row < rows; row += kTogether) {
      u64 from[kTogether];
#pragma unroll
      for (int r = 0; r < kTogether; ++r) {
        const i32 wanted = window.first + minimum(row + r, rows - 1);
        if (wanted >= window.end) window.seek(task, wanted);
        from[r] = u64(x.at(window.find(wanted)));
      }
      copy_rows<kTogether, kUnroll>(
          task.thread, u64(packed.at(row)), from, bytes, rows - row);
    }
  }

 private:
  // 32 consecutive blocks, one a lane: their tokens, and the count of those before them.
  struct Window {
    i32 first, end;  // first rank wanted at all; first rank behind the window
    i32 block, before;
    u32 chosen;

    ETC_DEVICE Window(const Task& task, i32 rank) : first(rank) { seek(task, rank); }

    // Begins with the block that has the token of this rank.
    ETC_DEVICE void seek(const Task& task, i32 rank) {
      const auto words = task.template operand<1>();
      const auto counts = task.template operand<2>();
      const i32 blocks = words.size[1], lane = task.thread;
      block = 0;
      for (i32 width = blocks; width > 32;) {
        const i32 step = (width + 31) / 32;
        const bool before_it =
            lane * step < width &&
            i32(ptx::load4_l2(u64(counts.at(0, block + lane * step)))) <= rank;
        const i32 top = 31 - __clz(__ballot_sync(~0u, before_it));
        block += top * step;
        width = minimum(step, width - top * step);
      }
      const i32 b = minimum(block + lane, blocks - 1);
      chosen = block + lane < blocks ? ptx::load4_l2(u64(words.at(0, b))) : 0;
      before = i32(ptx::load4_l2(u64(counts.at(0, b))));
      if (block + lane >= blocks) before = 0x7fffffff;
      const i32 last = minimum(31, blocks - 1 - block);
      end = __shfl_sync(~0u, before + __popc(chosen), last);
    }
    ETC_DEVICE i32 find(i32 rank) const {
      const i32 top = 31 - __clz(__ballot_sync(~0u, before <= rank));
      u32 word = __shfl_sync(~0u, chosen, top);
      for (i32 n = rank - __shfl_sync(~0u, before, top); n > 0; --n) word &= word - 1;
      return (block + top) * 32 + __ffs(word) - 1;
    }
  };
};

}  // namespace etc
