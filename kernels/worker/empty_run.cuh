// Runs of empty tasks: if a task with roles is empty, and by `empty_until` the tasks after it are
// too, one warp performs the waits and notifications of all of them, 32 at a time.
#pragma once
#include "queue/pop.cuh"
#include "worker/computes.cuh"
#include "worker/work_ring.cuh"

namespace etc {

// The producer thread of a cluster's first worker, whose ticket gave it the empty task t: claims
// the unclaimed rest of the run. Returns, for the work item, the distance from this unit to the
// claimed ones; 0 if there are none.
// NOTE: units that are assigned without a ticket have negative tickets.
template <class Program, class Call>
ETC_DEVICE u32 take_run(const Run<Program>& run, i32 ticket, i32 t) {
  const i32 end = ticket + Call::empty_until(run.g, t) - t;
  if (end <= 0) return 0;
  i32 drawn;
  if constexpr (Program::kDynamic) {
    drawn = i32(WorkQueue<Program, typename Program::TensorQueue>::draw_up_to(run, u32(end)));
  } else {
    drawn = i32(draw_up_to(run, kTensorLane, u32(end)));
  }
  return drawn < end ? WorkItem::kRun | u32(drawn - ticket) : 0;
}

// One lane: whether an empty task may notify; if it never can, `who` records why. `ticket`: the
// task's ticket in a dynamic program.
template <class Program, class Call>
ETC_DEVICE bool may_complete(
    const Run<Program>& run, i32 t, u32 ticket, u32& entered, Waiter& who) {
  const auto c = Call::at(run.g, t);
  if constexpr (Program::kDynamic) {
    // NOTE: the unit is known, but the run must not end before its slot is written.
    using TensorUnits = WorkQueue<Program, typename Program::TensorQueue>;
    if (TensorUnits::unit_of(run, ticket) == kNotYet) return false;
    if (!is_in_range<Program, Call>(run, c, who)) return false;
  } else {
    if (!waits_are_met<Program, Call>(run, c, who)) return false;
  }
  if (!peers_have_started<Program, Call>(run, c, entered)) return false;
  return FunctionOf<Call>::size(run, c) == 0 || who.fail(kNotEmpty, 0, 0);
}

// One lane: notifies for an empty task of a static program, for all workers of a cluster, if its
// waits are met; returns whether they are.
template <class Program, class Call>
ETC_DEVICE bool complete_empty(const Run<Program>& run, i32 t, u32& entered, Waiter& who) {
  if (!may_complete<Program, Call>(run, t, 0, entered, who)) return false;
  const auto c = Call::at(run.g, t);
  ptx::fence_acq_rel<Call::kNotifiesPeers>();
#pragma unroll
  for (int n = 0; n < Call::kNotifies; ++n) {
    notify_event(run, Call::notify(run.g, c, n), Call::kCluster * Call::notify_step(n));
  }
  return true;
}

// For diagnostics: records the first unmet wait of a task.
template <class Program, class Call>
ETC_DEVICE void record_unmet(const Run<Program>& run, i32 t, u32& entered, Waiter& who) {
  const auto c = Call::at(run.g, t);
  EventRef event{};
  if (find_unmet<Call>(run, c, event)) {
    who.fail(kEventWait, event.index, event.target);
    return;
  }
#pragma unroll
  for (int n = 0; n < Call::kPeers; ++n) {
    const i32 peer = Call::peer(run.g, c, n);
    if (!peer_has_started(run, peer, entered)) who.fail(kPeerStart, u32(peer), run.epoch);
  }
}

// One warp: completes the run that work item `a` of task t carries. False if a task is not empty or
// its wait failed; `who` records which one.
// NOTE: in a static program lanes complete tasks independently, since a task may wait for an
// earlier one of the run.
template <class Program, class Call>
ETC_DEVICE bool complete_run(
    const Run<Program>& run, i32 t, WorkItem a, u32& entered, Waiter& who) {
  static_assert(Call::kCluster == Program::kTensorCluster);
  const i32 end = Call::empty_until(run.g, t);
#pragma unroll 1
  for (i32 begin = t + i32(a.run()); begin < end; begin += 32) {
    const i32 own = begin + i32(ptx::lane());
    Waiter mine{who.lane, who.call, u32(own)};
    bool is_done = own >= end;
    spin<false, true>(run, run.g.wait_limit, [&] {
      if (is_done) {
      } else if constexpr (Program::kDynamic) {
        is_done = may_complete<Program, Call>(run, own, a.ticket + u32(own - t), entered, mine);
      } else {
        is_done = complete_empty<Program, Call>(run, own, entered, mine);
      }
      return __all_sync(~0u, is_done) || __any_sync(~0u, mine.kind != kInsideWorker);
    });
    const u32 left = __ballot_sync(~0u, !is_done);
    if (left != 0) {
      const u32 wrong = __ballot_sync(~0u, mine.kind != kInsideWorker);
      const int first = __ffs(wrong != 0 ? wrong : left) - 1;
      if (!is_done && wrong == 0) record_unmet<Program, Call>(run, own, entered, mine);
      who.task = __shfl_sync(~0u, mine.task, first);
      who.kind = __shfl_sync(~0u, mine.kind, first);
      who.index = __shfl_sync(~0u, mine.index, first);
      who.want = __shfl_sync(~0u, mine.want, first);
      return false;
    }
    if constexpr (Program::kDynamic) {
      ptx::fence_acq_rel<Call::kNotifiesPeers>();
      const auto c = Call::at(run.g, minimum(own, end - 1));
      notify_and_release_each<Call>(run, c, Call::kCluster, own < end);
    }
  }
  return true;
}

}  // namespace etc
