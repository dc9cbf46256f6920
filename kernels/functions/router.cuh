// The experts of a token, and their weights, computed by one warp from a row of logits.
//
// Task has the constants of Router in functions/router.py; its last reads are the bias and the
// correction, where it has them. Where the order of the choice is that of the logits, the keys are
// those of logits; otherwise of scores with the correction.
#pragma once
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "worker/task.cuh"

namespace etc {

// Four bits for each of a lane's experts.
template <bool kIsWide>
struct ExpertOrder {
  using Type = u32;
};
template <>
struct ExpertOrder<true> {
  using Type = u64;
};

template <class Task>
struct ExpertChoice {
  static constexpr int kExperts = Task::kExperts, kTopK = Task::kTopK;
  static constexpr int kEach = (kExperts + 31) / 32;  // adjacent experts of a lane
  static constexpr i32 kWarps = Task::threads / 32;
  static_assert(kExperts <= 512 && kTopK <= 32 && kTopK <= kExperts && Task::kGroups <= 32);
  enum Score { kSoftmax, kSoftmaxChosen, kSigmoid, kSqrtSoftplus };
  static constexpr bool kIsSoftmax = Task::kScore == kSoftmax || Task::kScore == kSoftmaxChosen;
  static constexpr bool kIsOfChosen =
      kIsSoftmax && (Task::kNormalize || Task::kScore == kSoftmaxChosen);
  static constexpr bool kByLogit = !Task::kHasCorrection && Task::kGroups == 1;

  // Integer keys with the order of the values; 0 is below all of them.
  using Keys = u32[kEach];
  using Order = typename ExpertOrder<(kEach > 8)>::Type;

  // Reads the keys of a lane from the logits of a token.
  ETC_DEVICE static void read(const Task& task, u64 logits, u32 lane, Keys& keys) {
    const u32 first = lane * kEach;
    constexpr int kStep = kEach % 4 == 0 ? 4 : 1;  // the rows of logits begin at 16 bytes
    const u64 source = logits + first * 4;
#pragma unroll
    for (int i = 0; i < kEach; i += kStep) {
      const bool is_inside = kExperts % 32 == 0 || first + i < kExperts;
      if constexpr (kStep == 4) {
        const uint4 words = is_inside ? ptx::load16_l2(source + i * 4) : uint4{};
        const u32 bits[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const bool has_expert = kExperts % 4 == 0 ? is_inside : first + i + j < kExperts;
          keys[i + j] = has_expert ? key_of(with_bias(task, bits[j], first + i + j)) : 0;
        }
      } else {
        keys[i] = is_inside ? key_of(with_bias(task, ptx::load4_l2(source + i * 4), first + i)) : 0;
      }
    }
  }

  // Selects for kTokens tokens in parallel. After `keys` are read, prepared and sorted, lane k gets
  // the k-th best expert and its value; among equal values the lower expert is first. Consumes the
  // keys.
  template <int kTokens>
  struct Picks {
    Keys keys[kTokens];
    Order order[kTokens];  // the lane's experts, the best one first
    u32 best_expert[kTokens];
    float value[kTokens];

