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
ETC_DEVICE u64 load_acquire_u64(u64 address) {
  u64 v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(address) : "memory");
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
// The same, returning the previous value.
template <bool kSystem>
ETC_DEVICE u32 fetch_add(u64 address, u32 v) {
  u32 old;
  if constexpr (kSystem) {
    asm volatile("atom.relaxed.sys.global.add.u32 %0, [%1], %2;"
                 : "=r"(old) : "l"(address), "r"(v) : "memory");
  } else {
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;"
                 : "=r"(old) : "l"(address), "r"(v) : "memory");
  }
  return old;
}
template <bool kSystem>
ETC_DEVICE u32 fetch_add_acquire(u64 address, u32 v) {
  u32 old;
  if constexpr (kSystem) {
    asm volatile("atom.acquire.sys.global.add.u32 %0, [%1], %2;"
                 : "=r"(old) : "l"(address), "r"(v) : "memory");
  } else {
    asm volatile("atom.acquire.gpu.global.add.u32 %0, [%1], %2;"
                 : "=r"(old) : "l"(address), "r"(v) : "memory");
  }
  return old;
}
ETC_DEVICE u32 fetch_add_acq_rel(u64 address, u32 v) {
  u32 old;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(old) : "l"(address), "r"(v) : "memory");
  return old;
}
template <bool kSystem>
ETC_DEVICE u32 fetch_or(u64 address, u32 v) {
  u32 old;
  if constexpr (kSystem) {
    asm volatile("atom.relaxed.sys.global.or.b32 %0, [%1], %2;"
                 : "=r"(old) : "l"(address), "r"(v) : "memory");
  } else {
    asm volatile("atom.relaxed.gpu.global.or.b32 %0, [%1], %2;"
                 : "=r"(old) : "l"(address), "r"(v) : "memory");
  }
  return old;
}
// Adds one at GPU scope to a counter below the limit; returns the previous count.
// NOTE: not an add, nor an increment with limit ~0: the compiler aggregates these over the warp,
// and then waits at once for the result to distribute it.
ETC_DEVICE u32 count_up(u64 address) {
  u32 old;
  asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], 0x7fffffff;"
               : "=r"(old) : "l"(address) : "memory");
  return old;
}
template <bool kSystem>
ETC_DEVICE void fence_acq_rel() {
  if constexpr (kSystem) {
    asm volatile("fence.acq_rel.sys;" ::: "memory");
  } else {
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
  }
}
// Between generic accesses and bulk copies: all memory, or global or shared memory alone.
ETC_DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }
ETC_DEVICE void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
ETC_DEVICE void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// NOTE: these loads have no "memory" clobber, so that many stay in flight.
// Bypasses L1, for data that another SM wrote.
ETC_DEVICE uint4 load16_l2(u64 address) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
}
// Evict-first, for data that is read for the last time. NOTE: through L1, unlike the load above:
// only for data that this SM has not read before the acquire that covers it.
ETC_DEVICE uint4 load16_last(u64 address) {
  uint4 v;
  asm volatile("ld.global.cs.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
}
// For data that is constant during the program, not allocated in L1; zeros unless `wanted`.
// NOTE: predicated instead of branched, so that loads are issued back to back.
ETC_DEVICE uint4 load16_once_if(bool wanted, u64 address) {
  uint4 v;
  asm volatile("{.reg .pred p;\n"
               "setp.ne.u32 p, %5, 0;\n"
               "mov.u32 %0, 0; mov.u32 %1, 0; mov.u32 %2, 0; mov.u32 %3, 0;\n"
               "@p ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];}"
               : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
               : "l"(address), "r"(u32(wanted)));
  return v;
}
ETC_DEVICE u32 load4_l2(u64 address) {
  u32 v;
  asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(address));
  return v;
}
// As load16_l2; zeros unless `wanted`.
ETC_DEVICE uint4 load16_l2_if(bool wanted, u64 address) {
  uint4 v;
  asm volatile("{.reg .pred p;\n"
               "setp.ne.u32 p, %5, 0;\n"
               "mov.u32 %0, 0; mov.u32 %1, 0; mov.u32 %2, 0; mov.u32 %3, 0;\n"
               "@p ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];}"
               : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
               : "l"(address), "r"(u32(wanted)));
  return v;
}
ETC_DEVICE uint2 load8_l2_if(bool wanted, u64 address) {
  uint2 v;
  asm volatile("{.reg .pred p;\n"
               "setp.ne.u32 p, %3, 0;\n"
               "mov.u32 %0, 0; mov.u32 %1, 0;\n"
               "@p ld.global.cg.v2.u32 {%0,%1}, [%2];}"
               : "=&r"(v.x), "=&r"(v.y)
               : "l"(address), "r"(u32(wanted)));
  return v;
}
ETC_DEVICE void store16(u64 address, uint4 v) {
  asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(address), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}
ETC_DEVICE void store8(u64 address, u32 low, u32 high) {
  asm volatile("st.global.v2.u32 [%0], {%1,%2};" ::"l"(address), "r"(low), "r"(high) : "memory");
}
ETC_DEVICE void store4(u64 address, u32 v) {
  asm volatile("st.global.u32 [%0], %1;" ::"l"(address), "r"(v) : "memory");
}

// Prefetches memory into L2; address and size are multiples of 16.
ETC_DEVICE void prefetch_l2(u64 address, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(bytes) : "memory");
}

// 16 bytes from global to shared memory, of which the last 16 - `bytes` become 0. The mbarrier
// counts an arrival of this thread once all its copies so far are complete.
ETC_DEVICE void copy16_async(u32 shared, u64 address, u32 bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(address),
               "r"(bytes)
               : "memory");
}
ETC_DEVICE void mbarrier_arrive_copied(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

ETC_DEVICE void store_shared(u32 address, u32 v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}
ETC_DEVICE void store_shared8(u32 address, u32 low, u32 high) {
  asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(address), "r"(low), "r"(high) : "memory");
}
ETC_DEVICE void store_shared16(u32 address, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}
ETC_DEVICE uint4 load_shared16(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}
ETC_DEVICE uint2 load_shared8(u32 address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
  return v;
}

// Stores to the same offset in the shared memory of worker `worker` of the cluster, whose mbarrier
// at `barrier` counts the 4 bytes.
ETC_DEVICE void store_async_cluster(u32 address, u32 v, u32 barrier, u32 worker) {
  asm volatile(
      "{.reg .b32 word, counter;\n"
      "mapa.shared::cluster.u32 word, %0, %3;\n"
      "mapa.shared::cluster.u32 counter, %2, %3;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [word], %1, [counter];}" ::
          "r"(address),
      "r"(v), "r"(barrier), "r"(worker)
      : "memory");
}
// The address of the same offset in the shared memory of worker `worker` of the cluster.
ETC_DEVICE u32 cluster_address(u32 address, u32 worker) {
  u32 found;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(found) : "r"(address), "r"(worker));
  return found;
}
// Stores to such an address; the mbarrier at another one, of the same worker, counts the 16 bytes.
ETC_DEVICE void store16_async_cluster(u32 address, uint4 v, u32 barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(address),
      "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(barrier)
      : "memory");
}
ETC_DEVICE u32 load_shared(u32 address) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}

// The worker's dynamic shared memory.
ETC_DEVICE u8* shared_memory() {
  extern __shared__ __align__(1024) u8 shared[];
  return shared;
}
ETC_DEVICE u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

}  // namespace etc::ptx
