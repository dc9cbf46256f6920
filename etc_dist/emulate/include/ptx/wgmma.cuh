#pragma once
#include "common/types.cuh"

BEGIN_UNTRACKED

namespace etc::ptx {

inline void wgmma_fence() {}
inline void wgmma_commit() {
  emulation::Thread& self = *emulation::own;
  if (self.groups == sizeof self.ends / sizeof *self.ends) {
    emulation::fail("more than 8 groups of wgmma");
  }
  self.ends[self.groups++] = self.count;
}

// The address of an element of an operand: in 128-byte rows along k, or along the other axis if it
// is KN; groups of eight rows are contiguous.
inline u32 place_of(u64 descriptor, u32 row, u32 k, bool is_kn) {
  const auto field = [&](u32 bit) { return u32(descriptor >> bit & 0x3fff) << 4; };
  const u32 first = field(0), apart = field(16), eight_rows = field(32);
  const u32 of_kn = first + row / 64 * apart + k / 8 * eight_rows + k % 8 * 128 + row % 64 * 2;
  const u32 of_nk = first + row / 8 * eight_rows + row % 8 * 128 + k * 2;
  return emulation::swizzled(is_kn ? of_kn : of_nk);
}
typedef u16 Short8 __attribute__((vector_size(16)));
typedef u32 Word8 __attribute__((vector_size(32)));
template <bool kIsHalf>
void read_row(float (&to)[16], u64 descriptor, u32 row, bool is_kn) {
  const u32 step = is_kn ? 1 : 8;  // adjacent in memory
  for (u32 k = 0; k < 16; k += step) {
    const u32 bytes = step * sizeof(u16);
    Short8 bits;
    __builtin_memcpy(&bits, emulation::at(place_of(descriptor, row, k, is_kn), bytes, bytes), bytes);
    if (kIsHalf || is_kn) {
      for (u32 i = 0; i < step; ++i) to[k + i] = element<kIsHalf>(bits[i], 0);
    } else {  // the same, all at once
      const Word8 eight = __builtin_convertvector(bits, Word8) << 16;
      __builtin_memcpy(to + k, &eight, sizeof eight);
    }
  }
}
// A warp reads 16 rows of a, from `first` on, and all of b, when it waits for the wgmma.
// NOTE: each of the four warps checks a different quarter of b, which suffices to detect races.
inline void check_operands(const emulation::WgmmaOp& p, u32 first) {
  emulation::Worker& worker = *emulation::own->worker;
  const u32 count = ++worker.warps[threadIdx.x / 32].read;
  const emulation::Access read{&p.known, p.known.wgmmas(), count, emulation::kAsync, false};
  for (u32 i = 0; i < 32; ++i) {  // eight elements each
    const u32 row = first + (p.a_is_kn ? i / 16 * 8 : i / 2), k = p.a_is_kn ? i % 16 : i % 2 * 8;
    if (row < u32(p.rows)) access_shared(worker, place_of(p.a, row, k, p.a_is_kn), 16, read);
  }
  for (u32 i = threadIdx.x / 32 % 4; i < u32(p.columns) * 2; i += 4) {  // eight elements each
    const u32 row = p.b_is_kn ? i / 16 * 8 : i / 2, k = p.b_is_kn ? i % 16 : i % 2 * 8;
    access_shared(worker, place_of(p.b, row, k, p.b_is_kn), 16, read);
  }
}
template <bool kIsHalf>
UNTRACKED void multiply(const emulation::WgmmaOp& p) {
  const u32 thread = threadIdx.x % 128, row = thread / 32 * 16 + thread % 32 / 4;
  float a[2][16], b[16];
  for (u32 half = 0; half < 2; ++half) {
    if (row + half * 8 < u32(p.rows)) {
      read_row<kIsHalf>(a[half], p.a, row + half * 8, p.a_is_kn);
    } else {
      for (float& unknown : a[half]) unknown = __builtin_nanf("");
    }
  }
  if (threadIdx.x % 32 == 0) check_operands(p, row);
  for (i32 i = 0; i < p.columns / 4; ++i) {
    const u32 column = u32(i) / 2 * 8 + thread % 4 * 2 + u32(i) % 2;
    read_row<kIsHalf>(b, p.b, column, p.b_is_kn);
    for (i32 half = 0; half < 2; ++half) {
      float& sum = p.sums[i / 2 * 4 + half * 2 + i % 2];
      float v = p.adds ? sum : 0.0f;
      for (u32 k = 0; k < 16; ++k) v += a[half][k] * b[k];
      sum = v;
    }
  }
}
// By whole warpgroups: computes after all of its warps have issued the wgmmas. By whole warps:
// returns after all lanes have computed.
template <int kPending>
UNTRACKED void wgmma_wait() {
  emulation::Thread& self = *emulation::own;
  if (self.groups > kPending) {
    const u32 done = self.groups - kPending, end = self.ends[done - 1];
    self.wgmmas_done += end;
    for (u32 warp = threadIdx.x / 128 * 4, i = 0; i < 4; ++i) {
      const u32& issued = self.worker->warps[warp + i].wgmmas;
      while (issued < self.wgmmas_done) emulation::yield();
    }
    for (u32 i = 0; i < end; ++i) {
      const emulation::WgmmaOp& p = self.wgmmas[i];
      p.is_half ? multiply<true>(p) : multiply<false>(p);
      emulation::drop(p.known.view);
    }
    memmove(self.wgmmas, self.wgmmas + end, (self.count - end) * sizeof *self.wgmmas);
    self.count -= end;
    for (u32 i = 0; i < kPending; ++i) self.ends[i] = self.ends[done + i] - end;
    self.groups = kPending;
  }
  const u64 read = self.worker->warps[threadIdx.x / 32].read;
  self.known.wgmma = u32(emulation::exchange("wgmma_wait", {read})[0].word[0]);
}
UNTRACKED inline void add_wgmma(emulation::WgmmaOp p) {
  emulation::Thread& self = *emulation::own;
  if (self.count == sizeof self.wgmmas / sizeof *self.wgmmas) {
    emulation::fail("more than 64 wgmma instructions in flight");
  }
  const bool is_first = threadIdx.x % 32 == 0;
  if (is_first) p.known = self.known.issue();
  self.wgmmas[self.count++] = p;
  if (is_first) ++self.worker->warps[threadIdx.x / 32].wgmmas;
}
inline void keep_order(float&) {}
template <u32 kStride = 1>
u64 matrix_descriptor(u32 low) {
  return u64(low) | u64(64 * kStride) << 32;
}

// Each lane has the address of a row of the first `count` matrices.
template <bool kIsTransposed>
UNTRACKED void store_matrices(u32 shared, u32 count, emulation::Words own) {
  emulation::may_yield();
  const emulation::Words* all = emulation::exchange("store_matrices", own);
  const u32 lane = threadIdx.x % 32, row = lane % 8;
  if (lane / 8 < count) {
    u8* const to = emulation::at(shared, 16, 16);
    for (u32 i = 0; i < 8; ++i) {
      const u32 holder = kIsTransposed ? i * 4 + row / 2 : row * 4 + i / 2;
      const u32 word = u32(all[holder].word[lane / 8]);
      const u16 bits = u16((kIsTransposed ? row : i) % 2 == 0 ? word : word >> 16);
      __builtin_memcpy(to + i * 2, &bits, 2);
    }
    const emulation::AgentView& known = emulation::own->known;
    access_shared(*emulation::own->worker, shared, 16, access_of(known, emulation::kPlain, true));
  }
  emulation::exchange("store_matrices", {});
}
inline void store_matrix4(u32 shared, u32 a, u32 b, u32 c, u32 d) {
  store_matrices<false>(shared, 4, {a, b, c, d});
}
inline void store_matrix2(u32 shared, u32 a, u32 b) {
  store_matrices<false>(shared, 2, {a, b});
}
inline void store_matrix4_transposed(u32 shared, u32 a, u32 b, u32 c, u32 d) {
  store_matrices<true>(shared, 4, {a, b, c, d});
}
inline void store_matrix2_transposed(u32 shared, u32 a, u32 b) {
  store_matrices<true>(shared, 2, {a, b});
}

}  // namespace etc::ptx

END_UNTRACKED
