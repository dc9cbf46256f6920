// Which experts a token picks, by falling logit, and with what weights: what one warp finds out
// of a row of logits.
#pragma once
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"

namespace etc {

template <int kExperts, int kTopK, bool kNormalize>
struct BestExperts {
  static constexpr int kEach = (kExperts + 31) / 32;  // neighbouring experts of a lane
  static_assert(kExperts % 8 == 0 && kExperts <= 256 && kTopK <= 32 && kTopK <= kExperts);

  // Keys are ordered as the logits are; 0 is below all of them.
  using Keys = u32[kEach];

  // A lane's keys, whose logits begin at `from`.
  ETC_DEVICE static void read(u64 from, u32 lane, Keys& keys) {
    const u32 first = lane * kEach;
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

  // For kTokens tokens side by side, lane k gets the k-th best expert and its logit; of equal
  // logits the lower expert is the better. The keys are used up.
  template <int kTokens>
  ETC_DEVICE static void pick(
      Keys (&keys)[kTokens], u32 lane, u32 (&chosen)[kTokens], float (&logit)[kTokens]) {
    u32 order[kTokens];  // four bits each: the lane's experts, the best one first
#pragma unroll
    for (int t = 0; t < kTokens; ++t) order[t] = sort(keys[t]);
#pragma unroll 1
    for (u32 k = 0; k < kTopK; ++k) {
      u32 top[kTokens], winner[kTokens];
#pragma unroll
      for (int t = 0; t < kTokens; ++t) top[t] = ptx::warp_max(keys[t][0]);
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        winner[t] = __ffs(__ballot_sync(~0u, keys[t][0] == top[t])) - 1;
      }
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        const u32 expert = __shfl_sync(~0u, lane * kEach + (order[t] & 15), winner[t]);
        if (lane == k) {
          logit[t] = logit_of(top[t]);
          chosen[t] = expert;
        }
        if (lane == winner[t]) {
          order[t] >>= 4;
#pragma unroll
          for (int i = 0; i < kEach; ++i) keys[t][i] = i + 1 < kEach ? keys[t][i + 1] : 0;
        }
      }
    }
  }

  // Of one token, whose logits begin at `logits`: lane k's choice, and a weight of 0 behind the
  // last one.
  struct Choice {
    u32 expert;
    float weight;
  };
  ETC_DEVICE static Choice of(u64 logits) {
    const u32 lane = ptx::lane();
    Keys keys[1];
    float logit[1] = {};
    u32 chosen[1] = {};
    read(logits + lane * (kEach * 4), lane, keys[0]);
    const float all = sum_all(keys[0]);
    pick<1>(keys, lane, chosen, logit);
    const float own = weight(logit[0], all);
    return {chosen[0], lane < kTopK ? own : 0.0f};
  }

  // The softmax's sum over all experts, if that is what weights are shares of.
  ETC_DEVICE static float sum_all(const Keys& keys) {
    if constexpr (kNormalize) return 0.0f;
    const float best = logit_of(ptx::warp_max(largest(keys)));
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (keys[i] != 0) sum += __expf(logit_of(keys[i]) - best);
    }
    return ptx::warp_sum(sum);
  }

  // The weight of lane k's choice.
  ETC_DEVICE static float weight(float logit, float all) {
    const float share = __expf(logit - __shfl_sync(~0u, logit, 0));
    float whole = all;
    if constexpr (kNormalize) {
      whole = 0.0f;
#pragma unroll
      for (int i = 0; i < kTopK; ++i) whole += __shfl_sync(~0u, share, i);
    }
    return share / whole;
  }

 private:
  // A lane's keys by falling size, equal ones as they were; where they were before.
  ETC_DEVICE static u32 sort(Keys& keys) {
    u32 from[kEach], order = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) from[i] = i;
#pragma unroll
    for (int end = kEach - 1; end > 0; --end) {
#pragma unroll
      for (int i = 0; i < end; ++i) {
        const bool swap = keys[i + 1] > keys[i];
        const u32 key = keys[i], place = from[i];
        keys[i] = swap ? keys[i + 1] : key, from[i] = swap ? from[i + 1] : place;
        keys[i + 1] = swap ? key : keys[i + 1], from[i + 1] = swap ? place : from[i + 1];
      }
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) order |= from[i] << (4 * i);
    return order;
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
