#pragma once
#include "common/types.cuh"

BEGIN_UNTRACKED_CALLS

namespace etc::ptx {

inline void mbarrier_init(u32 barrier, u32 count) {
  emulation::init_barrier(barrier, count);
}
inline void mbarrier_init_fence() {}
inline void mbarrier_arrive_many(u32 barrier, u32 count) {
  emulation::arrive(*emulation::own->worker, barrier, count);
}
inline void mbarrier_arrive(u32 barrier) { mbarrier_arrive_many(barrier, 1); }
inline void mbarrier_arrive_expect(u32 barrier, u32 bytes) {
  emulation::expect(barrier, bytes);
  mbarrier_arrive_many(barrier, 1);
}
inline bool mbarrier_try_wait(u32 barrier, u32 parity) {
  return emulation::try_wait(barrier, parity);
}
inline bool mbarrier_test(u32 barrier, u32 parity) {
  return emulation::try_wait(barrier, parity, true);
}
template <int kThreads>
bool named_barrier_any(u32 id, bool value) {
  static_assert(kThreads % 32 == 0);
  if (id >= 16) emulation::fail("a named barrier other than 0 to 15");
  return emulation::own->worker->named[id].arrive_and_wait(kThreads, value);
}
template <int kThreads>
void named_barrier(u32 id) {
  named_barrier_any<kThreads>(id, false);
}
template <int kThreads>
void named_barrier_arrive(u32 id) {
  emulation::own->worker->named[id].arrive(kThreads, false);
}

}  // namespace etc::ptx

END_UNTRACKED_CALLS
