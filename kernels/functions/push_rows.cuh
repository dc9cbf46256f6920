// Copies a region that is contiguous on both sides, in units of 16 bytes if alignment allows.
// NOTE: eight 16-byte accesses in flight per thread keep NVLink's queues short. More of them, or
// bulk copies, slow down the loads of the tensor lane.
#pragma once
#include "functions/copy_row.cuh"
#include "worker/task.cuh"

namespace etc {

// The region of operand kRead to that of operand kWrite.
template <int kRead, int kWrite, class Task>
ETC_DEVICE void push_region(const Task& task) {
  constexpr int kUnroll = 8;
  const auto x = task.template operand<kRead>();
  const auto gathered_rows = task.template operand<kWrite>();
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

template <class Task>
struct push_rows {
  ETC_DEVICE static void run(const Task& task) { push_region<0, 1>(task); }
};

}  // namespace etc
