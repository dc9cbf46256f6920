// A task as its device function sees it, and how any task waits and notifies.
#pragma once
#include "queue/release.cuh"

namespace etc {

// `thread` of `threads` runs the task; a body strides over its elements by them. On the
// tensor lane `scratch` is shared memory of Shared::kScratchBytes.
template <class Program, class Call, int kThreads>
struct Task : Call {
  using Coord = typename Call::Coord;
  const typename Program::Args& g;
  Coord c;
  i32 thread;
  u32* scratch;
  static constexpr i32 threads = kThreads;

  ETC_DEVICE Task(const typename Program::Args& args, Coord coord, i32 thread_, u32* scratch_)
      : g(args), c(coord), thread(thread_), scratch(scratch_) {}

  // Operand n of the call: its reads, then its writes.
  template <int n>
  ETC_DEVICE auto operand() const {
    return Call::template operand<n>(g, c);
  }
  ETC_DEVICE void sync() const {
    if constexpr (kThreads == 32) {
      __syncwarp();
    } else {
      ptx::named_barrier<kThreads>(1);
    }
  }
};

// A task waits first for what it knows at once, kFreeWaits of its waits; only then are the
// runtime tensors valid that its other index maps may load from, and may be wrong.
template <class Program, class Call>
ETC_DEVICE bool waits_are_met(const Run<Program>& run, const typename Call::Coord& c, Waiter& who) {
  bool met = true;
#pragma unroll
  for (int n = 0; n < Call::kFreeWaits; ++n) {
    met = met && event_is_met(run, Call::wait(run.g, c, n));
  }
  if constexpr (Call::kLoads) {
    if (!met) return false;
    if (!Call::waits_in_range(run.g, c)) return who.in_vain(kOutOfRange, 0, 0);
#pragma unroll
    for (int n = Call::kFreeWaits; n < Call::kWaits; ++n) {
      met = met && event_is_met(run, Call::wait(run.g, c, n));
    }
    if (met && !Call::in_range(run.g, c)) return who.in_vain(kOutOfRange, 0, 0);
  }
  return met;
}

// For each of a task's first waits, the event that a thread waited for when it last had such a
// wait. One that is met stays so until the run ends, and what was acquired with it holds for later
// tasks, too: a wait for it again is over at once.
struct Seen {
  static constexpr int kMost = 2;
  u32 index[kMost] = {~0u, ~0u};
  bool is_unfenced = false;  // something was acquired, for tasks of any kind, since the last fence

  // Whether the n-th wait has to look at its event; if so, it is noted.
  ETC_DEVICE bool note(int n, const EventRef& event) {
    if (n < kMost) {
      if (index[n] == event.index) return false;
      index[n] = event.index;
    }
    return is_unfenced = true;
  }
};

template <bool kNap, class Program, class Call>
ETC_DEVICE bool wait_events(
    const Run<Program>& run, const typename Call::Coord& c, Waiter& who, Seen& seen) {
  const auto wait = [&](int n) {
    const EventRef event = Call::wait(run.g, c, n);
    return !seen.note(n, event) || wait_event<kNap>(run, event, who);
  };
#pragma unroll
  for (int n = 0; n < Call::kFreeWaits; ++n) {
    if (!wait(n)) return false;
  }
  if constexpr (Call::kLoads) {
    if (!Call::waits_in_range(run.g, c)) return who.in_vain(kOutOfRange, 0, 0);
#pragma unroll
    for (int n = Call::kFreeWaits; n < Call::kWaits; ++n) {
      if (!wait(n)) return false;
    }
    if (!Call::in_range(run.g, c)) return who.in_vain(kOutOfRange, 0, 0);
  }
  return true;
}

// The waits of a task that loads no index: those from `from` to `to`.
template <class Program, class Call>
ETC_DEVICE bool wait_some(
    const Run<Program>& run, const typename Call::Coord& c, int from, int to, Waiter& who) {
  static_assert(!Call::kLoads);
  for (int n = from; n < to; ++n) {
    if (!wait_event<false>(run, Call::wait(run.g, c, n), who)) return false;
  }
  return true;
}

// A task from a queue: its waits are met, but what it loads may be wrong.
template <class Program, class Call>
ETC_DEVICE bool is_in_range(const Run<Program>& run, const typename Call::Coord& c, Waiter& who) {
  if constexpr (Call::kLoads) {
    if (!Call::waits_in_range(run.g, c) || !Call::in_range(run.g, c)) {
      return who.in_vain(kOutOfRange, 0, 0);
    }
  }
  return true;
}

// Whether nothing is left of what a task writes, from region n on: its body does not run.
template <class Call, int n = 0, class Args>
ETC_DEVICE bool is_idle(const Args& g, const typename Call::Coord& c) {
  if constexpr (!Call::kMayBeIdle) {
    return false;
  } else if constexpr (n == Call::kWrites) {
    return true;
  } else {
    const auto to = Call::template operand<Call::kReads + n>(g, c);
    bool is_empty = false;
#pragma unroll
    for (const i32 size : to.size) is_empty = is_empty || size == 0;
    return is_empty && is_idle<Call, n + 1>(g, c);
  }
}

// Before a task's first access to the memory or the events of other ranks.
template <class Program, class Call>
ETC_DEVICE bool wait_peers(
    const Run<Program>& run, const typename Call::Coord& c, Waiter who, u32& entered) {
#pragma unroll
  for (int n = 0; n < Call::kPeers; ++n) {
    if (!wait_peer_start(run, Call::peer(run.g, c, n), entered, who)) {
      report(run, who);
      return false;
    }
  }
  return true;
}

template <class Program, class Call>
ETC_DEVICE bool peers_have_started(
    const Run<Program>& run, const typename Call::Coord& c, u32& entered) {
  bool started = true;
#pragma unroll
  for (int n = 0; n < Call::kPeers; ++n) {
    started = started && peer_has_started(run, Call::peer(run.g, c, n), entered);
  }
  return started;
}

// A whole warp, after a barrier of all threads that wrote the task's data.
template <class Program, class Call>
ETC_DEVICE void notify_all(const Run<Program>& run, const typename Call::Coord& c, u32 parts) {
  if constexpr (Call::kNotifies > 0) {
    if constexpr (Program::kDynamic) {
      if (ptx::lane() == 0) ptx::fence_acq_rel<Call::kNotifiesPeers>();
      notify_and_release<Call>(run, c, parts);
    } else if (ptx::lane() == 0) {
      ptx::fence_acq_rel<Call::kNotifiesPeers>();
#pragma unroll
      for (int n = 0; n < Call::kNotifies; ++n) {
        const u32 step = parts * Call::notify_step(n);
        notify_event(run, Call::notify(run.g, c, n), step);
      }
    }
    __syncwarp();
  }
}

}  // namespace etc
