// Adds what the ranks computed of some tokens: fp32, rank order. kSplit: only ranks that
// have experts of a token's choice computed something.
#pragma once
#include "ptx/warp.cuh"
#include "worker/task.cuh"

namespace etc {

template <class Task>
struct sum_parts {
  static constexpr int kWorld = Task::kWorld;
  // NOTE: about eight loads are in flight, as in push_rows.
  static constexpr int kUnroll = kWorld > 4 ? 1 : kWorld > 2 ? 2 : 4;
  static_assert(Task::threads == 32);

  ETC_DEVICE static void run(const Task& task) {
    const auto parts = task.template operand<0>();
    const auto y = task.template operand<Task::kReads>();
    const u64 stride = u64(parts.stride[0]) * sizeof(*parts.base);
    const u32 bytes = u32(y.size[1]) * sizeof(*y.base);
#pragma unroll 1
    for (i32 token = 0; token < y.size[0]; ++token) {
      const u64 from = u64(parts.at(0, token)), to = u64(y.at(token));
      const u32 ranks = ranks_of(task, token);
#pragma unroll 1
      for (u32 begin = task.thread * 16; begin < bytes; begin += kUnroll * 512) {
        uint4 part[kUnroll][kWorld];
#pragma unroll
        for (int r = 0; r < kWorld; ++r) {
          const u64 address = from + r * stride + begin;
#pragma unroll
          for (int u = 0; u < kUnroll; ++u) {
            const bool wanted = begin + u * 512 < bytes && (ranks >> r & 1);
            part[u][r] = wanted ? ptx::load16_l2(address + u * 512) : uint4{};
          }
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          if (begin + u * 512 < bytes) ptx::store16(to + begin + u * 512, sum(part[u]));
        }
      }
    }
  }

 private:
  // One bit for each rank that has a part.
  ETC_DEVICE static u32 ranks_of(const Task& task, i32 token) {
    if constexpr (Task::kSplit) {
      const auto ids = task.template operand<1>();
      u32 own = 0;
      if (task.thread < Task::kTopK) {
        own = 1u << ptx::load4_l2(u64(ids.at(token, task.thread))) / u32(Task::kExperts);
      }
      return ptx::warp_or(own);
    }
    return ~0u;
  }
  ETC_DEVICE static uint4 sum(const uint4 (&part)[kWorld]) {
    Sum8<Task::kIsHalf> total;
#pragma unroll
    for (int r = 0; r < kWorld; ++r) total.add(part[r]);
    return total.rounded();
  }
};

}  // namespace etc
