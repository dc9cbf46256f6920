#pragma once
#include "common/types.cuh"

namespace etc::ptx {

inline void mbarrier_init(u32 barrier, u32 count) {
  emulation::barrier(barrier) = {int16_t(count), u16(count), 0};
}
inline void mbarrier_init_fence() {}
inline void mbarrier_arrive_many(u32 barrier, u32 count) {
  emulation::barrier(barrier).arrive(count);
}
inline void mbarrier_arrive(u32 barrier) { mbarrier_arrive_many(barrier, 1); }
inline void mbarrier_arrive_expect(u32 barrier, u32 bytes) {
  emulation::barrier(barrier).expect(bytes);
  mbarrier_arrive_many(barrier, 1);
}
inline void mbarrier_arrive_cluster(u32 barrier, u32 worker) {
  emulation::barrier(*emulation::own->worker->cluster[worker], barrier).arrive(1);
}
inline bool mbarrier_try_wait(u32 barrier, u32 parity) {
  emulation::Barrier& seen = emulation::barrier(barrier);
  seen.is_over(parity) ? emulation::may_yield() : emulation::yield();
  return seen.is_over(parity);
}
template <int kThreads>
bool named_barrier_any(u32 id, bool value) {
  static_assert(kThreads % 32 == 0);
  if (id >= 16) emulation::fail("there are barriers 0 to 15");
  return emulation::own->worker->named[id].meet(kThreads, value);
}
template <int kThreads>
void named_barrier(u32 id) {
  named_barrier_any<kThreads>(id, false);
}
inline void cluster_barrier() {
  emulation::own->worker->pair->meet(emulation::kMaxCluster * emulation::kThreads, false);
}

}  // namespace etc::ptx
