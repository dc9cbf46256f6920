#pragma once
#include "ptx/memory.cuh"

namespace etc::ptx {

inline u32 thread() { return threadIdx.x; }
inline u32 lane() { return threadIdx.x % 32; }
inline u32 warp() { return __shfl_sync(~0u, threadIdx.x / 32, 0); }
inline u32 uniform(u32 v) { return v; }
inline u32 defer_use(u32 v) { return v; }
inline bool elect_one() {
  emulation::exchange("elect_one", {});
  return lane() == 0;
}

template <bool kIsHalf>
UNTRACKED void mma_16x8x16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  const emulation::Words* all = emulation::exchange("mma_16x8x16", {a0, a1, a2, a3, b0, b1});
  const u32 row = lane() / 4, column = lane() % 4 * 2;
  float a[2][16], b[2][16];
  for (u32 k = 0; k < 16; ++k) {
    for (u32 i = 0; i < 2; ++i) {
      const u32 from = k % 8 / 2, half = k / 8;
      a[i][k] = element<kIsHalf>(u32(all[row * 4 + from].word[i + half * 2]), k % 2);
      b[i][k] = element<kIsHalf>(u32(all[(column + i) * 4 + from].word[4 + half]), k % 2);
    }
  }
  for (u32 i = 0; i < 4; ++i) {
    for (u32 k = 0; k < 16; ++k) d[i] += a[i / 2][k] * b[i % 2][k];
  }
}

template <bool kIsTransposed>
UNTRACKED void load_matrices(u32 (&r)[4], u32 address) {
  const uint4 own = load_shared_as<uint4>(address);
  const emulation::Words* all =
      emulation::exchange("load_matrices", {own.x, own.y, own.z, own.w});
  const u32 g = lane() / 4, c = lane() % 4;
  for (u32 m = 0; m < 4; ++m) {
    if (kIsTransposed) {
      const u32 low = u32(all[m * 8 + 2 * c].word[g / 2]) >> g % 2 * 16;
      const u32 high = u32(all[m * 8 + 2 * c + 1].word[g / 2]) >> g % 2 * 16;
      r[m] = (low & 0xffffu) | high << 16;
    } else {
      r[m] = u32(all[m * 8 + g].word[c]);
    }
  }
}
inline void load_matrix4(u32 (&r)[4], u32 address) { load_matrices<false>(r, address); }
inline void load_matrix4_transposed(u32 (&r)[4], u32 address) { load_matrices<true>(r, address); }
UNTRACKED inline u32 transpose_matrix(u32 v) {
  const emulation::Words* all = emulation::exchange("transpose_matrix", {v});
  const u32 g = lane() / 4, c = lane() % 4;
  const u32 low = u32(all[2 * c * 4 + g / 2].word[0]) >> g % 2 * 16;
  const u32 high = u32(all[(2 * c + 1) * 4 + g / 2].word[0]) >> g % 2 * 16;
  return (low & 0xffffu) | high << 16;
}

UNTRACKED inline u32 warp_max(u32 v) {
  const emulation::Words* all = emulation::exchange("warp_max", {v});
  for (int i = 0; i < 32; ++i) v = all[i].word[0] > v ? u32(all[i].word[0]) : v;
  return v;
}
inline float warp_sum(float v) {
  for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(~0u, v, step);
  return v;
}
UNTRACKED inline u32 warp_sum_before(u32 v) {
  const emulation::Words* all = emulation::exchange("warp_sum_before", {v});
  u32 sum = 0;
  for (u32 i = 0; i < lane(); ++i) sum += u32(all[i].word[0]);
  return sum;
}

}  // namespace etc::ptx
