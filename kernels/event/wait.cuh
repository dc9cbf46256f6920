// Waiting and notifying. Waits that may be in vain spin in this file.
#pragma once
#include "common/operand.cuh"
#include "event/layout.cuh"
#include "ptx/barrier.cuh"
#include "ptx/memory.cuh"

namespace etc {

// What every thread of a running program knows.
template <class Program>
struct Run {
  using Args = typename Program::Args;
  const Args& g;
  u32 epoch;
  u32 start;  // when this worker began: the low word of the clock, ns

  // This rank's symmetric block.
  ETC_DEVICE u64 self() const { return g.peer[g.rank]; }
  ETC_DEVICE Control* control() const { return reinterpret_cast<Control*>(g.control); }
  ETC_DEVICE u64 event_address(i32 rank, u32 index) const {
    return g.peer[rank] + sizeof(SymmetricHead) + (u64(epoch & 1) * g.event_capacity + index) * 4;
  }
  ETC_DEVICE bool aborted() const { return ptx::load_relaxed(self() + kAbortOffset) != 0; }
  // That the run has been aborted, by whichever rank.
  ETC_DEVICE void tell_host() const { ptx::store_relaxed(g.status, 1); }
};

// Who waits, for the record; and, once a wait was in vain, for what: its kind, the number of the
// event or rank, and the count that would have met it.
struct Waiter {
  u32 lane, call, task;
  u32 kind = kInsideWorker, index = 0, want = 0;

