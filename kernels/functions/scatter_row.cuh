// Copies a row to several places.
#pragma once
#include "worker/task.cuh"

namespace etc {

template <class Task>
struct scatter_row {
  static constexpr int kCopies = Task::kWrites, kUnroll = 4;

  ETC_DEVICE static void run(const Task& task) {
    const auto x = task.template operand<0>();
    const u64 source = u64(x.at());
    const u32 bytes = u32(x.size[1]) * u32(sizeof(*x.base));
    // NOTE: addresses before any store: the compiler does not move loads of indices across one.
    u64 targets[kCopies];
    locate<0>(task, targets);
    constexpr u32 kStep = Task::threads * 16;
#pragma unroll 1
    for (u32 begin = task.thread * 16; begin < bytes; begin += kUnroll * kStep) {
      uint4 vectors[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        vectors[u] = ptx::load16_l2_if(begin + u * kStep < bytes, source + begin + u * kStep);
      }
#pragma unroll
      for (int n = 0; n < kCopies; ++n) {
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          const bool is_inside = begin + u * kStep < bytes;
          if (is_inside && targets[n] != 0) {
            ptx::store16(targets[n] + begin + u * kStep, vectors[u]);
          }
        }
      }
    }
  }

 private:
  // The addresses of the copies; 0 for an empty region.
  template <int n>
  ETC_DEVICE static void locate(const Task& task, u64 (&targets)[kCopies]) {
    if constexpr (n < kCopies) {
      const auto place = task.template operand<1 + n>();
      targets[n] = place.size[0] > 0 ? u64(place.at()) : 0;
      locate<n + 1>(task, targets);
    }
  }
};

}  // namespace etc
