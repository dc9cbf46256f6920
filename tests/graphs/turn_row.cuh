// Writes a row of numbers in reverse order.
#pragma once
#include "worker/task.cuh"

namespace etc {

// to [..., 1, n] from [..., 1, n], of two bytes each.
template <class Task>
struct turn_row {
  ETC_DEVICE static void run(const Task& task) {
    const auto from = task.template operand<0>();
    const auto to = task.template operand<1>();
    const i32 count = to.size[to.kRank - 1];
    for (i32 n = task.thread; n < count; n += Task::threads) {
      last(to)[n] = last(from)[count - 1 - n];
    }
  }
  template <class Tile>
  ETC_DEVICE static u16* last(const Tile& tile) {
    return reinterpret_cast<u16*>(tile.at());
  }
};

}  // namespace etc
