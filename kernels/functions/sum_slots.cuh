// Sums one 32 x 64 piece of an output tile over slots, one for each rank or kSlots: fp32, in order.
// A slot holds each worker's half of a tile, 128 x 256, as its shared-memory image:
// [2 warpgroups][4 chunks of 64 columns][64 rows][128 bytes, 16-byte units swizzled].
#pragma once
#include "worker/task.cuh"

namespace etc {

template <class Task>
struct sum_slots {
  static constexpr bool kSome = requires { Task::kSlots; };  // not those of all ranks
  static constexpr int kCount = [] {
    if constexpr (kSome) return Task::kSlots;
    return Task::kWorld;
  }();
  static constexpr int kUnroll = kCount > 4 ? 1 : 2;  // about 8 loads in flight

  ETC_DEVICE static void run(const Task& task) {
    const auto slots = task.template operand<0>();
    const auto y = last_axes<2>(task.template operand<1>());
    const i32 row0 = slots.start[3], column0 = slots.start[4];
    const u64 image = ((row0 >> 6) * 4 + (column0 >> 6)) * 8192 + (row0 & 63) * 128;
    const u64 slot_stride = u64(slots.stride[0]) * 2;
    u64 origin = u64(slots.base) + slots.start[1] * slots.stride[1] * 2 +
                 slots.start[2] * slots.stride[2] * 2 + image;
    if constexpr (kSome) origin += slots.start[0] * slot_stride;
#pragma unroll 1
    for (int i = 0; i < 8; i += kUnroll) {
      uint4 part[kUnroll][kCount];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
        for (int r = 0; r < kCount; ++r) {
          part[u][r] = ptx::load16_l2(origin + r * slot_stride + (i + u) * 512 + task.thread * 16);
        }
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        Sum8<Task::kIsHalf> sum;
#pragma unroll
        for (int r = 0; r < kCount; ++r) sum.add(part[u][r]);
        const i32 row = (i + u) * 4 + task.thread / 8;
        const i32 column = ((task.thread & 7) ^ (row & 7)) * 8;
        if (row < y.size[0] && column < y.size[1]) {
          ptx::store16(u64(y.at(row, column)), sum.rounded());
        }
      }
    }
  }
};

}  // namespace etc