    ETC_DEVICE void sort_keys() {
#pragma unroll
      for (int t = 0; t < kTokens; ++t) order[t] = sort(keys[t]);
    }
    // Selects number `first` to `end` - 1; those before `first` are selected already.
    ETC_DEVICE void pick(u32 lane, i32 first, i32 end) {
#pragma unroll 1
      for (i32 k = first; k < end; ++k) {
        u32 top[kTokens], winner[kTokens];
#pragma unroll
        for (int t = 0; t < kTokens; ++t) top[t] = ptx::warp_max(keys[t][0]);
#pragma unroll
        for (int t = 0; t < kTokens; ++t) {
          winner[t] = __ffs(__ballot_sync(~0u, keys[t][0] == top[t])) - 1;
        }
#pragma unroll
        for (int t = 0; t < kTokens; ++t) {
          const u32 expert = __shfl_sync(~0u, lane * kEach + (u32(order[t]) & 15), winner[t]);
          if (lane == u32(k)) {
            value[t] = value_of(top[t]);
            best_expert[t] = expert;
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
    ETC_DEVICE OneToken(const Task& task, u64 logits) : lane_(ptx::lane()) {
      read(task, logits, lane_, picks_.keys[0]);
      prepare(task, lane_, picks_.keys[0], sum_all(picks_.keys[0]));
      picks_.sort_keys();
    }
    ETC_DEVICE void pick_first(i32 most) {
      first_ = minimum(most, kTopK);
      picks_.pick(lane_, 0, first_);
    }
    ETC_DEVICE void pick_others() { picks_.pick(lane_, first_, kTopK); }
    // The k-th expert on lane k. By whole warps.
    ETC_DEVICE u32 expert() const { return picks_.best_expert[0]; }

   private:
    Picks<1> picks_ = {};
    u32 lane_;
    i32 first_ = 0;
  };

  // Chooses for the rows from `first` on, of operand 0, up to kRows for each warp in parallel, and
  // stores ids and weights. With kHasPosition, a row whose position in operand 1 is below 0 has
  // expert -1 and weight 0; with kHasCount, those of tokens from the number in operand 1 on, where
  // operand 2 has as many rows as there are tokens before. Calls mark(row, k, expert) for choice k
  // of each row.
  template <int kRows, class Ids, class Weights, class Mark>
  ETC_DEVICE static void choose(
      const Task& task, i32 first, const Ids& ids, const Weights& weights, Mark mark) {
    const auto logits = task.template operand<0>();
    const i32 lane = task.thread % 32, rows = logits.size[0];
    Picks<kRows> picks = {};
    float all[kRows] = {};
    bool is_used[kRows];
    const auto row = [&](int n) { return first + task.thread / 32 + n * kWarps; };
    // NOTE: beyond the last row, that row is read again.
    const auto address = [&](int n) { return u64(logits.at(minimum(row(n), rows - 1), 0)); };
#pragma unroll
    for (int n = 0; n < kRows; ++n) {
      is_used[n] = true;
      if constexpr (Task::kHasPosition) {
        const u64 position = u64(task.template operand<1>().at() + minimum(row(n), rows - 1));
        is_used[n] = i32(ptx::load4_l2(position)) >= 0;
      }
      if constexpr (Task::kHasCount) {
        const i32 count = i32(ptx::load4_l2(u64(task.template operand<1>().at())));
        is_used[n] = row(n) < count - task.template operand<2>().size[0];
      }
      read(task, address(n), lane, picks.keys[n]);
    }
#pragma unroll
    for (int n = 0; n < kRows; ++n) {
      all[n] = sum_all(picks.keys[n]);
      prepare(task, lane, picks.keys[n], all[n]);
    }
    picks.sort_keys();
    picks.pick(lane, 0, kTopK);
#pragma unroll
    for (int n = 0; n < kRows; ++n) {
      float logit = picks.value[n];
      if constexpr (!kByLogit) {
        const u32 bits = ptx::load4_l2(address(n) + picks.best_expert[n] * 4);
        logit = __uint_as_float(with_bias(task, bits, picks.best_expert[n]));
      }
      const float weight = weight_of(lane, logit, all[n]);
      if (row(n) < rows && lane < kTopK) {
        const i32 expert = is_used[n] ? i32(picks.best_expert[n]) : -1;
        *at_choice(ids, row(n), lane) = expert;
        *at_choice(weights, row(n), lane) = is_used[n] ? weight : 0.0f;
        mark(row(n), lane, expert);
      }
    }
  }

  // The element of choice k of a row. The last axes are rows and choices, others have size 1.
  template <class Choices>
  ETC_DEVICE static auto* at_choice(const Choices& choices, i32 row, i32 k) {
    return choices.at() + row * choices.stride[Choices::kRank - 2] + k;
  }

 private:
  ETC_DEVICE static u32 with_bias(const Task& task, u32 logit, u32 expert) {
    if constexpr (Task::kHasBias) {
      constexpr int kBias = Task::kReads - Task::kHasCorrection - 1;
      const u32 bias = ptx::load4_l2(u64(task.template operand<kBias>().at() + expert));
      logit = __float_as_uint(__uint_as_float(logit) + __uint_as_float(bias));
    }
    return logit;
  }

  // The denominator of a softmax over all experts, where it is needed; if keys become those of
  // scores, the logarithm of the sum of exp(logit).
  ETC_DEVICE static float sum_all(const Keys& keys) {
    constexpr bool kIsNeeded =
        kByLogit ? kIsSoftmax && !kIsOfChosen : Task::kScore == kSoftmax;
    if constexpr (!kIsNeeded) return 0.0f;
    const float best = value_of(ptx::warp_max(largest(keys)));
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (keys[i] != 0) sum += __expf(value_of(keys[i]) - best);
    }
    sum = ptx::warp_sum(sum);
    return kByLogit ? sum : best + logf(sum);
  }

  // The score of a logit; `all`: as sum_all() gives it for scores.
  ETC_DEVICE static float score_of(float logit, float all) {
    if constexpr (Task::kScore == kSoftmax) return __expf(logit - all);
    if constexpr (Task::kScore == kSoftmaxChosen) return logit;
    if constexpr (Task::kScore == kSigmoid) return sigmoid(logit);
    return sqrtf(logit > 20.0f ? logit : log1pf(__expf(logit)));
  }

  // Replaces the keys of logits by those of the values that are compared.
  ETC_DEVICE static void prepare(const Task& task, u32 lane, Keys& keys, float all) {
    if constexpr (!kByLogit) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        if (keys[i] == 0) continue;
        float value = score_of(value_of(keys[i]), all);
        if constexpr (Task::kHasCorrection) {
          const auto corrections = task.template operand<Task::kReads - 1>();
          const u32 bits = ptx::load4_l2(u64(corrections.at() + lane * kEach + i));
          value += __uint_as_float(bits);
        }
        keys[i] = key_of_any(value);
      }
      if constexpr (Task::kGroups > 1) leave_out(lane, keys);
    }
  }

