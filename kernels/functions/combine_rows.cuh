// The weighted sum of each token's rows: fp32, in the order of the token's choices.
// kSplit: rows of other ranks' experts are absent; a token without rows is skipped, unless it has
// one of a shared expert. kHasNone: rows may be absent, too; the sum of a token without rows is
// zero. kShared: the number of operands of a
// shared expert, the last reads: a row of each token, and a logit whose sigmoid is its weight.
#pragma once
#include "worker/task.cuh"

namespace etc {

template <class Task>
struct combine_rows {
  static constexpr int kTopK = Task::kTopK;
  static_assert(Task::threads == 32 && kTopK <= 32);
  // In flight: kAtOnce rows, kParts x 256 columns of each. NOTE: rows that may be absent need more
  // registers, and a rank has only a few rows of a token.
  static constexpr int kMost = Task::kSplit ? 2 : 8;
  static constexpr int kAtOnce = kTopK < kMost ? kTopK : kMost;
  static constexpr int kParts = !Task::kSplit ? 8 / kAtOnce : kTopK > 2 ? 2 : 1;
  // Whether a part is summed before the next one. NOTE: with the sums of many parts at once, large
  // programs spill registers.
  static constexpr bool kIsByPart = kParts > kAtOnce;
  static constexpr int kTogether = 32 / kTopK;  // tokens whose choices a warp holds

  ETC_DEVICE static void run(const Task& task) {
    const auto y = task.template operand<Task::kReads>();
    // The last two axes are tokens and columns; an axis of ranks may precede them.
    constexpr int kAxis = decltype(y)::kRank - 2;
    const i32 tokens = y.size[kAxis], columns = y.size[kAxis + 1];
    const i64 stride = y.stride[kAxis] * i64(sizeof(*y.base));
#pragma unroll 1
    for (i32 first = 0; first < tokens; first += kTogether) {
      const i32 together = minimum(kTogether, tokens - first);
      const Choices choices(task, first, together);
#pragma unroll 1
      for (i32 t = 0; t < together; ++t) {
        const u64 target = u64(y.at()) + (first + t) * stride;
        const i32 count = choices.count(t);
        if (count == 0 && Task::kShared == 0) {
          if constexpr (Task::kHasNone) clear(task, columns, target);
          continue;
        }
#pragma unroll 1
        for (i32 begin = 0; begin < columns; begin += kParts * 256) {
          add_up(
              task, choices, first + t, t * kTopK, count, begin + task.thread * 8, columns - 8,
              target);
        }
      }
    }
  }

 private:
  // The choices of tokens from `first` on; lanes from t * kTopK on have those of token t.
  struct Choices {
    i32 row;
    float weight;
    u32 own_bits;

    ETC_DEVICE Choices(const Task& task, i32 first, i32 together)
        : row(-1), weight(0.0f), own_bits(0) {
      const i32 token = first + task.thread / kTopK, k = task.thread % kTopK;
      if (task.thread < together * kTopK) {
        const auto place = last_axes<2>(task.template operand<0>());
        const auto weights = task.template operand<1>();
        row = i32(ptx::load4_l2(u64(place.at(token, k))));
        weight = __uint_as_float(ptx::load4_l2(u64(weights.at(token, k))));
      }
      if constexpr (Task::kSplit) move_own(task.thread);
      if constexpr (Task::kHasNone) fill_none(task.thread);
    }
    ETC_DEVICE i32 count(i32 token_idx) const {
      if constexpr (Task::kHasNone) return own_of(token_idx) != 0 ? kTopK : 0;
      return Task::kSplit ? __popc(own_of(token_idx)) : kTopK;
    }

