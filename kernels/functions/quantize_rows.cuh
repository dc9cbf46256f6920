// Quantizes rows to codes of e4m3, with a scale for each group of 128 elements.
#pragma once
#include "common/eight.cuh"
#include "functions/scaled_weights.cuh"
#include "ptx/memory.cuh"
#include "worker/task.cuh"

namespace etc {

// A warp has a row, and 16 of its lanes a group, eight elements each.
template <class Task>
struct quantize_rows {
  static constexpr i32 kLanes = kBlockDepth / 8, kStep = 32 * 8;  // of a group; elements of a warp
  static constexpr i32 kAtOnce = 8;  // loads of a lane in flight
  static constexpr float kLeast = 0x1p-100f, kMostCode = 448.0f;

  ETC_DEVICE static void run(const Task& task) {
    const auto x = task.template operand<0>();
    const i32 columns = x.size[1], lane = task.thread % 32;
    for (i32 row = task.thread / 32; row < x.size[0]; row += Task::threads / 32) {
      const u64 from = u64(x.at(row)), codes = u64(task.template operand<1>().at(row));
      const u64 scales = u64(task.template operand<2>().at(row));
#pragma unroll 1
      for (i32 first = 0; first < columns; first += kAtOnce * kStep) {
        uint4 v[kAtOnce];
#pragma unroll
        for (i32 i = 0; i < kAtOnce; ++i) {
          const i32 column = first + i * kStep + lane * 8;
          v[i] = ptx::load16_l2_if(column < columns, from + column * 2);
        }
#pragma unroll
        for (i32 i = 0; i < kAtOnce; ++i) {
          if (first + i * kStep >= columns) break;
          quantize(v[i], codes, scales, first + i * kStep + lane * 8, columns);
        }
      }
    }
  }

 private:
  // By a whole warp: eight elements, from `column` on, zeros beyond the end of the row.
  ETC_DEVICE static void quantize(uint4 v, u64 codes, u64 scales, i32 column, i32 columns) {
    const u32 words[4] = {v.x, v.y, v.z, v.w};
    float2 pairs[4];
    float most = kLeast;
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      pairs[i] = unpack<bool(Task::kIsHalf)>(words[i]);
      most = fmaxf(most, fmaxf(fabsf(pairs[i].x), fabsf(pairs[i].y)));
    }
#pragma unroll
    for (i32 step = kLanes / 2; step > 0; step /= 2) {
      most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
    }
    const float factor = __fdiv_rn(kMostCode, most);
    u32 halves[4];
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      halves[i] = ptx::to_e4m3x2(__fmul_rn(pairs[i].x, factor), __fmul_rn(pairs[i].y, factor));
    }
    if (column >= columns) return;
    ptx::store8(codes + column, halves[0] | halves[1] << 16, halves[2] | halves[3] << 16);
    if (column % i32(kBlockDepth) == 0) {
      const float scale = __fdiv_rn(most, kMostCode);
      ptx::store4(scales + column / i32(kBlockDepth) * 4, __float_as_uint(scale));
    }
  }
};

}  // namespace etc
