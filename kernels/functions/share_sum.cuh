// Sums of parts, in order, in float, into the memory of several ranks.
#pragma once
#include "functions/add_partials.cuh"

namespace etc {

template <class Task>
struct share_sum {
  static constexpr int kReads = Task::kReads, kCopies = Task::kCopies, kParts = Task::kParts;
  static constexpr bool kIsHalf = Task::kIsHalf;

  ETC_DEVICE static void run(const Task& task) {
    const auto x = task.template operand<0>();
    const auto y = task.template operand<kReads>();
    constexpr i32 kBytes = sizeof(*x.base), kResultBytes = sizeof(*y.base);
    constexpr int kWords = kBytes / 2;  // loads for eight columns of a part
    constexpr int kUnroll = maximum(1, Task::kThreadBytes / (kParts * kWords * 16));
    constexpr i32 kStep = Task::threads * 8;
    const i32 columns = y.size[decltype(y)::kRank - 1];
    u64 targets[kCopies], residual = 0;
    each_copy(task, targets);
    if constexpr (kReads > 1) residual = u64(task.template operand<1>().at());
    const u64 source = u64(x.at());
    u64 stride = 0;
    if constexpr (kParts > 1) stride = u64(x.stride[decltype(x)::kRank - 2]) * kBytes;
#pragma unroll 1
    for (i32 first = task.thread * 8; first < columns; first += kUnroll * kStep) {
      uint4 part[kUnroll][kParts][kWords], last[kUnroll][kResultBytes / 2];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const i32 column = first + u * kStep;
#pragma unroll
        for (int p = 0; p < kParts; ++p) {
          fetch<kWords>(column < columns, source + p * stride + u64(column) * kBytes, part[u][p]);
        }
        if constexpr (kReads > 1) {
          const u64 address = residual + u64(column) * kResultBytes;
          fetch<kResultBytes / 2>(column < columns, address, last[u]);
        }
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const i32 column = first + u * kStep;
        if (column >= columns) break;
        const u64 offset = u64(column) * kResultBytes;
        if constexpr (Task::kIsCopy) {
#pragma unroll
          for (int c = 0; c < kCopies; ++c) {
#pragma unroll
            for (int w = 0; w < kWords; ++w) {
              ptx::store16(targets[c] + offset + w * 16, part[u][0][w]);
            }
          }
        } else {
          typename Partials<Task>::Sum sum = {};
#pragma unroll
          for (int p = 0; p < kParts; ++p) add<kWords>(part[u][p], sum);
          if constexpr (kReads > 1) add<kResultBytes / 2>(last[u], sum);
#pragma unroll
          for (int c = 0; c < kCopies; ++c) {
            Partials<Task>::template store<kResultBytes>(targets[c] + offset, sum);
          }
        }
      }
    }
  }

 private:
  template <int c = 0>
  ETC_DEVICE static void each_copy(const Task& task, u64 (&targets)[kCopies]) {
    targets[c] = u64(task.template operand<kReads + c>().at());
    if constexpr (c + 1 < kCopies) each_copy<c + 1>(task, targets);
  }
  template <int kWords>
  ETC_DEVICE static void fetch(bool is_needed, u64 source, uint4 (&words)[kWords]) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) words[w] = ptx::load16_l2_if(is_needed, source + w * 16);
  }
  // Adds eight columns: one vector of two-byte elements, or two of floats.
  template <int kWords>
  ETC_DEVICE static void add(const uint4 (&words)[kWords], float (&sum)[8]) {
    if constexpr (kWords == 1) {
      const u32 word[4] = {words[0].x, words[0].y, words[0].z, words[0].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack<kIsHalf>(word[i]);
        sum[2 * i] += pair.x, sum[2 * i + 1] += pair.y;
      }
    } else {
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const u32 word[4] = {words[w].x, words[w].y, words[w].z, words[w].w};
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[w * 4 + i] += __uint_as_float(word[i]);
      }
    }
  }
};

}  // namespace etc
