// The top-k experts of a token by descending logit, and their weights, computed by one warp from a
// row of logits.
#pragma once
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"

namespace etc {

template <int kExperts, int kTopK, bool kNormalize>
struct BestExperts {
  static constexpr int kEach = (kExperts + 31) / 32;  // adjacent experts of a lane
  static_assert(kExperts % 8 == 0 && kExperts <= 256 && kTopK <= 32 && kTopK <= kExperts);

  // Integer keys with the order of the logits; 0 is below all of them.
  using Keys = u32[kEach];

  // Reads the keys of a lane; its logits begin at `from`.
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

  // Selects for kTokens tokens in parallel. After `keys` are read and sorted, lane k gets the k-th
  // best expert and its logit; among equal logits the lower expert is first. Consumes the keys.
  template <int kTokens>
  struct Picks {
    Keys keys[kTokens];
    u32 order[kTokens];  // four bits each: the lane's experts, the best one first
    u32 chosen[kTokens];
    float logit[kTokens];

    ETC_DEVICE void sort_keys() {
#pragma unroll
      for (int t = 0; t < kTokens; ++t) order[t] = sort(keys[t]);
    }
    // Selects number `from` to `to` - 1; those before `from` are selected already.
    ETC_DEVICE void pick(u32 lane, i32 from, i32 to) {
#pragma unroll 1
      for (i32 k = from; k < to; ++k) {
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
          if (lane == u32(k)) {
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
  };

  // The selection for one token, whose logits begin at `logits`. Each expert takes 0.1 us, so a
  // caller that needs the first ones early can select the others later.
  class OneToken {
   public:
    ETC_DEVICE explicit OneToken(u64 logits) : lane_(ptx::lane()) {
      read(logits + lane_ * (kEach * 4), lane_, picks_.keys[0]);
      all_ = sum_all(picks_.keys[0]);
      picks_.sort_keys();
    }
    ETC_DEVICE void pick_first(i32 most) {
      first_ = minimum(most, kTopK);
      picks_.pick(lane_, 0, first_);
    }
    ETC_DEVICE void pick_others() { picks_.pick(lane_, first_, kTopK); }
    // The k-th expert on lane k and, once all are selected, its weight; 0 after the last one. By
    // whole warps.
    ETC_DEVICE u32 expert() const { return picks_.chosen[0]; }
    ETC_DEVICE float weight() const {
      const float own = BestExperts::weight(picks_.logit[0], all_);
      return lane_ < kTopK ? own : 0.0f;
    }

   private:
    Picks<1> picks_ = {};
    float all_;
    u32 lane_;
    i32 first_ = 0;
  };

  // The denominator of the softmax over all experts, unless the weights are normalised.
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

  // The weight of the expert of this lane.
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
  // Sorts the keys of a lane in descending order, stably; returns their previous positions.
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
