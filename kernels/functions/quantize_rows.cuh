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
  static constexpr i32 kAtOnce = 8;  // steps whose loads are in flight together
  static constexpr float kLeast = 0x1p-100f, kMostCode = 448.0f;

  ETC_DEVICE static void run(const Task& task) {
    const auto x = last_axes<2>(task.template operand<0>());
    const auto all_codes = last_axes<2>(task.template operand<1>());
    const auto all_scales = last_axes<2>(task.template operand<2>());
    const i32 columns = x.size[1], lane = task.thread % 32;
    for (i32 row = task.thread / 32; row < x.size[0]; row += Task::threads / 32) {
      const u64 source = u64(x.at(row)), codes = u64(all_codes.at(row));
      const u64 scales = u64(all_scales.at(row));
#pragma unroll 1
      for (i32 first = 0; first < columns; first += kAtOnce * kStep) {
        quantize(source, codes, scales, first, columns, lane);
      }
    }
  }

 private:
  // kAtOnce steps from column `first` on: zeros beyond the end of the row.
  // NOTE: each lane divides for one group alone.
  ETC_DEVICE static void quantize(
      u64 source, u64 codes, u64 scales, i32 first, i32 columns, i32 lane) {
    uint4 vectors[kAtOnce];
    float most[kAtOnce];
#pragma unroll
    for (i32 i = 0; i < kAtOnce; ++i) {
      const i32 column = first + i * kStep + lane * 8;
      vectors[i] = ptx::load16_l2_if(column < columns, source + column * 2);
    }
#pragma unroll
    for (i32 i = 0; i < kAtOnce; ++i) most[i] = most_of(vectors[i]);
    const float group_most = most_of_pairs(most, lane), factor = __fdiv_rn(kMostCode, group_most);
#pragma unroll
    for (i32 i = 0; i < kAtOnce; ++i) {
      const i32 column = first + i * kStep + lane * 8;
      const uint2 word = codes_of(vectors[i], __shfl_sync(~0u, factor, 2 * i, kLanes));
      if (column < columns) ptx::store8(codes + column, word.x, word.y);
    }
    const i32 group = first / i32(kBlockDepth) + lane % kLanes + lane / kLanes;
    if (lane % 2 == 0 && group * i32(kBlockDepth) < columns) {
      ptx::store4(scales + group * 4, __float_as_uint(__fdiv_rn(group_most, kMostCode)));
    }
  }

  // The largest one of a group, of the lane's pair of lanes.
  // NOTE: at each step, a lane keeps those of half of the groups.
  ETC_DEVICE static float most_of_pairs(float (&most)[kAtOnce], i32 lane) {
    static_assert(2 * kAtOnce == kLanes);
#pragma unroll
    for (i32 step = kAtOnce; step > 1; step /= 2) {
      const bool is_upper = (lane & step) != 0;
#pragma unroll
      for (i32 i = 0; i < step / 2; ++i) {
        const float sent_most = is_upper ? most[i] : most[i + step / 2];
        const float kept_most = is_upper ? most[i + step / 2] : most[i];
        most[i] = fmaxf(kept_most, __shfl_xor_sync(~0u, sent_most, step));
      }
    }
    return fmaxf(most[0], __shfl_xor_sync(~0u, most[0], 1));
  }

  // The largest of eight sizes, and at least kLeast.
  ETC_DEVICE static float most_of(uint4 vector) {
    const u32 words[4] = {vector.x, vector.y, vector.z, vector.w};
    float most = kLeast;
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      const float2 pair = unpack<bool(Task::kIsHalf)>(words[i]);
      most = fmaxf(most, fmaxf(fabsf(pair.x), fabsf(pair.y)));
    }
    return most;
  }
  ETC_DEVICE static uint2 codes_of(uint4 vector, float factor) {
    const u32 words[4] = {vector.x, vector.y, vector.z, vector.w};
    u32 halves[4];
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      const float2 pair = unpack<bool(Task::kIsHalf)>(words[i]);
      halves[i] = ptx::to_e4m3x2(__fmul_rn(pair.x, factor), __fmul_rn(pair.y, factor));
    }
    return make_uint2(halves[0] | halves[1] << 16, halves[2] | halves[3] << 16);
  }
};

}  // namespace etc
