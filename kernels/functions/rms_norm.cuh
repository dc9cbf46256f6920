// RMSNorm of a row.
#pragma once
#include "ptx/warp.cuh"
#include "worker/task.cuh"

namespace etc {

// kAdds: of the sum of x and a residual, which is stored, too.
template <class Task, bool kAdds>
struct NormalizedRow {
  static constexpr i32 kWarps = Task::threads / 32;
  static constexpr i32 kAtOnce = 4;                // vectors of each operand in flight a thread
  static constexpr i32 kStep = Task::threads * 8;  // columns of one vector a thread
  static constexpr i32 kChunk = kAtOnce * kStep;   // columns that stay in registers

  // NOTE: one row, since a loop over rows needs registers for addresses.
  ETC_DEVICE static void run(const Task& task) {
    float* const sums = reinterpret_cast<float*>(task.scratch);
    const Row row(task);
    const i32 last = (row.columns - 1) / kChunk * kChunk;
    uint4 gain[kAtOnce], v[kAtOnce];
    float squares = 0.0f;
#pragma unroll 1
    for (i32 first = 0; first <= last; first += kChunk) {
      row.fetch_sums(task.thread * 8 + first, v);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) squares += squares_of(v[i]);
    }
    fetch(row.gain, task.thread * 8 + last, row.columns, gain);  // arrives during the reduction
    squares = ptx::warp_sum(squares);
    if (task.thread % 32 == 0) sums[task.thread / 32] = squares;
    task.sync();
    float total = 0.0f;
#pragma unroll
    for (i32 warp = 0; warp < kWarps; ++warp) total += sums[warp];
    const float scale = rsqrtf(total / float(row.columns) + Task::kEps);
    // The last columns are in registers; of long rows the others are loaded again.
#pragma unroll 1
    for (i32 first = last; first >= 0; first -= kChunk) {
      if (first != last) {
        fetch(row.gain, task.thread * 8 + first, row.columns, gain);
        fetch(row.sum, task.thread * 8 + first, row.columns, v);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const i32 column = task.thread * 8 + first + i * kStep;
        if (column < row.columns) {
          ptx::store16(row.y + column * 2, multiplied(v[i], gain[i], scale));
        }
      }
    }
  }

 private:
  // The addresses of one row's operands.
  struct Row {
    u64 x, residual, gain, sum, y;
    i32 columns;

    ETC_DEVICE explicit Row(const Task& task) {
      x = residual = sum = u64(task.template operand<0>().at());
      gain = u64(task.template operand<kAdds ? 2 : 1>().at());
      y = u64(task.template operand<kAdds ? 4 : 2>().at());
      if constexpr (kAdds) {
        residual = u64(task.template operand<1>().at());
        sum = u64(task.template operand<3>().at());
      }
      const auto tile = task.template operand<0>();
      columns = tile.size[decltype(tile)::kRank - 1];
    }
    // The elements of which the norm is: x, or the stored sums.
    ETC_DEVICE void fetch_sums(i32 column, uint4 (&v)[kAtOnce]) const {
      fetch(x, column, columns, v);
      if constexpr (kAdds) {
        uint4 other[kAtOnce];
        fetch(residual, column, columns, other);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          Sum8<Task::kIsHalf> total;
          total.add(v[i]);
          total.add(other[i]);
          v[i] = total.rounded();
          const i32 at = column + i * kStep;
          if (at < columns) ptx::store16(sum + at * 2, v[i]);
        }
      }
    }
  };

  ETC_DEVICE static void fetch(u64 from, i32 column, i32 columns, uint4 (&v)[kAtOnce]) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const i32 at = column + i * kStep;
      v[i] = ptx::load16_l2_if(at < columns, from + at * 2);
    }
  }
  ETC_DEVICE static float squares_of(uint4 v) {
    const u32 word[4] = {v.x, v.y, v.z, v.w};
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = unpack<Task::kIsHalf>(word[i]);
      sum = __fmaf_rn(pair.y, pair.y, __fmaf_rn(pair.x, pair.x, sum));
    }
    return sum;
  }
  ETC_DEVICE static uint4 multiplied(uint4 v, uint4 gain, float scale) {
    u32 word[4] = {v.x, v.y, v.z, v.w};
    const u32 by[4] = {gain.x, gain.y, gain.z, gain.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = unpack<Task::kIsHalf>(word[i]), of = unpack<Task::kIsHalf>(by[i]);
      word[i] = pack<Task::kIsHalf>(pair.x * scale * of.x, pair.y * scale * of.y);
    }
    return make_uint4(word[0], word[1], word[2], word[3]);
  }
};

template <class Task>
struct rms_norm : NormalizedRow<Task, false> {};

template <class Task>
struct add_rms_norm : NormalizedRow<Task, true> {};

}  // namespace etc
