// A task as its device function gets it, and how tasks wait and notify.
#pragma once
#include "queue/release.cuh"

namespace etc {

// In place of scratch memory, where a task has none.
struct NoScratch {
  ETC_DEVICE NoScratch(u32*) {}
};
template <bool kHas>
struct Scratch {
  using Pointer = u32*;
};
template <>
struct Scratch<false> {
  using Pointer = NoScratch;
};

// A body strides over its elements by `thread` of `threads`. On the tensor lane `scratch` is shared
// memory of Shared::kScratchBytes; one warp, on the transfer lane, has none.
template <class Program, class Call, int kThreads>
struct Task : Call {
  using Coord = typename Call::Coord;
  const typename Program::Args& g;
  Coord c;
  i32 thread;
  typename Scratch<(kThreads > 32)>::Pointer scratch;
  static constexpr i32 threads = kThreads;
#ifdef ETC_EMULATED
  emulation::RunningTask running = emulation::running_task<Call>(&c);
#endif

  ETC_DEVICE Task(const typename Program::Args& args, Coord coord, i32 thread_, u32* scratch_)
      : g(args), c(coord), thread(thread_), scratch(scratch_) {}

  // Operand n of the call: its reads, then its writes.
  template <int n>
  ETC_DEVICE auto operand() const {
    static_assert(n >= 0 && n < Call::kReads + Call::kWrites, "the call has fewer operands");
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

// Whether all waits of a task are met; otherwise `who` names the first that is not.
// The first kFreeWaits waits of a task load no index. Only after them are the runtime tensors valid
// from which its other index maps load; loaded indices may be out of range.
template <class Program, class Call>
ETC_DEVICE bool waits_are_met(const Run<Program>& run, const typename Call::Coord& c, Waiter& who) {
  const auto is_met = [&](int n) {
    const EventRef event = Call::wait(run.g, c, n);
    return event_is_met(run, event) || who.fail(kEventWait, event.index, event.target);
  };
#pragma unroll
  for (int n = 0; n < Call::kFreeWaits; ++n) {
    if (!is_met(n)) return false;
  }
  if constexpr (Call::kLoads) {
    if (!Call::waits_in_range(run.g, c)) return who.fail(kOutOfRange, 0, 0);
#pragma unroll
    for (int n = Call::kFreeWaits; n < Call::kWaits; ++n) {
      if (!is_met(n)) return false;
    }
    if (!Call::in_range(run.g, c)) return who.fail(kOutOfRange, 0, 0);
  }
  return true;
}

// For each of the first waits of a task, the event of the thread's previous wait at this position.
// A met event stays met until the run ends, and its acquire covers later tasks too, so that waiting
// for it again is unnecessary.
struct WaitCache {
  static constexpr int kMost = 2;
  u32 event_idx[kMost] = {~0u, ~0u};
  bool is_unfenced = false;  // an event was acquired since the last proxy fence

  // Whether the n-th wait has to poll its event; if so, stores the event.
  ETC_DEVICE bool update(int n, const EventRef& event) {
    if (n < kMost) {
      if (event_idx[n] == event.index) return false;
      event_idx[n] = event.index;
    }
    return is_unfenced = true;
  }
  // Whether the event of the n-th wait is met; if so, it is known from now on.
  template <class Program>
  ETC_DEVICE bool look(const Run<Program>& run, int n, const EventRef& event) {
    if (n < kMost && event_idx[n] == event.index) return true;
    if (!event_is_met(run, event)) return false;
    if (n < kMost) event_idx[n] = event.index;
    return is_unfenced = true;
  }
};

// The count of a loaded extent that a thread has loaded last. kLimits: the tensors that such counts
// are from.
template <int kLimits>
struct CountCache {
  i32 limit = 0, place = -1, count = 0;

  template <class Call, class Args>
  ETC_DEVICE i32 of(const Args& g, const typename Call::Coord& c) {
    const i32 count_place = Call::count_place(g, c);
    if (place != count_place || (kLimits > 1 && limit != Call::kLimit)) {
      limit = Call::kLimit, place = count_place, count = Call::count(g, c);
    }
    return count;
  }
};

// Waits for the n-th event of a task, unless it is known to be met.
template <class Program, class Call>
ETC_DEVICE bool wait_event_once(
    const Run<Program>& run, const typename Call::Coord& c, int n, Waiter& who,
    WaitCache& cache) {
  const EventRef event = Call::wait(run.g, c, n);
  return !cache.update(n, event) || wait_event(run, event, who);
}
template <class Program, class Call>
ETC_DEVICE bool wait_events(
    const Run<Program>& run, const typename Call::Coord& c, Waiter& who, WaitCache& cache) {
  const auto wait = [&](int n) {
    return wait_event_once<Program, Call>(run, c, n, who, cache);
  };
#pragma unroll
  for (int n = 0; n < Call::kFreeWaits; ++n) {
    if (!wait(n)) return false;
  }
  if constexpr (Call::kLoads) {
    if (!Call::waits_in_range(run.g, c)) return who.fail(kOutOfRange, 0, 0);
#pragma unroll
    for (int n = Call::kFreeWaits; n < Call::kWaits; ++n) {
      if (!wait(n)) return false;
    }
    if (!Call::in_range(run.g, c)) return who.fail(kOutOfRange, 0, 0);
  }
  return true;
}

// The waits [from, to) of a task that loads nothing but the count of the last one.
template <class Program, class Call>
ETC_DEVICE bool wait_some(
    const Run<Program>& run, const typename Call::Coord& c, int first, int end, Waiter& who) {
  for (int n = first; n < end; ++n) {
    if (!wait_event(run, Call::wait(run.g, c, n), who)) return false;
  }
  return true;
}

// For a task from a queue: its waits are met, but loaded indices may be out of range.
template <class Program, class Call>
ETC_DEVICE bool is_in_range(const Run<Program>& run, const typename Call::Coord& c, Waiter& who) {
  if constexpr (Call::kLoads) {
    if (!Call::waits_in_range(run.g, c) || !Call::in_range(run.g, c)) {
      return who.fail(kOutOfRange, 0, 0);
    }
  }
  return true;
}

// Whether all regions that a task writes are empty, from region n on: then its body does not run.
template <class Call, int n = 0, class Args>
ETC_DEVICE bool is_idle(const Args& g, const typename Call::Coord& c) {
  if constexpr (!Call::kMayBeIdle) {
    return false;
  } else if constexpr (n == Call::kWrites) {
    return true;
  } else {
    const auto region = Call::template operand<Call::kReads + n>(g, c);
    bool is_empty = false;
#pragma unroll
    for (const i32 size : region.size) is_empty = is_empty || size == 0;
    return is_empty && is_idle<Call, n + 1>(g, c);
  }
}

// Before a task's first access to the memory or the events of other ranks.
template <class Program, class Call>
ETC_DEVICE bool wait_starts(
    const Run<Program>& run, const typename Call::Coord& c, Waiter& who, u32& entered) {
#pragma unroll 1  // each wait is large
  for (int n = 0; n < Call::kPeers; ++n) {
    if (!wait_peer_start(run, Call::peer(run.g, c, n), entered, who)) return false;
  }
  return true;
}
// The same, which reports the wait that failed.
template <class Program, class Call>
ETC_DEVICE bool wait_peers(
    const Run<Program>& run, const typename Call::Coord& c, Waiter who, u32& entered) {
  if (wait_starts<Program, Call>(run, c, who, entered)) return true;
  report(run, who);
  return false;
}

// Whether all ranks that a task writes to have begun; otherwise `who` names the first that has not.
template <class Program, class Call>
ETC_DEVICE bool peers_have_started(
    const Run<Program>& run, const typename Call::Coord& c, Waiter& who, u32& entered) {
#pragma unroll
  for (int n = 0; n < Call::kPeers; ++n) {
    const i32 peer = Call::peer(run.g, c, n);
    if (!peer_has_started(run, peer, entered)) return who.fail(kPeerStart, u32(peer), run.epoch);
  }
  return true;
}

// By a whole warp, after a barrier of all threads that wrote the task's data.
template <class Program, class Call>
ETC_DEVICE void notify_all(const Run<Program>& run, const typename Call::Coord& c) {
  if constexpr (Call::kNotifies > 0) {
    if constexpr (Program::kDynamic && notifies_ranks<Call>()) {
      notify_ranks<Call>(run, c);
    } else if constexpr (Program::kDynamic) {
      if (ptx::lane() == 0) ptx::fence_acq_rel<Call::kNotifiesPeers>();
      notify_and_release<Call>(run, c);
    } else if (ptx::lane() == 0) {
      // NOTE: conditions may be loaded, which takes as long as the fence.
      EventRef events[Call::kNotifies];
#pragma unroll
      for (int n = 0; Call::kNotifiesWhen && n < Call::kNotifies; ++n) {
        events[n] = Call::notify(run.g, c, n);
      }
      ptx::fence_acq_rel<Call::kNotifiesPeers>();
#pragma unroll
      for (int n = 0; n < Call::kNotifies; ++n) {
        const EventRef event = Call::kNotifiesWhen ? events[n] : Call::notify(run.g, c, n);
        if (Call::kNotifiesWhen && event.index == kNoElement) continue;
        notify_event(run, event);
      }
    }
    __syncwarp();
  }
}

}  // namespace etc
