// Warp-level operations: small matrix products, reductions.
#pragma once
#include "common/types.cuh"

namespace etc::ptx {

// True on one lane of a whole warp.
// NOTE: the compiler knows that it is one; otherwise each bulk copy becomes a loop over lanes.
ETC_DEVICE bool elect_one() {
  u32 is_elected;
  asm volatile(
      "{.reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;}"
      : "=r"(is_elected)::"memory");
  return is_elected != 0;
}

// The value of a load, which is not used before.
// NOTE: otherwise the compiler compares it before a barrier, and the warp waits for it there.
ETC_DEVICE u32 used_here(u32 v) {
  asm volatile("" : "+r"(v)::"memory");
  return v;
}

// The index of this worker, and of this thread in its worker and in its warp.
// NOTE: volatile, so that it is read again at each use, and neither it nor values derived from it
// occupy registers in between.
ETC_DEVICE u32 worker() {
  u32 v;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(v));
  return v;
}
ETC_DEVICE u32 thread() {
  u32 v;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(v));
  return v;
}
ETC_DEVICE u32 lane() {
  u32 v;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(v));
  return v;
}
// The same value; by one thread of a warp.
// NOTE: the compiler then keeps it, and what it computes from it, in uniform registers.
ETC_DEVICE u32 uniform(u32 v) {
  u32 r;
  asm volatile("redux.sync.max.u32 %0, %1, %2;" : "=r"(r) : "r"(v), "r"(1u << lane()));
  return r;
}

// The number of this warp in its worker; by whole warps.
// NOTE: the compiler knows that it is the same in all lanes. After a branch that might divide a
// warp, and in which lanes meet again, it computes the addresses of later wgmmas per lane: four
// instructions more for each wgmma, which cost up to a fifth of the time.
ETC_DEVICE u32 warp() { return __shfl_sync(~0u, threadIdx.x / 32, 0); }

// d += a * b: 16 x 8, 16 deep. Per thread two neighbouring elements of k a register.
template <bool kIsHalf>
ETC_DEVICE void mma_16x8x16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  if constexpr (kIsHalf) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}

ETC_DEVICE u32 warp_max(u32 v) {
  u32 r;
  asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(r) : "r"(v));
  return r;
}
ETC_DEVICE float warp_sum(float v) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(~0u, v, step);
  return v;
}
// The sum over the lanes below this one.
ETC_DEVICE u32 warp_sum_before(u32 v) {
  const u32 lane = threadIdx.x % 32;
  u32 sum = v;
#pragma unroll
  for (u32 step = 1; step < 32; step *= 2) {
    const u32 other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  return sum - v;
}

}  // namespace etc::ptx
