// The best experts of each of 32 tokens, their weights, and for each expert one word:
// which of the tokens chose it.
#pragma once
#include "ptx/warp.cuh"
#include "worker/task.cuh"

namespace etc {

template <class Task>
struct choose_experts {
  static constexpr int kTopK = Task::kTopK, kExperts = Task::kExperts;
  static constexpr int kEach = (kExperts + 31) / 32;  // experts of a lane
  static_assert(kExperts % 8 == 0 && kExperts <= 256 && kTopK <= 32 && kTopK <= kExperts);

  ETC_DEVICE static void run(const Task& task) {
    constexpr int kWarps = Task::threads / 32;
    static_assert(kExperts <= Task::threads);
    task.scratch[task.thread] = 0;
    task.sync();
    const i32 tokens = task.template operand<0>().size[0];
    for (i32 token = task.thread / 32; token < tokens; token += kWarps) choose(task, token);
    task.sync();
    if (task.thread < kExperts) {
      *task.template operand<3>().at(task.thread) = i32(task.scratch[task.thread]);
    }
  }

 private:
  // One warp; of equal logits the lower expert is the better.
  ETC_DEVICE static void choose(const Task& task, i32 token) {
    const u32 lane = task.thread % 32;
    const u64 from = u64(task.template operand<0>().at(token, 0));
    float logit[kEach];
    u32 key[kEach];  // ordered as the logits are; 0 is below all of them
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const u32 expert = lane + 32 * i;
      const bool inside = expert < kExperts;
      const u32 bits = inside ? ptx::load4_l2(from + expert * 4) : 0;
      logit[i] = __uint_as_float(bits);
      key[i] = !inside ? 0 : bits >> 31 ? larger(~bits, 1u) : bits | 0x80000000u;
    }
    float best = 0.0f, mine = 0.0f, sum = 0.0f;
    u32 chosen = 0;
#pragma unroll 1
    for (u32 k = 0; k < kTopK; ++k) {
      u32 top = 0;
#pragma unroll
      for (int i = 0; i < kEach; ++i) top = larger(top, key[i]);
      top = ptx::warp_max(top);
      u32 expert = ~0u;
#pragma unroll
      for (int i = kEach - 1; i >= 0; --i) {
        if (key[i] == top) expert = lane + 32 * i;
      }
      expert = ptx::warp_min(expert);
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        if (expert == lane + 32 * i) key[i] = 0;
      }
      const float value = __uint_as_float(top >> 31 ? top & 0x7fffffffu : ~top);
      if (k == 0) best = value;
      const float share = __expf(value - best);
      sum += share;
      if (lane == k) {
        mine = share;
        chosen = expert;
      }
    }
    if constexpr (!Task::kNormalize) {
      sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        if (lane + 32 * i < kExperts) sum += __expf(logit[i] - best);
      }
      sum = ptx::warp_sum(sum);
    }
    if (lane < kTopK) {
      *task.template operand<1>().at(token, lane) = i32(chosen);
      *task.template operand<2>().at(token, lane) = mine / sum;
      atomicOr(&task.scratch[chosen], 1u << token);
    }
  }
  ETC_DEVICE static u32 larger(u32 a, u32 b) { return a > b ? a : b; }
};

}  // namespace etc