   private:
    // Moves the choices whose rows are on this rank to the front of their token's lanes.
    ETC_DEVICE void move_own(i32 lane) {
      own_bits = __ballot_sync(~0u, row >= 0);
      u32 bits_left = own_of(lane / kTopK);
      for (i32 n = lane % kTopK; n > 0; --n) bits_left &= bits_left - 1;
      const i32 source_lane = bits_left ? lane / kTopK * kTopK + __ffs(bits_left) - 1 : 0;
      row = __shfl_sync(~0u, row, source_lane);
      weight = __shfl_sync(~0u, weight, source_lane);
    }
    // Choices without a row get the first row of their token, and the weight 0.
    ETC_DEVICE void fill_none(i32 lane) {
      static_assert(!Task::kSplit);
      own_bits = __ballot_sync(~0u, row >= 0);
      const u32 token_bits = own_of(lane / kTopK);
      const i32 source_lane = token_bits ? lane / kTopK * kTopK + __ffs(token_bits) - 1 : 0;
      const i32 first = __shfl_sync(~0u, row, source_lane);
      if (row < 0) row = first, weight = 0.0f;
    }
    ETC_DEVICE u32 own_of(i32 token_idx) const {
      return own_bits >> (token_idx * kTopK) & ~0u >> (32 - kTopK);
    }
  };

  // Sums the rows of one token, from `column` on; `last`: the beginning of the last eight columns.
  // NOTE: columns after `last` are replaced by the last ones, so that loads need no branch.
  ETC_DEVICE static void add_up(
      const Task& task, const Choices& choices, i32 token, i32 first, i32 count, i32 column,
      i32 last, u64 target) {
    const auto product = task.template operand<2>();
    const i32 stride = i32(product.stride[0]) * i32(sizeof(*product.base));
    Sum8<Task::kIsHalf> sum[kParts];
#pragma unroll 1
    for (i32 begin = 0; begin < count; begin += kAtOnce) {
      uint4 vectors[kParts][kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const i64 row_offset = i64(__shfl_sync(~0u, choices.row, first + begin + k)) * stride;
#pragma unroll
        for (int p = 0; p < kParts; ++p) {
          const u64 source = u64(product.at(0, minimum(column + p * 256, last))) + row_offset;
          vectors[p][k] = is_any(begin + k, count) ? ptx::load16_last(source) : uint4{};
        }
      }
      // NOTE: a branch that no lane takes. Without it, the compiler of large programs moves additions
      // between the loads, so that fewer are in flight: 8192 tokens on 4 ranks took 20 % more time.
      if (!Task::kSplit && ptx::lane() >= 32) return;
      if constexpr (kIsByPart) {
        float weight[kAtOnce];
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          weight[k] = __shfl_sync(~0u, choices.weight, first + k);
        }
#pragma unroll
        for (int p = 0; p < kParts; ++p) {
#pragma unroll
          for (int k = 0; k < kAtOnce; ++k) sum[p].add(vectors[p][k], weight[k]);
        }
      } else {
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          const float weight = __shfl_sync(~0u, choices.weight, first + begin + k);
#pragma unroll
          for (int p = 0; p < kParts; ++p) {
            if (is_any(begin + k, count)) sum[p].add(vectors[p][k], weight);
          }
        }
      }
    }
    if constexpr (Task::kShared > 0) {
      const auto rows = task.template operand<Task::kReads - Task::kShared>();
      float weight = 1.0f;
      if constexpr (Task::kShared > 1) {
        const auto logits = task.template operand<Task::kReads - 1>();
        weight = sigmoid(__uint_as_float(ptx::load4_l2(u64(logits.at(token, 0)))));
      }
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
        const u64 source = u64(rows.at(token, minimum(column + p * 256, last)));
        sum[p].add(ptx::load16_last(source), weight);
      }
    }
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      ptx::store16(target + minimum(column + p * 256, last) * 2, sum[p].rounded());
    }
  }

  ETC_DEVICE static void clear(const Task& task, i32 columns, u64 target) {
#pragma unroll 1
    for (i32 column = task.thread * 8; column < columns; column += 256) {
      ptx::store16(target + column * 2, uint4{});
    }
  }

  ETC_DEVICE static bool is_any(i32 choice, i32 count) {
    return (!Task::kSplit && kTopK % kAtOnce == 0) || choice < count;
  }
};

}  // namespace etc
