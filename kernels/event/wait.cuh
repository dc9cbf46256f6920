// Waiting and notifying. All waits that can time out spin in this file.
#pragma once
#include "common/operand.cuh"
#include "event/layout.cuh"
#include "ptx/barrier.cuh"
#include "ptx/memory.cuh"

namespace etc {

// Whether some ranks are far: on other hosts, where their memory is not mapped. `Program::Far` is
// the transport to them, such as far/nvshmem.cuh.
template <class Program>
constexpr bool kHasFar = requires { typename Program::Far; };

// The number of near ranks, those of this host.
template <class Program>
constexpr int near_ranks() {
  if constexpr (kHasFar<Program>) return Program::kNear;
  else return Program::kWorld;
}

// The state of a run that every thread holds.
template <class Program>
struct Run {
  using Args = typename Program::Args;
  const Args& g;
  // With kLoadsEarly: 0 until the mbarriers are initialized; in the producer thread, until its
  // admission. The other threads of its warp never read it.
  u32 epoch;

  // This rank's symmetric block.
  ETC_DEVICE u64 self() const { return g.peer[g.rank]; }
  ETC_DEVICE Control* control() const { return reinterpret_cast<Control*>(g.control); }
  ETC_DEVICE u64 event_address(i32 rank, u32 element_idx) const {
    return g.peer[rank] + sizeof(SymmetricHead) +
        (u64(epoch & 1) * g.event_capacity + element_idx) * 4;
  }
  // Whether `rank` is far: then g.peer[rank] is 0.
  ETC_DEVICE bool is_far(i32 rank) const {
    if constexpr (kHasFar<Program>) return !g.peer.has(rank);
    return false;
  }
  // The number of near rank `rank` among those of its host.
  ETC_DEVICE i32 local(i32 rank) const {
    if constexpr (kHasFar<Program>) return rank - i32(g.peer.first);
    return rank;
  }
  // The block of a near rank, by its number there.
  ETC_DEVICE u64 near_block(i32 local) const {
    if constexpr (kHasFar<Program>) return g.peer.block[local];
    else return g.peer[local];
  }
  // The rank of this rank's number on another host.
  ETC_DEVICE i32 partner(i32 host) const {
    return host * near_ranks<Program>() + local(g.rank);
  }
  // This rank's words that far ranks add to: for an element, now or in `word_epoch`, and for the
  // epochs of the partner on `host`.
  ETC_DEVICE u64 far_word(u32 element_idx) const { return far_word(element_idx, epoch); }
  ETC_DEVICE u64 far_word(u32 element_idx, u32 word_epoch) const {
    const u64 words = self() + sizeof(SymmetricHead) + u64(g.event_capacity) * 8;
    return words + (u64(word_epoch & 1) * g.event_capacity + element_idx) * 8;
  }
  ETC_DEVICE u64 far_started(i32 host) const {
    return far_word(0, 0) + (u64(g.event_capacity) * 2 + host) * 8;
  }
  // Not 0 once the run is aborted.
  ETC_DEVICE u32 abort_word() const { return ptx::load_relaxed(self() + kAbortOffset); }
  ETC_DEVICE bool aborted() const { return abort_word() != 0; }
  // Reports to the host that the run was aborted, by any rank.
  ETC_DEVICE void signal_host() const { ptx::store_relaxed(g.status, 1); }
};

// Diagnostic record of a wait: the waiting task and, after a failure, its kind, the number of the
// awaited event or rank, and the count that would have met it.
struct Waiter {
  u32 lane, call, task;
  u32 kind = kInsideWorker, index = 0, want = 0;

