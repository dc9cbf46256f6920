// Copies a region that is contiguous on both sides, in units of 16 bytes if alignment allows.
// NOTE: eight 16-byte accesses in flight per thread keep NVLink's queues short. More of them, or
// bulk copies, slow down the loads of the tensor lane.
#pragma once
#include "functions/copy_row.cuh"
#include "worker/task.cuh"

namespace etc {

template <class Task>
struct push_rows {
  static constexpr int kUnroll = 8;

  ETC_DEVICE static void run(const Task& task) {
    const auto x = task.template operand<0>();
    const auto gathered_rows = task.template operand<1>();
    const u64 source = u64(x.at()), target = u64(gathered_rows.at());
    const u64 count = x.count() < gathered_rows.count() ? x.count() : gathered_rows.count();
    const u64 bytes = count * sizeof(*x.base);
    if ((source | target | bytes) % 16 != 0) {
#pragma unroll 1
      for (u64 i = task.thread; i < count; i += Task::threads) gathered_rows.at()[i] = x.at()[i];
      return;
    }
    copy_row<kUnroll, Task::threads>(task.thread, target, source, bytes);
  }
};

}  // namespace etc