  ETC_DEVICE bool in_vain(u32 kind_, u32 index_, u32 want_) {
    kind = kind_, index = index_, want = want_;
    return false;
  }
};

// Who waited for another role of its worker or cluster; no task is named. NOTE: roles of the
// tensor lane tell it at their end, since registers are scarce before, and since whoever they
// waited for mostly waits and tells itself.
constexpr Waiter kInWorker{kTensorLane, 0, 0};

// Ends the program on all ranks.
template <class Program>
ETC_DEVICE void give_up(
    const Run<Program>& run, const Waiter& who, u32 kind, u32 index, u32 have, u32 want) {
  Control* control = run.control();
  const u32 n = atomicAdd(&control->faults, 1u);
  ptx::store_relaxed(u64(&control->shape), run.g.shape);
  if (n < kMaxFaults) {
    control->fault[n] =
        Fault{blockIdx.x, who.lane, who.call, who.task, kind, index, have, want};
  }
  ptx::fence_acq_rel<true>();
  for (int r = 0; r < Program::kWorld; ++r) {
    ptx::store_relaxed(run.g.peer[r] + kAbortOffset, 1);
  }
}

// A thread whose wait was in vain, because of an abort or because it was too long.
// NOTE: roles have one place or two for this, since it is long, and there are many waits.
template <class Program>
ETC_DEVICE void report(const Run<Program>& run, const Waiter& who) {
  if (threadIdx.x % 32 != 0) return;
  run.tell_host();
  if (run.aborted()) return;
  u32 have = 0;
  if (who.kind == kEventWait) {
    have = ptx::load_relaxed(run.event_address(run.g.rank, who.index));
  } else if (who.kind == kPeerStart) {
    have = ptx::load_relaxed(run.self() + u64(who.index) * 4);
  }
  give_up(run, who, who.kind, who.index, have, who.want);
}

// Polls until `poll()` is true; false if the program was aborted or `limit` nanoseconds passed.
// kNap sleeps between polls, for waits that are not on the critical path. kWarp: all lanes
// poll together and leave together. The clock is looked at in steps of about a millisecond,
// and for an abort once a step.
// NOTE: steps are counted in 32 bits. The host accepts limits of up to 1e6 s, so that twice the
// limit has fewer than 2^31 steps.
template <bool kNap, bool kWarp = false, class Program, class Poll>
ETC_DEVICE bool spin(const Run<Program>& run, u64 limit, Poll poll) {
  constexpr int kStep = 20;
  u32 begin = 0, seen = 0;
  while (!poll()) {  // one place, or inlined bodies double the code
    if constexpr (kNap) ptx::nanosleep(100);
    u32 now = u32(ptx::global_timer() >> kStep);
    if constexpr (kWarp) now = __shfl_sync(~0u, now, 0);
    if (now == seen) continue;
    begin = seen == 0 ? now : begin;
    const bool is_first = seen == 0;
    seen = now;
    if (is_first) continue;
    bool ended = run.aborted();
    if constexpr (kWarp) ended = __any_sync(~0u, ended);
    if (ended || now - begin > u32(limit >> kStep)) return false;
  }
  return true;
}

// The pace of a lane: whether the clock's low word has come to `due`.
ETC_DEVICE bool is_due(u32 due) { return i32(u32(ptx::global_timer()) - due) >= 0; }
// Until it has; false if the program was aborted.
template <class Program>
ETC_DEVICE bool wait_until_due(const Run<Program>& run, u32 due) {
  while (!is_due(due)) {
    ptx::nanosleep(200);
    if (run.aborted()) return false;
  }
  return true;
}

template <class Program>
ETC_DEVICE bool event_is_met(const Run<Program>& run, const EventRef& event) {
  const u64 address = run.event_address(run.g.rank, event.index);
  const u32 have = event.cross_rank ? ptx::load_acquire<true>(address)
                                    : ptx::load_acquire<false>(address);
  return i32(have - event.target) >= 0;
}

template <bool kNap, class Program>
ETC_DEVICE bool wait_event(const Run<Program>& run, const EventRef& event, Waiter& who) {
  return spin<kNap>(run, run.g.wait_limit, [&] { return event_is_met(run, event); }) ||
         who.in_vain(kEventWait, event.index, event.target);
}

// Adds `step` to an element. The caller has ordered its data before by a fence.
template <class Program>
ETC_DEVICE void notify_event(const Run<Program>& run, const EventRef& event, u32 step) {
  const u64 address = run.event_address(event.rank, event.index);
  if (event.cross_rank) {
    ptx::add_relaxed<true>(address, step);
  } else {
    ptx::add_relaxed<false>(address, step);
  }
}
// The same; returns the count before, and what was ordered before it is seen from here on.
template <class Program>
ETC_DEVICE u32 count_event(const Run<Program>& run, const EventRef& event, u32 step) {
  const u64 address = run.event_address(event.rank, event.index);
  return event.cross_rank ? ptx::fetch_add_acquire<true>(address, step)
                          : ptx::fetch_add_acquire<false>(address, step);
}

// The handshake: `rank` has begun this epoch, so it reads nothing of the last one any more
// and its next counters are clear. `entered` remembers, one bit a rank.
template <class Program>
ETC_DEVICE bool peer_has_started(const Run<Program>& run, i32 rank, u32& entered) {
  if (rank == run.g.rank || ((entered >> rank) & 1)) return true;
  if (i32(ptx::load_acquire<true>(run.self() + u64(rank) * 4) - run.epoch) < 0) return false;
  entered |= 1u << rank;
  return true;
}
template <class Program>
ETC_DEVICE bool wait_peer_start(
    const Run<Program>& run, i32 rank, u32& entered, Waiter& who) {
  const auto has_started = [&] { return peer_has_started(run, rank, entered); };
  return spin<false>(run, run.g.wait_limit, has_started) ||
         who.in_vain(kPeerStart, u32(rank), run.epoch);
}

// A hand-over between warps of a worker or cluster. It is given twice the limit: where a
// whole worker stands still because of an event, the event is what gets reported.
template <class Program>
ETC_DEVICE bool wait_mbarrier(const Run<Program>& run, u32 barrier, u32 parity) {
  return spin<false>(
      run, 2 * run.g.wait_limit, [&] { return ptx::mbarrier_try_wait(barrier, parity); });
}

}  // namespace etc
