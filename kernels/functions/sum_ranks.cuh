// Sums partial results of tokens over ranks: fp32, rank order. kParts: their number, if not all.
// kSplit: only ranks that have experts of a token's choice have a partial result; the first of these
// experts is the extent of operand 2. kHasNone: rows without a choice are written, too. kShared: as
// in combine_rows.cuh. kHasOwn: this rank's part is operand 1.
#pragma once
#include "worker/task.cuh"

namespace etc {

template <class Task>
struct sum_ranks {
  static constexpr int kCount = [] {
    if constexpr (requires { Task::kParts; }) return Task::kParts;
    return Task::kWorld;
  }();
  // NOTE: about eight loads are in flight, as in push_rows: kUnroll x 256 columns of each of
  // kTogether tokens.
  static constexpr int kUnroll = kCount > 4 ? 1 : 2, kTogether = kCount > 2 ? 1 : 2;
  static_assert(Task::threads == 32);

  ETC_DEVICE static void run(const Task& task) {
    const auto y = last_axes<2>(task.template operand<Task::kReads>());
    const i32 tokens = y.size[0];
#pragma unroll 1
    for (i32 first = 0; first < tokens; first += 32) {
      const u32 ranks = ranks_of(task, minimum(first + task.thread, tokens - 1));
      const i32 end = minimum(first + 32, tokens);
#pragma unroll 1
      for (i32 token = first; token < end; token += kTogether) {
        u32 ranks_of_token[kTogether];
#pragma unroll
        for (int t = 0; t < kTogether; ++t) {
          const u32 bits = __shfl_sync(~0u, ranks, (token + t) % 32);
          ranks_of_token[t] = token + t < end ? bits : 0;
        }
        add_up(task, token, ranks_of_token);
      }
    }
  }

 private:
  // One bit for each rank that has a partial result of the token.
  ETC_DEVICE static u32 ranks_of(const Task& task, i32 token) {
    if constexpr (Task::kSplit) {
      const auto ids = task.template operand<1>();
      u32 ranks = 0;
#pragma unroll
      for (int k = 0; k < Task::kTopK; ++k) {
        const u32 id = ptx::load4_l2(u64(ids.at(token, k)));
        // NOTE: an expert before theirs is a large number, as is no expert.
        const u32 rank = (id - u32(task.template operand<2>().size[0])) / u32(Task::kExperts);
        if (rank < kCount) ranks |= 1u << rank;
      }
      return ranks;
    }
    return ~0u;
  }

  // Sums kTogether tokens from `token` on; `ranks`: those of each, 0 after the last token.
  ETC_DEVICE static void add_up(const Task& task, i32 token, const u32 (&ranks)[kTogether]) {
    const auto partials = task.template operand<0>();
    const auto y = last_axes<2>(task.template operand<Task::kReads>());
    const u64 stride = u64(partials.stride[0]) * sizeof(*partials.base);
    const u32 bytes = u32(y.size[1]) * sizeof(*y.base);
#pragma unroll 1
    for (u32 begin = task.thread * 16; begin < bytes; begin += kUnroll * 512) {
      uint4 part[kTogether][kUnroll][kCount];
#pragma unroll
      for (int t = 0; t < kTogether; ++t) {
#pragma unroll
        for (int r = 0; r < kCount; ++r) {
          u64 source = u64(partials.at(0, token + t)) + r * stride + begin;
          if constexpr (Task::kHasOwn) {
            const auto row = last_axes<2>(task.template operand<1>());
            if (r == task.g.rank) source = u64(row.at(token + t)) + begin;
          }
#pragma unroll
          for (int u = 0; u < kUnroll; ++u) {
            const bool is_needed = begin + u * 512 < bytes && (ranks[t] >> r & 1);
            part[t][u][r] = is_needed ? ptx::load16_l2(source + u * 512) : uint4{};
          }
        }
      }
#pragma unroll
      for (int t = 0; t < kTogether; ++t) {
        const u64 target = u64(y.at(token + t)) + begin;
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          bool is_inside = begin + u * 512 < bytes && ranks[t] != 0;
          if constexpr (Task::kHasNone) {
            is_inside = begin + u * 512 < bytes && token + t < y.size[0];
          }
          if (is_inside) {
            const u32 column = (begin + u * 512) / sizeof(*y.base);
            ptx::store16(target + u * 512, sum(task, token + t, column, part[t][u]));
          }
        }
      }
    }
  }

  ETC_DEVICE static uint4 sum(
      const Task& task, i32 token, i32 column, const uint4 (&part)[kCount]) {
    Sum8<Task::kIsHalf> total;
#pragma unroll
    for (int r = 0; r < kCount; ++r) total.add(part[r]);
    if constexpr (Task::kShared > 0) {
      const auto rows = task.template operand<Task::kReads - Task::kShared>();
      float weight = 1.0f;
      if constexpr (Task::kShared > 1) {
        const auto logits = task.template operand<Task::kReads - 1>();
        weight = sigmoid(__uint_as_float(ptx::load4_l2(u64(logits.at(token, 0)))));
      }
      total.add(ptx::load16_l2(u64(rows.at(token, column))), weight);
    }
    return total.rounded();
  }
};

}  // namespace etc
