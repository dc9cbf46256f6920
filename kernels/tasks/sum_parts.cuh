// Adds what the ranks computed of some tokens: fp32, rank order.
#pragma once
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
    const auto y = task.template operand<1>();
    const u64 stride = u64(parts.stride[0]) * sizeof(*parts.base);
    const u32 bytes = u32(y.size[1]) * sizeof(*y.base);
#pragma unroll 1
    for (i32 token = 0; token < y.size[0]; ++token) {
      const u64 from = u64(parts.at(0, token)), to = u64(y.at(token));
#pragma unroll 1
      for (u32 begin = task.thread * 16; begin < bytes; begin += kUnroll * 512) {
        uint4 part[kUnroll][kWorld];
#pragma unroll
        for (int r = 0; r < kWorld; ++r) {
          const u64 address = from + r * stride + begin;
#pragma unroll
          for (int u = 0; u < kUnroll; ++u) {
            if (begin + u * 512 < bytes) part[u][r] = ptx::load16_l2(address + u * 512);
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
  ETC_DEVICE static uint4 sum(const uint4 (&part)[kWorld]) {
    float2 total[4] = {};
#pragma unroll
    for (int r = 0; r < kWorld; ++r) {
      const u32 word[4] = {part[r].x, part[r].y, part[r].z, part[r].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 v = unpack<Task::kIsHalf>(word[i]);
        total[i].x += v.x;
        total[i].y += v.y;
      }
    }
    return make_uint4(
        pack<Task::kIsHalf>(total[0].x, total[0].y), pack<Task::kIsHalf>(total[1].x, total[1].y),
        pack<Task::kIsHalf>(total[2].x, total[2].y), pack<Task::kIsHalf>(total[3].x, total[3].y));
  }
};

}  // namespace etc
