// Copies four arrays of a step's rows.
#pragma once
#include "worker/task.cuh"

namespace etc {

// NOTE: the arrays may be in the host's memory, so the four loads of a row are in flight together.
template <class Task>
struct copy_rows {
  ETC_DEVICE static void run(const Task& task) {
    const i32 rows = task.template operand<0>().size[0];
    for (i32 row = task.thread; row < rows; row += Task::threads) {
      const u32 first = load<0>(task, row), second = load<1>(task, row);
      const u32 third = load<2>(task, row), fourth = load<3>(task, row);
      place<4>(task, row) = i32(first);
      place<5>(task, row) = i32(second);
      place<6>(task, row) = i32(third);
      place<7>(task, row) = i32(fourth);
    }
  }

 private:
  template <int kOperand>
  ETC_DEVICE static auto& place(const Task& task, i32 row) {
    return task.template operand<kOperand>().at()[row];
  }
  template <int kOperand>
  ETC_DEVICE static u32 load(const Task& task, i32 row) {
    return ptx::load_relaxed(u64(&place<kOperand>(task, row)));
  }
};

}  // namespace etc
