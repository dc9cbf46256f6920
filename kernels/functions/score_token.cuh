// The logits of one token for some experts, one a warp.
#pragma once
#include "ptx/warp.cuh"
#include "worker/task.cuh"

namespace etc {

template <class Task>
struct score_token {
  static constexpr i32 kChunk = 256, kAtOnce = 8;  // columns that a warp loads; chunks

  ETC_DEVICE static void run(const Task& task) {
    const auto x = task.template operand<0>();
    const auto router = task.template operand<1>();
    const i32 lane = task.thread % 32, hidden = x.size[1];
    for (i32 expert = task.thread / 32; expert < router.size[0]; expert += Task::threads / 32) {
      const u64 row = u64(x.at(0, lane * 8)), weight = u64(router.at(expert, lane * 8));
      float sum = 0.0f;
#pragma unroll 1
      for (i32 first = 0; first < hidden; first += kAtOnce * kChunk) {
        uint4 left[kAtOnce], right[kAtOnce];
#pragma unroll
        for (i32 i = 0; i < kAtOnce; ++i) {
          const i32 offset = first + i * kChunk;
          const bool is_inside = offset + lane * 8 < hidden;
          left[i] = ptx::load16_once_if(is_inside, row + offset * 2);
          right[i] = ptx::load16_once_if(is_inside, weight + offset * 2);
        }
#pragma unroll
        for (i32 i = 0; i < kAtOnce; ++i) sum += dot(left[i], right[i]);
      }
      sum = ptx::warp_sum(sum);
      if (lane == 0) *task.template operand<2>().at(0, expert) = sum;
    }
  }

 private:
  ETC_DEVICE static float dot(uint4 a, uint4 b) {
    const u32 left[4] = {a.x, a.y, a.z, a.w}, right[4] = {b.x, b.y, b.z, b.w};
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 left_pair = unpack<Task::kIsHalf>(left[i]);
      const float2 right_pair = unpack<Task::kIsHalf>(right[i]);
      sum = __fmaf_rn(left_pair.y, right_pair.y, __fmaf_rn(left_pair.x, right_pair.x, sum));
    }
    return sum;
  }
};

}  // namespace etc
