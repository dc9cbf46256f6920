// The best experts of each of 32 tokens, their weights, and for each expert one word:
// which of the tokens chose it.
#pragma once
#include "ptx/warp.cuh"
#include "worker/task.cuh"

namespace etc {

template <class Task>
struct choose_experts {
  static constexpr int kTopK = Task::kTopK, kExperts = Task::kExperts;
  static constexpr int kEach = (kExperts + 31) / 32;  // neighbouring experts of a lane
  static constexpr int kWarps = Task::threads / 32, kMost = 32 / kWarps;
  static_assert(kExperts % 8 == 0 && kExperts <= 256 && kTopK <= 32 && kTopK <= kExperts);

  ETC_DEVICE static void run(const Task& task) {
    static_assert(kExperts <= Task::threads);
    task.scratch[task.thread] = 0;
    if (task.template operand<0>().size[0] > kWarps) {
      choose<kMost>(task);
    } else {
      choose<1>(task);
    }
    task.sync();
    if (task.thread < kExperts) {
      *task.template operand<3>().at(task.thread) = i32(task.scratch[task.thread]);
    }
  }

 private:
  // Keys are ordered as the logits are; 0 is below all of them.
  using Keys = u32[kEach];

  // A warp chooses for kTokens tokens side by side; of equal logits the lower expert is the
  // better.
  template <int kTokens>
  ETC_DEVICE static void choose(const Task& task) {
    const u32 lane = task.thread % 32, warp = task.thread / 32;
    Keys keys[kTokens];
    float all[kTokens] = {}, logit[kTokens] = {};
    u32 chosen[kTokens] = {};
#pragma unroll
    for (int t = 0; t < kTokens; ++t) read(task, lane, warp + t * kWarps, keys[t]);
    if constexpr (!Task::kNormalize) {
#pragma unroll
      for (int t = 0; t < kTokens; ++t) all[t] = sum_all(keys[t]);
    }
#pragma unroll 1
    for (u32 k = 0; k < kTopK; ++k) {
      u32 top[kTokens], winner[kTokens];
#pragma unroll
      for (int t = 0; t < kTokens; ++t) top[t] = ptx::warp_max(largest(keys[t]));
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        winner[t] = __ffs(__ballot_sync(~0u, largest(keys[t]) == top[t])) - 1;
      }
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        const u32 own = lane * kEach + take(keys[t], top[t], lane == winner[t]);
        const u32 expert = __shfl_sync(~0u, own, winner[t]);
        if (lane == k) {
          logit[t] = logit_of(top[t]);
          chosen[t] = expert;
        }
      }
    }
    task.sync();  // scratch is cleared
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      write(task, lane, warp + t * kWarps, chosen[t], logit[t], all[t]);
    }
  }

  ETC_DEVICE static void read(const Task& task, u32 lane, i32 token, Keys& keys) {
    const auto logits = task.template operand<0>();
    const u32 first = lane * kEach;
    // Behind the last token it is read again.
    const u64 from = u64(logits.at(minimum(token, logits.size[0] - 1), first));
    constexpr int kStep = kEach % 4 == 0 ? 4 : 1;
#pragma unroll
    for (int i = 0; i < kEach; i += kStep) {
      const bool inside = kExperts % 32 == 0 || first + i < kExperts;
      if constexpr (kStep == 4) {
        const uint4 v = inside ? ptx::load16_l2(from + i * 4) : uint4{};
        const u32 bits[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) keys[i + j] = inside ? key_of(bits[j]) : 0;
      } else {
        keys[i] = inside ? key_of(ptx::load4_l2(from + i * 4)) : 0;
      }
    }
  }

  // The first of a lane's keys that is `top`; where it is `mine`, it is cleared.
  ETC_DEVICE static u32 take(Keys& keys, u32 top, bool mine) {
    u32 first = 0;
#pragma unroll
    for (int i = kEach - 1; i >= 0; --i) {
      if (keys[i] == top) first = i;
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (mine && first == i) keys[i] = 0;
    }
    return first;
  }

  // Each lane has one choice; `all` is the softmax's sum over all experts.
  ETC_DEVICE static void write(
      const Task& task, u32 lane, i32 token, u32 expert, float logit, float all) {
    const float share = __expf(logit - __shfl_sync(~0u, logit, 0));
    float whole = all;
    if constexpr (Task::kNormalize) {
      whole = 0.0f;
#pragma unroll
      for (int i = 0; i < kTopK; ++i) whole += __shfl_sync(~0u, share, i);
    }
    if (lane < kTopK && token < task.template operand<0>().size[0]) {
      *task.template operand<1>().at(token, lane) = i32(expert);
      *task.template operand<2>().at(token, lane) = share / whole;
      atomicOr(&task.scratch[expert], 1u << token);
    }
  }

  ETC_DEVICE static float sum_all(const Keys& keys) {
    const float best = logit_of(ptx::warp_max(largest(keys)));
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (keys[i] != 0) sum += __expf(logit_of(keys[i]) - best);
    }
    return ptx::warp_sum(sum);
  }
  ETC_DEVICE static u32 largest(const Keys& keys) {
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) most = larger(most, keys[i]);
    return most;
  }
  ETC_DEVICE static u32 key_of(u32 bits) {
    return bits >> 31 ? larger(~bits, 1u) : bits | 0x80000000u;
  }
  ETC_DEVICE static float logit_of(u32 key) {
    return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
  }
  ETC_DEVICE static u32 larger(u32 a, u32 b) { return a > b ? a : b; }
};

}  // namespace etc
