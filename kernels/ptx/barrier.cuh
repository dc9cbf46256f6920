// mbarriers, named barriers and cluster barriers.
// NOTE: the default forms of mbarrier arrive and try_wait are used on purpose; the
// .release.cluster and .acquire.cluster forms compile to MEMBAR in the main loop.
#pragma once
#include "common/types.cuh"

namespace etc::ptx {

ETC_DEVICE void mbarrier_init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
ETC_DEVICE void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
ETC_DEVICE void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
ETC_DEVICE void mbarrier_arrive_many(u32 barrier, u32 count) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(count)
               : "memory");
}
ETC_DEVICE void mbarrier_arrive_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
ETC_DEVICE void mbarrier_arrive_cluster(u32 barrier, u32 worker) {
  asm volatile(
      "{.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];}" ::"r"(barrier),
      "r"(worker)
      : "memory");
}
// The same as a release of cluster scope: the other worker may overwrite what this thread has read.
ETC_DEVICE void mbarrier_arrive_cluster_release(u32 barrier, u32 worker) {
  asm volatile(
      "{.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote];}" ::"r"(barrier),
      "r"(worker)
      : "memory");
}
ETC_DEVICE bool mbarrier_try_wait(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{.reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done;
}
// The same as an acquire of cluster scope.
ETC_DEVICE bool mbarrier_try_wait_cluster(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{.reg .pred p;\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done;
}
// Whole warps, kThreads in all.
// NOTE: aligned, so that the compiler knows that the lanes of a warp are together: see ptx::warp().
template <int kThreads>
ETC_DEVICE void named_barrier(u32 id) {
  asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}
// A whole warp, which does not wait: the others of the kThreads do.
template <int kThreads>
ETC_DEVICE void named_barrier_arrive(u32 id) {
  asm volatile("barrier.cta.arrive %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}
// The same; true on all threads if `value` is true on any.
template <int kThreads>
ETC_DEVICE bool named_barrier_any(u32 id, bool value) {
  u32 any;
  asm volatile(
      "{.reg .pred p, q;\n"
      "setp.ne.u32 p, %1, 0;\n"
      "barrier.cta.red.or.aligned.pred q, %2, %3, p;\n"
      "selp.u32 %0, 1, 0, q;}"
      : "=r"(any)
      : "r"(u32(value)), "r"(id), "n"(kThreads)
      : "memory");
  return any;
}

// A barrier of all threads of a cluster, after which they see the mbarriers whose initialisation
// others have fenced. Every thread executes both halves. NOTE: an arrival that also releases other
// writes compiles to MEMBAR.GPU, which delays the first loads of a run by half a microsecond.
ETC_DEVICE void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
ETC_DEVICE void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The same for all writes, and arrivals at mbarriers of the other worker.
ETC_DEVICE void cluster_barrier() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

}  // namespace etc::ptx
