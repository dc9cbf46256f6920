#pragma once
#include "common/types.cuh"

namespace etc::ptx {

inline void wgmma_fence() {}
inline void wgmma_commit() {
  emulation::Thread& self = *emulation::own;
  if (self.groups == sizeof self.ends / sizeof *self.ends) emulation::fail("many groups");
  self.ends[self.groups++] = self.count;
}

// An element of an operand: of 128-byte rows along k, eight of which are neighbours; or, if it is
// KN, of such rows along the other axis.
template <bool kIsHalf>
float operand(u64 descriptor, u32 row, u32 k, bool is_kn = false) {
  const auto field = [&](u32 bit) { return u32(descriptor >> bit & 0x3fff) << 4; };
  const u32 first = field(0), apart = field(16), eight_rows = field(32);
  const u32 of_kn = first + row / 64 * apart + k / 8 * eight_rows + k % 8 * 128 + row % 64 * 2;
  const u32 of_nk = first + row / 8 * eight_rows + row % 8 * 128 + k * 2;
  const u32 at = emulation::swizzled(is_kn ? of_kn : of_nk);
  u16 bits;
  memcpy(&bits, emulation::at(at, sizeof bits, sizeof bits), sizeof bits);
  return element<kIsHalf>(bits, 0);
}
template <bool kIsHalf>
void multiply(const emulation::Product& p) {
  const u32 thread = threadIdx.x % 128, row = thread / 32 * 16 + thread % 32 / 4;
  float a[2][16], b[16];
  for (u32 half = 0; half < 2; ++half) {
    for (u32 k = 0; k < 16; ++k) a[half][k] = operand<kIsHalf>(p.a, row + half * 8, k);
  }
  for (i32 i = 0; i < p.columns / 4; ++i) {
    const u32 column = u32(i) / 2 * 8 + thread % 4 * 2 + u32(i) % 2;
    for (u32 k = 0; k < 16; ++k) b[k] = operand<kIsHalf>(p.b, column, k, p.is_kn);
    for (i32 half = 0; half < 2; ++half) {
      float& sum = p.sums[i / 2 * 4 + half * 2 + i % 2];
      float v = p.adds ? sum : 0.0f;
      for (u32 k = 0; k < 16; ++k) v += a[half][k] * b[k];
      sum = v;
    }
  }
}
// By whole warpgroups: none multiplies before all of its warps have issued as much, and by whole
// warps: none goes on before all have multiplied.
template <int kPending>
void wgmma_wait() {
  emulation::Thread& self = *emulation::own;
  if (self.groups > kPending) {
    const u32 done = self.groups - kPending, end = self.ends[done - 1];
    self.products_done += end;
    for (u32 warp = threadIdx.x / 128 * 4, i = 0; i < 4; ++i) {
      const u32& issued = self.worker->warps[warp + i].products;
      while (issued < self.products_done) emulation::yield();
    }
    for (u32 i = 0; i < end; ++i) {
      const emulation::Product& p = self.products[i];
      p.is_half ? multiply<true>(p) : multiply<false>(p);
    }
    memmove(self.products, self.products + end, (self.count - end) * sizeof *self.products);
    self.count -= end;
    for (u32 i = 0; i < kPending; ++i) self.ends[i] = self.ends[done + i] - end;
    self.groups = kPending;
  }
  __syncwarp();
}
inline void add_product(const emulation::Product& p) {
  emulation::Thread& self = *emulation::own;
  if (self.count == sizeof self.products / sizeof *self.products) emulation::fail("many products");
  self.products[self.count++] = p;
  if (threadIdx.x % 32 == 0) ++self.worker->warps[threadIdx.x / 32].products;
}
inline void keep_order(float&) {}
template <u32 kStride = 1>
u64 matrix_descriptor(u32 low) {
  return u64(low) | u64(64 * kStride) << 32;
}
template <bool kIsHalf, int kTransposeB>
void wgmma_64x256x16(float (&d)[128], u64 a, u64 b, i32 accumulate) {
  add_product({d, a, b, 256, accumulate != 0, kIsHalf, kTransposeB != 0});
}

// Each lane has a row's address, of the first `count` matrices.
template <bool kIsTransposed>
void store_matrices(u32 shared, u32 count, emulation::Words own) {
  emulation::may_yield();
  const emulation::Words* all = emulation::exchange("store_matrices", own);
  const u32 lane = threadIdx.x % 32, row = lane % 8;
  if (lane / 8 < count) {
    u8* const to = emulation::at(shared, 16, 16);
    for (u32 i = 0; i < 8; ++i) {
      const u32 holder = kIsTransposed ? i * 4 + row / 2 : row * 4 + i / 2;
      const u32 word = u32(all[holder].word[lane / 8]);
      const u16 bits = u16((kIsTransposed ? row : i) % 2 == 0 ? word : word >> 16);
      memcpy(to + i * 2, &bits, 2);
    }
  }
  __syncwarp();
}
inline void store_matrix4(u32 shared, u32 a, u32 b, u32 c, u32 d) {
  store_matrices<false>(shared, 4, {a, b, c, d});
}
inline void store_matrix4_transposed(u32 shared, u32 a, u32 b, u32 c, u32 d) {
  store_matrices<true>(shared, 4, {a, b, c, d});
}
inline void store_matrix2_transposed(u32 shared, u32 a, u32 b) {
  store_matrices<true>(shared, 2, {a, b});
}

}  // namespace etc::ptx
