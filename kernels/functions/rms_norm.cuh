// RMSNorm of rows, one after the other, by all threads of a task.
#pragma once
#include "ptx/warp.cuh"
#include "worker/task.cuh"

namespace etc {

// kAdds: of the sum of x and a residual, which is stored, too.
template <class Task, bool kAdds>
struct NormalizedRows {
  static constexpr i32 kWarps = Task::threads / 32;
  static constexpr i32 kAtOnce = 4;                // vectors of each operand in flight a thread
  static constexpr i32 kStep = Task::threads * 8;  // columns of one vector a thread
  static constexpr i32 kChunk = kAtOnce * kStep;   // columns that stay in registers

  ETC_DEVICE static void run(const Task& task) {
    const auto x = task.template operand<0>();
    constexpr int kAxis = decltype(x)::kRank - 2;
    float* const sums = reinterpret_cast<float*>(task.scratch);
#pragma unroll 1
    for (i32 row = 0; row < x.size[kAxis]; ++row) {
      const Row one(task, row);
      float* const slots = sums + row % 2 * kWarps;  // the previous row's are being read
      const i32 last = (one.columns - 1) / kChunk * kChunk;
      uint4 gain[kAtOnce], v[kAtOnce];
      float squares = 0.0f;
#pragma unroll 1
      for (i32 first = 0; first <= last; first += kChunk) {
        fetch(one.gain, task.thread * 8 + first, one.columns, gain);
        one.fetch_sums(task.thread * 8 + first, v);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) squares += squares_of(v[i]);
      }
      squares = ptx::warp_sum(squares);
      if (task.thread % 32 == 0) slots[task.thread / 32] = squares;
      task.sync();
      float total = 0.0f;
#pragma unroll
      for (i32 warp = 0; warp < kWarps; ++warp) total += slots[warp];
      const float scale = rsqrtf(total / float(one.columns) + Task::kEps);
      // The last columns are in registers; of long rows the others are loaded again.
#pragma unroll 1
      for (i32 first = last; first >= 0; first -= kChunk) {
        if (first != last) {
          fetch(one.gain, task.thread * 8 + first, one.columns, gain);
          fetch(one.sum, task.thread * 8 + first, one.columns, v);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const i32 column = task.thread * 8 + first + i * kStep;
          if (column < one.columns) {
            ptx::store16(one.y + column * 2, multiplied(v[i], gain[i], scale));
          }
        }
      }
    }
  }

 private:
  // The addresses of one row's operands.
  struct Row {
    u64 x, residual, gain, sum, y;
    i32 columns;

    ETC_DEVICE Row(const Task& task, i32 row) {
      x = residual = sum = of<0>(task, row);
      gain = u64(task.template operand<kAdds ? 2 : 1>().at());
      y = of<kAdds ? 4 : 2>(task, row);
      if constexpr (kAdds) {
        residual = of<1>(task, row);
        sum = of<3>(task, row);
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

   private:
    template <int n>
    ETC_DEVICE static u64 of(const Task& task, i32 row) {
      const auto tile = task.template operand<n>();
      return u64(tile.at()) + u64(row) * u64(tile.stride[decltype(tile)::kRank - 2]) * 2;
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
struct rms_norm : NormalizedRows<Task, false> {};

template <class Task>
struct add_rms_norm : NormalizedRows<Task, true> {};

}  // namespace etc
