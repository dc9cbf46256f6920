// A residual plus the RMSNorm of what is added to it, and the RMSNorm of this sum.
#pragma once
#include "functions/add_ranks_norm.cuh"
#include "functions/rms_norm.cuh"

namespace etc {

// One row. `Added` adds x or its parts. The reads after it are the bias, if there is one, the
// residual, the gain of x and that of the sum, if it is normalized.
template <class Task, class Added>
struct PostNormedRow {
  using Vectors = RowVectors<Task>;
  static constexpr i32 kReads = Task::kReads, kResidual = 1 + Task::kHasBias;
  static constexpr i32 kAtOnce = Vectors::kAtOnce, kStep = Vectors::kStep;
  static constexpr i32 kChunk = kAtOnce * kStep;  // columns that stay in registers
  static constexpr i32 kWarps = Task::threads / 32;

  // NOTE: of long rows, x is in y until the second loop, and the sum is read again in the third.
  ETC_DEVICE static void run(const Task& task) {
    const auto tile = task.template operand<kReads>();
    const i32 columns = tile.size[decltype(tile)::kRank - 1];
    const u64 residual = u64(task.template operand<kResidual>().at());
    const u64 gain = u64(task.template operand<kResidual + 1>().at());
    const u64 sum = u64(tile.at()), y = u64(task.template operand<kReads + 1>().at());
    const Added added(task);
    const i32 last = (columns - 1) / kChunk * kChunk;
    uint4 vectors[kAtOnce], gains[kAtOnce], addend[kAtOnce];
    float squares = 0.0f;
#pragma unroll 1
    for (i32 first = 0; first <= last; first += kChunk) {
      const i32 column = task.thread * 8 + first;
      typename Vectors::Sums total = {};
      added.add(column, columns, total);
      if constexpr (Task::kHasBias) {
        Vectors::fetch(u64(task.template operand<1>().at()), column, columns, addend);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) total[i].add(addend[i]);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) vectors[i] = total[i].rounded();
      squares += squares_of(vectors);
      if (first != last) store(y, column, columns, vectors);
    }
    const float scale = scale_of(task, squares, columns);
    squares = 0.0f;
#pragma unroll 1
    for (i32 first = last; first >= 0; first -= kChunk) {
      const i32 column = task.thread * 8 + first;
      if (first != last) Vectors::fetch(y, column, columns, vectors);
      Vectors::fetch(gain, column, columns, gains);
      Vectors::fetch(residual, column, columns, addend);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        vectors[i] = multiplied(vectors[i], gains[i], scale, addend[i]);
      }
      store(sum, column, columns, vectors);
      if constexpr (Task::kNormalizesSum) squares += squares_of(vectors);
      if constexpr (!Task::kNormalizesSum) store(y, column, columns, vectors);
    }
    if constexpr (Task::kNormalizesSum) {
      task.sync();  // the sums of warps have been read
      const float of_sum = scale_of(task, squares, columns);
      const u64 last_gain = u64(task.template operand<kReads - 1>().at());
#pragma unroll 1
      for (i32 first = 0; first <= last; first += kChunk) {
        const i32 column = task.thread * 8 + first;
        if (first > 0) Vectors::fetch(sum, column, columns, vectors);
        Vectors::fetch(last_gain, column, columns, gains);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          vectors[i] = multiplied(vectors[i], gains[i], of_sum, uint4{});
        }
        store(y, column, columns, vectors);
      }
    }
  }

 private:
  ETC_DEVICE static void store(
      u64 target, i32 column, i32 columns, const uint4 (&vectors)[kAtOnce]) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const i32 own_column = column + i * kStep;
      if (own_column < columns) ptx::store16(target + own_column * 2, vectors[i]);
    }
  }
  ETC_DEVICE static float squares_of(const uint4 (&vectors)[kAtOnce]) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const u32 word[4] = {vectors[i].x, vectors[i].y, vectors[i].z, vectors[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 pair = unpack<Task::kIsHalf>(word[j]);
        sum = __fmaf_rn(pair.y, pair.y, __fmaf_rn(pair.x, pair.x, sum));
      }
    }
    return sum;
  }
  // 1 / sqrt(mean + eps) of all threads' squares.
  ETC_DEVICE static float scale_of(const Task& task, float squares, i32 columns) {
    float* const sums = reinterpret_cast<float*>(task.scratch);
    squares = ptx::warp_sum(squares);
    if (task.thread % 32 == 0) sums[task.thread / 32] = squares;
    task.sync();
    float total = 0.0f;
#pragma unroll
    for (i32 warp = 0; warp < kWarps; ++warp) total += sums[warp];
    return rsqrtf(total / float(columns) + Task::kEps);
  }
  // words * scale * gain + addend, rounded once.
  ETC_DEVICE static uint4 multiplied(uint4 words, uint4 gain, float scale, uint4 addend) {
    u32 word[4] = {words.x, words.y, words.z, words.w};
    const u32 gains[4] = {gain.x, gain.y, gain.z, gain.w};
    const u32 addends[4] = {addend.x, addend.y, addend.z, addend.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = unpack<Task::kIsHalf>(word[i]);
      const float2 pair_gain = unpack_gains<Task::kIsHalf, Task::kGainOffset>(gains[i]);
      const float2 sum = unpack<Task::kIsHalf>(addends[i]);
      word[i] = pack<Task::kIsHalf>(
          pair.x * scale * pair_gain.x + sum.x, pair.y * scale * pair_gain.y + sum.y);
    }
    return make_uint4(word[0], word[1], word[2], word[3]);
  }
};

template <class Task>
struct post_norm : PostNormedRow<Task, AddedRow<Task>> {};

template <class Task>
struct post_ranks_norm : PostNormedRow<Task, AddedRanks<Task>> {};

}  // namespace etc
