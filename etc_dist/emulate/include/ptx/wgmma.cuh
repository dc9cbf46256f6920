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
      emulation::multiply(p);
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
// With 16 k of a in four registers of each thread: of two rows, eight k further of these.
UNTRACKED inline void add_wgmma_of_registers(emulation::WgmmaOp p, const u32* a) {
  const emulation::Words* all = emulation::exchange("wgmma", {a[0], a[1], a[2], a[3]});
  const u32 first = threadIdx.x % 32 / 4 * 4;
  for (u32 k = 0; k < 16; ++k) {
    const emulation::Words& of = all[first + k % 8 / 2];
    for (u32 row = 0; row < 2; ++row) {
      const u32 word = u32(of.word[k / 8 * 2 + row]);
      p.a_rows[row * 16 + k] = u16(k % 2 == 0 ? word : word >> 16);
    }
  }
  p.registers = a;
  memcpy(p.held, a, sizeof p.held);
  add_wgmma(p);
}
inline void keep_order(float&) {}
inline void keep_order(u32&) {}
inline u64 matrix_descriptor(u32 low) { return u64(low) | u64(64) << 32; }

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
inline void store_matrix2(u32 shared, u32 a, u32 b) {
  store_matrices<false>(shared, 2, {a, b});
}
inline void store_matrix2_transposed(u32 shared, u32 a, u32 b) {
  store_matrices<true>(shared, 2, {a, b});
}

}  // namespace etc::ptx

END_UNTRACKED
