// Loads, stores, fences and clocks: one instruction each.
#pragma once
#include "common/types.cuh"

namespace etc::ptx {

ETC_DEVICE u64 global_timer() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}
ETC_DEVICE void nanosleep(u32 ns) { asm volatile("nanosleep.u32 %0;" ::"r"(ns)); }

template <bool kSystem>
ETC_DEVICE u32 load_acquire(u64 address) {
  u32 v;
  if constexpr (kSystem) {
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(address) : "memory");
  } else {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(address) : "memory");
  }
  return v;
}
ETC_DEVICE u32 load_relaxed(u64 address) {
  u32 v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(address) : "memory");
  return v;
}
ETC_DEVICE void store_relaxed(u64 address, u32 v) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(address), "r"(v) : "memory");
}
ETC_DEVICE void store_release(u64 address, u32 v) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(v) : "memory");
}
template <bool kSystem>
ETC_DEVICE void add_relaxed(u64 address, u32 v) {
  if constexpr (kSystem) {
    asm volatile("red.relaxed.sys.global.add.u32 [%0], %1;" ::"l"(address), "r"(v) : "memory");
  } else {
    asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(address), "r"(v) : "memory");
  }
}
template <bool kSystem>
ETC_DEVICE void fence_acq_rel() {
  if constexpr (kSystem) {
    asm volatile("fence.acq_rel.sys;" ::: "memory");
  } else {
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
  }
}
// Between generic accesses and bulk copies: all memory, or shared memory alone.
ETC_DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }
ETC_DEVICE void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// NOTE: the 16-byte loads carry no "memory" clobber, so that many stay in flight.
// Past L1 (data that another SM wrote):
ETC_DEVICE uint4 load16_l2(u64 address) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
}
ETC_DEVICE void store16(u64 address, uint4 v) {
  asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(address), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

ETC_DEVICE u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

}  // namespace etc::ptx