  // Clears the keys of groups that are not among the best.
  ETC_DEVICE static void leave_out(u32 lane, Keys& keys) {
    static_assert(kExperts % Task::kGroups == 0);
    constexpr u32 kSize = kExperts / Task::kGroups;
    u32 own_key = 0;  // the key of group `lane`
#pragma unroll 1
    for (u32 group = 0; group < Task::kGroups; ++group) {
      u32 best = 0, second = 0;  // of this lane's experts in the group
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const u32 key = (lane * kEach + i) / kSize == group ? keys[i] : 0;
        second = key > best ? best : larger(second, key);
        best = larger(best, key);
      }
      const u32 top = ptx::warp_max(best);
      float score = value_of(top);
      if constexpr (Task::kGroupOfTwo) {
        const u32 winner = __ffs(__ballot_sync(~0u, best == top)) - 1;
        score += value_of(ptx::warp_max(lane == winner ? second : best));
      }
      if (lane == group) own_key = key_of_any(score);
    }
    u32 group_bits = 0;  // of the best groups
#pragma unroll 1
    for (int n = 0; n < Task::kTopGroups; ++n) {
      const u32 winner = __ffs(__ballot_sync(~0u, own_key == ptx::warp_max(own_key))) - 1;
      if (lane == winner) own_key = 0;
      group_bits |= 1u << winner;
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      // NOTE: beyond the last expert, a shift by 32 or more has no meaning; the key is 0.
      const u32 group = (lane * kEach + i) / kSize;
      if (group >= Task::kGroups || (group_bits >> group & 1) == 0) keys[i] = 0;
    }
  }

  // The weight of the expert of this lane, the k-th best on lane k.
  ETC_DEVICE static float weight_of(u32 lane, float logit, float all) {
    float share, whole = 1.0f;
    if constexpr (kIsSoftmax) {
      float most = all;
      if constexpr (kByLogit) {
        most = __shfl_sync(~0u, logit, 0), whole = all;
      } else if constexpr (kIsOfChosen) {
        most = value_of(ptx::warp_max(lane < kTopK ? key_of_any(logit) : 0));
      }
      share = __expf(logit - most);
    } else {
      share = score_of(logit, all);
    }
    if constexpr (kIsSoftmax ? kIsOfChosen : Task::kNormalize) {
      whole = kIsSoftmax ? 0.0f : 1e-20f;
#pragma unroll
      for (int i = 0; i < kTopK; ++i) whole += __shfl_sync(~0u, share, i);
    }
    const float weight = share / whole;
    return Task::kScale == 1.0f ? weight : weight * Task::kScale;
  }

  // Sorts the keys of a lane in descending order, stably; returns their previous positions.
  ETC_DEVICE static Order sort(Keys& keys) {
    u32 places[kEach];
    Order order = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) places[i] = i;
#pragma unroll
    for (int end = kEach - 1; end > 0; --end) {
#pragma unroll
      for (int i = 0; i < end; ++i) {
        const bool is_greater = keys[i + 1] > keys[i];
        const u32 key = keys[i], place = places[i];
        keys[i] = is_greater ? keys[i + 1] : key, places[i] = is_greater ? places[i + 1] : place;
        keys[i + 1] = is_greater ? key : keys[i + 1];
        places[i + 1] = is_greater ? place : places[i + 1];
      }
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) order |= Order(places[i]) << (4 * i);
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
  // NaN, of either sign, is above all numbers.
  ETC_DEVICE static u32 key_of_any(float value) {
    return value == value ? key_of(__float_as_uint(value)) : ~0u;
  }
  ETC_DEVICE static float value_of(u32 key) {
    return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
  }
  ETC_DEVICE static u32 larger(u32 a, u32 b) { return a > b ? a : b; }
};

}  // namespace etc
