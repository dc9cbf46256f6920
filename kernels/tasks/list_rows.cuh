// Lists the tokens of a tile's rows: those of one expert, found by their rank among those
// that chose it.
#pragma once
#include "worker/task.cuh"

namespace etc {

template <class Task>
struct list_rows {
  static_assert(Task::threads == 32);

  // NOTE: operands are asked for once: behind a store, what their maps load is loaded again.
  ETC_DEVICE static void run(const Task& task) {
    const auto tokens = task.template operand<3>();
    const i32 rows = tokens.size[0];
    if (rows == 0) return;
    const auto chosen = task.template operand<0>();
    const auto before = task.template operand<1>();
    const i32 first = i32(ptx::load4_l2(u64(task.template operand<2>().at())));
    i32 begin = seek(before, first, task.thread);
    Block next(chosen, before, begin + task.thread);
    for (bool is_last = false; !is_last;) {
      const Block here = next;
      begin += 32;
      // Under way while those before are listed.
      if (begin < chosen.size[1]) next = Block(chosen, before, begin + task.thread);
      list(tokens, here, first, rows);
      is_last = begin >= chosen.size[1] || __shfl_sync(~0u, here.end(), 31) >= first + rows;
    }
  }

 private:
  // One of 32 consecutive ones, one a lane: its tokens, and the count of those before it.
  struct Block {
    i32 number, count;
    u32 chosen;

    // NOTE: behind the last one it is read again, so that nothing stands between loads.
    template <class Words>
    ETC_DEVICE Block(const Words& words, const Words& counts, i32 number_) : number(number_) {
      const i32 b = minimum(number, words.size[1] - 1);
      chosen = ptx::load4_l2(u64(words.at(0, b)));
      count = i32(ptx::load4_l2(u64(counts.at(0, b))));
      if (number > b) chosen = 0;
    }
    ETC_DEVICE i32 end() const { return count + __popc(chosen); }
  };

  // Where 32 blocks begin of which one has the token of this rank. Each step leaves one part
  // of 32.
  template <class Words>
  ETC_DEVICE static i32 seek(const Words& before, i32 rank, i32 lane) {
    i32 block = 0;
#pragma unroll 1
    for (i32 width = before.size[1]; width > 32;) {
      const i32 step = (width + 31) / 32, skipped = lane * step;
      const i32 b = block + minimum(skipped, width - 1);
      const i32 count = i32(ptx::load4_l2(u64(before.at(0, b))));
      const bool is_before = skipped < width && count <= rank;
      const i32 top = 31 - __clz(__ballot_sync(~0u, is_before));
      block += top * step;
      width = minimum(step, width - top * step);
    }
    return block;
  }

  template <class Rows>
  ETC_DEVICE static void list(const Rows& tokens, const Block& block, i32 first, i32 rows) {
    u32 word = block.chosen;
#pragma unroll 1
    for (i32 row = block.count - first; word != 0 && row < rows; ++row, word &= word - 1) {
      if (row >= 0) *tokens.at(row) = block.number * 32 + __ffs(word) - 1;
    }
  }
};

}  // namespace etc