  ETC_DEVICE bool fail(u32 kind_, u32 element_idx, u32 want_) {
    kind = kind_, index = element_idx, want = want_;
    return false;
  }
};

// A wait for another role of the worker; it names no task. NOTE: roles of the tensor
// lane report it when they end, since registers are scarce before. Mostly the other role waits too,
// and reports for itself.
constexpr Waiter kInWorker{kTensorLane, 0, 0};

// Aborts the run on all ranks whose memory is mapped, and records why.
template <class Program>
ETC_DEVICE void abort_run(
    const Run<Program>& run, const Waiter& who, u32 kind, u32 element_idx, u32 have, u32 want) {
  Control* control = run.control();
  const u32 num_faults = atomicAdd(&control->faults, 1u);
  ptx::store_relaxed(u64(&control->shape), run.g.shape);
  if (num_faults < kMaxFaults) {
    control->fault[num_faults] =
        Fault{blockIdx.x, who.lane, who.call, who.task, kind, element_idx, have, want};
  }
  ptx::fence_acq_rel<true>();
  for (int r = 0; r < near_ranks<Program>(); ++r) {
    ptx::store_relaxed(run.near_block(r) + kAbortOffset, 1);
  }
}

// One thread, at the end of a run that was aborted here: aborts it on near ranks, of which a
// partner may have aborted this one alone, and on partners.
template <class Program>
ETC_DEVICE void abort_far(const Run<Program>& run) {
#pragma unroll 1
  for (i32 r = 0; r < near_ranks<Program>(); ++r) {
    ptx::store_relaxed(run.near_block(r) + kAbortOffset, 1);
  }
#pragma unroll 1
  for (i32 host = 0; host < Program::kHosts; ++host) {
    const i32 partner = run.partner(host);
    if (run.is_far(partner)) Program::Far::add(run.self() + kAbortOffset, 1, partner);
  }
}

// Records for the host how many workers had begun when the first wait failed. NOTE: workers that
// other work kept from beginning may begin as soon as those that wait leave.
template <class Program>
ETC_DEVICE void record_resident(const Run<Program>& run) {
  Control* control = run.control();
  // NOTE: this worker has been counted, so 0 means that all have been. A comparison of epochs would
  // occupy a register of every thread until its end.
  const u32 num_begun = ptx::load_relaxed(u64(&control->begun));
  atomicCAS(&control->resident, 0u, num_begun == 0 ? gridDim.x : num_begun);
}

// The last epoch that another rank, which may be far, has begun.
template <class Program>
ETC_DEVICE u32 epoch_of(const Run<Program>& run, i32 rank) {
  if constexpr (kHasFar<Program>) {
    if (run.is_far(rank)) {
      return u32(ptx::load_acquire_u64(run.far_started(rank / near_ranks<Program>())));
    }
  }
  return ptx::load_acquire<true>(run.self() + u64(run.local(rank)) * 4);
}

// Reports a failed wait: the run was aborted, or the wait timed out.
// NOTE: called from few places per role. The code is large, and inlining it at every wait would
// bloat the kernel.
template <class Program>
ETC_DEVICE void report(const Run<Program>& run, const Waiter& who) {
  if (threadIdx.x % 32 != 0) return;
  run.signal_host();
  record_resident(run);
  if (run.aborted()) return;
  u32 have = 0;
  if (who.kind == kEventWait) {
    have = ptx::load_relaxed(run.event_address(run.g.rank, who.index));
    if constexpr (kHasFar<Program>) have += u32(ptx::load_acquire_u64(run.far_word(who.index)));
  } else if (who.kind == kPeerStart) {
    if constexpr (kHasFar<Program>) {
      have = epoch_of(run, i32(who.index));
    } else {
      have = ptx::load_relaxed(run.self() + u64(who.index) * 4);
    }
  }
  abort_run(run, who, who.kind, who.index, have, who.want);
}

// How long a wait has lasted. The clock counts steps of about a millisecond.
// NOTE: steps are counted in 32 bits. The host accepts limits of up to 1e6 s, so that twice the
// limit has fewer than 2^31 steps.
struct Patience {
  static constexpr int kStep = 20;
  u32 begin = 0, last_poll = 0;

