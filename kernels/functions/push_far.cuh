// Copies a region to any rank: by stores where its memory is mapped, else by one message of the
// transport to far ranks.
#pragma once
#include "functions/push_rows.cuh"

namespace etc {

template <class Task>
struct push_far : push_rows<Task> {
  // To a far rank: the region, then 1 added to the word at `word` there. `self`: this rank's
  // symmetric block, with the same layout.
  template <class Far>
  ETC_DEVICE static void send(const Task& task, u64 self, u64 word) {
    const auto x = task.template operand<0>();
    // NOTE: the block of a far rank has the address 0, so this is the place in the block.
    const auto arrival = task.template operand<1>();
    const u64 count = x.count() < arrival.count() ? x.count() : arrival.count();
    const u64 target = self + u64(arrival.at());
    Far::put(u64(x.at()), target, count * sizeof(*x.base), word, 1, arrival.rank);
  }
};

}  // namespace etc
