// Adds fp32 partial sums of ranks in order.
#pragma once
#include "worker/task.cuh"

namespace etc {

template <class Task>
struct Partials {
  static constexpr int kAtOnce = 4;  // partials in flight
  using Sum = float[8];

  // Calls f(row, column) for each vector of eight columns, divided among the threads.
  template <class F>
  ETC_DEVICE static void each(const Task& task, i32 rows, i32 columns, F f) {
    const i32 across = columns / 8;
#pragma unroll 1
    for (i32 i = task.thread; i < rows * across; i += Task::threads) f(i / across, i % across * 8);
  }

  // Adds eight adjacent columns of a row to `sum`.
  template <class Operand>
  ETC_DEVICE static void add(const Operand& partials, i32 row, i32 column, Sum& sum) {
    const u64 stride = u64(partials.stride[0]) * 4, source = u64(partials.at(0, row, column));
    const i32 count = partials.size[0];
#pragma unroll 1
    for (i32 first = 0; first < count; first += kAtOnce) {
      uint4 part[kAtOnce][2];
#pragma unroll
      for (int p = 0; p < kAtOnce; ++p) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const u64 address = source + (first + p) * stride + h * 16;
          part[p][h] = first + p < count ? ptx::load16_l2(address) : uint4{};
        }
      }
#pragma unroll
      for (int p = 0; p < kAtOnce; ++p) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const uint4 words = part[p][h];
          const u32 word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
          for (int i = 0; i < 4; ++i) sum[h * 4 + i] += __uint_as_float(word[i]);
        }
      }
    }
  }

  // Stores eight columns at address `target`; kBytes: the size of an element.
  template <int kBytes>
  ETC_DEVICE static void store(u64 target, const Sum& sum) {
    if constexpr (kBytes == 4) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float* four = sum + h * 4;
        ptx::store16(
            target + h * 16,
            make_uint4(
                __float_as_uint(four[0]), __float_as_uint(four[1]), __float_as_uint(four[2]),
                __float_as_uint(four[3])));
      }
    } else {
      constexpr bool kIsHalf = Task::kIsHalf;
      ptx::store16(
          target,
          make_uint4(
              pack<kIsHalf>(sum[0], sum[1]), pack<kIsHalf>(sum[2], sum[3]),
              pack<kIsHalf>(sum[4], sum[5]), pack<kIsHalf>(sum[6], sum[7])));
    }
  }
};

template <class Task>
struct add_partials {
  ETC_DEVICE static void run(const Task& task) {
    const auto partials = task.template operand<0>();
    const auto y = task.template operand<1>();
    // The last two axes are rows and columns; an axis of ranks may precede them.
    constexpr int kAxis = decltype(y)::kRank - 2, kBytes = sizeof(*y.base);
    const i64 stride = y.stride[kAxis] * kBytes;
    const u64 first = u64(y.at());
    Partials<Task>::each(task, y.size[kAxis], y.size[kAxis + 1], [&](i32 row, i32 column) {
      typename Partials<Task>::Sum sum = {};
      Partials<Task>::add(partials, row, column, sum);
      Partials<Task>::template store<kBytes>(first + row * stride + column * kBytes, sum);
    });
  }
};

}  // namespace etc