  // After each poll: false if the program was aborted, or if `limit` nanoseconds have passed since
  // the first call. Both are tested once per step. kWarp: all lanes call it, with the same result.
  template <bool kWarp, class Program>
  ETC_DEVICE bool lasts(const Run<Program>& run, u64 limit) {
    u32 now = u32(ptx::global_timer() >> kStep);
    if constexpr (kWarp) now = __shfl_sync(~0u, now, 0);
    if (now == last_poll) return true;
    begin = last_poll == 0 ? now : begin;
    const bool is_first = last_poll == 0;
    last_poll = now;
    if (is_first) return true;
    bool is_aborted = run.aborted();
    if constexpr (kWarp) is_aborted = __any_sync(~0u, is_aborted);
    return !is_aborted && now - begin <= u32(limit >> kStep);
  }
};

// Polls until `poll()` is true; false if the program was aborted or `limit` nanoseconds passed.
// kSleeps sleeps between polls, for waits off the critical path. kWarp: all lanes poll and leave
// together.
template <bool kSleeps, bool kWarp = false, class Program, class Poll>
ETC_DEVICE bool spin(const Run<Program>& run, u64 limit, Poll poll) {
  Patience patience;
  while (!poll()) {  // one call of poll(): a second one would double the inlined code
    if constexpr (kSleeps) ptx::nanosleep(100);
    if (!patience.template lasts<kWarp>(run, limit)) return false;
  }
  return true;
}

// Pacing of a lane: whether the low word of the clock has reached `due`; for 2^31 ns after it.
ETC_DEVICE bool is_due(u32 due) { return i32(u32(ptx::global_timer()) - due) >= 0; }

template <class Program>
ETC_DEVICE bool event_is_met(const Run<Program>& run, const EventRef& event) {
  if (event.target == 0) return true;
  const u64 address = run.event_address(run.g.rank, event.index);
  const u32 have = event.cross_rank ? ptx::load_acquire<true>(address)
                                    : ptx::load_acquire<false>(address);
  if constexpr (kHasFar<Program>) {
    u32 far = 0;
    if (event.cross_rank) far = u32(ptx::load_acquire_u64(run.far_word(event.index)));
    return i32(have + far - event.target) >= 0;
  }
  return i32(have - event.target) >= 0;
}

template <class Program>
ETC_DEVICE bool wait_event(const Run<Program>& run, const EventRef& event, Waiter& who) {
  return spin<false>(run, run.g.wait_limit, [&] { return event_is_met(run, event); }) ||
         who.fail(kEventWait, event.index, event.target);
}

// Adds a notification to an element. The caller has fenced its data.
template <class Program>
ETC_DEVICE void notify_event(const Run<Program>& run, const EventRef& event) {
  const u64 address = run.event_address(event.rank, event.index);
  if (event.cross_rank) {
    ptx::add_relaxed<true>(address, 1);
  } else {
    ptx::add_relaxed<false>(address, 1);
  }
}
// The same as an acquire; returns the previous count.
template <class Program>
ETC_DEVICE u32 count_event(const Run<Program>& run, const EventRef& event) {
  const u64 address = run.event_address(event.rank, event.index);
  return event.cross_rank ? ptx::fetch_add_acquire<true>(address, 1)
                          : ptx::fetch_add_acquire<false>(address, 1);
}

// The handshake: `rank` has begun this epoch. So it no longer reads data of the last one, and its
// next counters are clear. `entered` caches the result, one bit per near rank.
template <class Program>
ETC_DEVICE bool peer_has_started(const Run<Program>& run, i32 rank, u32& entered) {
  const i32 bit = run.local(rank);
  const bool is_far = run.is_far(rank);
  if (rank == run.g.rank || (!is_far && ((entered >> bit) & 1))) return true;
  if (i32(epoch_of(run, rank) - run.epoch) < 0) return false;
  if (!is_far) entered |= 1u << bit;
  return true;
}
template <class Program>
ETC_DEVICE bool wait_peer_start(
    const Run<Program>& run, i32 rank, u32& entered, Waiter& who) {
  const auto has_started = [&] { return peer_has_started(run, rank, entered); };
  return spin<false>(run, run.g.wait_limit, has_started) ||
         who.fail(kPeerStart, u32(rank), run.epoch);
}

// A wait between warps of a worker. It has twice the limit: if an event blocks the
// whole worker, the event is reported first.
template <class Program>
ETC_DEVICE bool wait_mbarrier(const Run<Program>& run, u32 barrier, u32 parity) {
  return spin<false>(
      run, 2 * run.g.wait_limit, [&] { return ptx::mbarrier_try_wait(barrier, parity); });
}

}  // namespace etc
