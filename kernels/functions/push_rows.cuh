// Copies a region that is contiguous on both sides, in units of 16 bytes if alignment allows.
// NOTE: eight 16-byte accesses in flight per thread keep NVLink's queues short. More of them, or
// bulk copies, slow down the loads of the tensor lane.
#pragma once
#include "worker/task.cuh"

namespace etc {

template <class Task>
struct push_rows {
  static constexpr int kUnroll = 8;

  ETC_DEVICE static void run(const Task& task) {
    const auto x = task.template operand<0>();
    const auto gathered = task.template operand<1>();
    const u64 from = u64(x.at()), to = u64(gathered.at());
    const u64 count = x.count() < gathered.count() ? x.count() : gathered.count();
    const u64 bytes = count * sizeof(*x.base);
    if ((from | to | bytes) % 16 != 0) {
#pragma unroll 1
      for (u64 i = task.thread; i < count; i += Task::threads) gathered.at()[i] = x.at()[i];
      return;
    }
    constexpr u64 kStep = Task::threads * 16;
#pragma unroll 1
    for (u64 i = task.thread * 16; i < bytes; i += kUnroll * kStep) {
      uint4 v[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        v[u] = ptx::load16_l2_if(i + u * kStep < bytes, from + i + u * kStep);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (i + u * kStep < bytes) ptx::store16(to + i + u * kStep, v[u]);
      }
    }
  }
};

}  // namespace etc
