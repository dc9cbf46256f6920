// RMSNorm over all heads of a row, which ranks have divided among them.
#pragma once
#include "ptx/warp.cuh"
#include "worker/task.cuh"

namespace etc {

// The sums of squares of two rows, on all ranks.
template <class Task>
struct push_squares {
  static constexpr i32 kWarps = Task::threads / 32;

  ETC_DEVICE static void run(const Task& task) {
    float* const sums = reinterpret_cast<float*>(task.scratch);  // [2][kWarps]
    const float q_squares = squares_of(task, task.template operand<0>());
    const float k = squares_of(task, task.template operand<1>());
    if (task.thread % 32 == 0) {
      sums[task.thread / 32] = q_squares;
      sums[kWarps + task.thread / 32] = k;
    }
    task.sync();
    if (task.thread < 2) {
      float total = 0.0f;
#pragma unroll
      for (i32 warp = 0; warp < kWarps; ++warp) total += sums[task.thread * kWarps + warp];
      store<0>(task, total);
    }
  }

 private:
  template <class Row>
  ETC_DEVICE static float squares_of(const Task& task, const Row& row) {
    float sum = 0.0f;
#pragma unroll 1
    for (i32 column = task.thread * 8; column < row.size[1]; column += Task::threads * 8) {
      const uint4 words = ptx::load16_l2(u64(row.at(0, column)));
      const u32 word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (u32 bits : word) {
        const float2 pair = unpack<Task::kIsHalf>(bits);
        sum = __fmaf_rn(pair.y, pair.y, __fmaf_rn(pair.x, pair.x, sum));
      }
    }
    return ptx::warp_sum(sum);
  }
  template <int kRank>
  ETC_DEVICE static void store(const Task& task, float total) {
    *task.template operand<Task::kReads + kRank>().at(task.thread) = total;
    if constexpr (kRank + 1 < Task::kWrites) store<kRank + 1>(task, total);
  }
};

// A row, normalized by the squares of all ranks.
template <class Task>
struct norm_of_ranks {
  ETC_DEVICE static void run(const Task& task) {
    const auto x = task.template operand<0>();
    const auto squares = last_axes<2>(task.template operand<1>());
    const auto gain = last_axes<1>(task.template operand<2>());
    const auto y = task.template operand<3>();
    float total = 0.0f;
#pragma unroll
    for (i32 rank = 0; rank < Task::kWorld; ++rank) {
      total += __uint_as_float(ptx::load4_l2(u64(squares.at(0, rank))));
    }
    const float scale = rsqrtf(total / float(Task::kWorld * x.size[1]) + Task::kEps);
#pragma unroll 1
    for (i32 column = task.thread * 8; column < x.size[1]; column += Task::threads * 8) {
      const uint4 words = ptx::load16_l2(u64(x.at(0, column)));
      const uint4 gain_words = ptx::load16_l2(u64(gain.at(column)));
      u32 word[4] = {words.x, words.y, words.z, words.w};
      const u32 gains[4] = {gain_words.x, gain_words.y, gain_words.z, gain_words.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack<Task::kIsHalf>(word[i]);
        const float2 pair_gains = unpack<Task::kIsHalf>(gains[i]);
        word[i] = pack<Task::kIsHalf>(pair.x * scale * pair_gains.x, pair.y * scale * pair_gains.y);
      }
      ptx::store16(u64(y.at(0, column)), make_uint4(word[0], word[1], word[2], word[3]));
    }
  }
};

}  // namespace etc
