// Bulk copies between global and shared memory (TMA).
#pragma once
#include "common/operand.cuh"

namespace etc::ptx {

ETC_DEVICE void prefetch_map(const Box& box) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(box.map) : "memory");
}
ETC_DEVICE void load_box(u32 shared, const Box& box, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(shared),
      "l"(box.map), "r"(box.x), "r"(box.y), "r"(box.z), "r"(barrier)
      : "memory");
}
ETC_DEVICE void load_box(u32 shared, const Box& box, u32 barrier, CachePolicy policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared),
      "l"(box.map), "r"(box.x), "r"(box.y), "r"(box.z), "r"(barrier), "l"(u64(policy))
      : "memory");
}
// Contiguous bytes; both addresses and `bytes` are multiples of 16.
ETC_DEVICE void load_bytes(
    u32 shared, u64 global, u32 bytes, u32 barrier, CachePolicy policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(shared),
      "l"(global), "r"(bytes), "r"(barrier), "l"(u64(policy))
      : "memory");
}

}  // namespace etc::ptx
