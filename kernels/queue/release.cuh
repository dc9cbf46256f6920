// Releasing: an element that is met makes the groups of tasks that wait for it ready. By whole
// warps.
#pragma once
#include "queue/push.cuh"

namespace etc {

// A range of values of one coordinate of a group.
struct Span {
  i32 low, count;
};

// The queued calls that wait for an event tensor; generated for each event tensor.
template <class... Rs>
struct ReleaseList {
  static constexpr int kCount = sizeof...(Rs);
  template <class F>
  ETC_DEVICE static void each(F f) {
    (f(Rs{}), ...);
  }
};
template <class Event>
struct Releases;

// What a generated release inherits: an element may meet wait kNumber of groups of Call_, of at most
// one if kHasOne.
template <class Call_, int kNumber, int kHasOne>
struct ReleaseDefaults {
  using Call = Call_;
  static constexpr int kWait = kNumber, kInvertible = kHasOne;

  // The element that a group waits for.
  template <class Args>
  ETC_DEVICE static u32 element(const Args& g, i32, i32 group) {
    return Call::wait(g, Call::group_at(g, group), kWait).index;
  }
};

// A box of group coordinates that includes all groups that wait for an element.
template <class Call>
struct GroupBox {
  i32 low[Call::kGating + 1], count[Call::kGating + 1], extent[Call::kGating + 1], total;

  template <class R, class Args, class Coord>
  ETC_DEVICE static GroupBox of(const Args& g, i32 owner, const Coord& element) {
    GroupBox box;
    box.total = 1;
#pragma unroll
    for (int axis = 0; axis < Call::kGating; ++axis) {
      const Span span = R::span(g, owner, element, axis);
      box.extent[axis] = Call::extent(g, axis);
      box.low[axis] = maximum(0, span.low);
      box.count[axis] =
          maximum(0, minimum(span.low + span.count, box.extent[axis]) - box.low[axis]);
      box.total *= box.count[axis];
    }
    return box;
  }

  ETC_DEVICE i32 group(i32 k) const {
    i32 group = 0, stride = 1;
#pragma unroll
    for (int axis = Call::kGating - 1; axis >= 0; --axis) {
      const i32 quotient = axis == 0 ? 0 : k / count[axis];
      group += (low[axis] + k - quotient * count[axis]) * stride;
      k = quotient;
      stride *= extent[axis];
    }
    return group;
  }
};

// Releases the groups that wait for the element `element_idx` of `owner`, for one wait of one call.
template <class R, class Program, class Coord>
ETC_DEVICE void release(const Run<Program>& run, i32 owner, const Coord& element, u32 element_idx) {
  using Call = typename R::Call;
  // Groups that a lane checks together.
  constexpr int kCount = R::kInvertible || Call::kFreeWaits < Call::kWaits ? 1 : 4;
  fence_groups<Call>();
  const auto box = GroupBox<Call>::template of<R>(run.g, owner, element);
#pragma unroll 1
  for (i32 first = 0; first < box.total; first += 32 * kCount) {
    i32 group[kCount] = {};
    u32 waiting = 0;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const i32 k = first + 32 * j + i32(ptx::lane());
      if (k >= box.total) continue;
      group[j] = box.group(R::kInvertible ? 0 : k);
      // NOTE: the box may include groups that wait for other elements.
      if (R::element(run.g, owner, group[j]) == element_idx) waiting |= 1u << j;
    }
    if constexpr (Call::kLimit > 0 && R::kWait == 0) {
      waiting = without_surplus<Call>(run, waiting, group);
    }
    mark_groups<Call>(run, owner, waiting, group, 1u << R::kWait);
  }
}

// The value of another lane.
template <class Coord>
ETC_DEVICE Coord of_lane(Coord c, int lane) {
  if constexpr (__is_empty(Coord)) {
    return c;
  } else {
    constexpr int kWords = sizeof(Coord) / 4;
    i32 words[kWords];
    __builtin_memcpy(words, &c, sizeof(Coord));
#pragma unroll
    for (int n = 0; n < kWords; ++n) words[n] = __shfl_sync(~0u, words[n], lane);
    __builtin_memcpy(&c, words, sizeof(Coord));
    return c;
  }
}

// The same for one element of each lane with `is_met`: in parallel where each element releases one
// group of the same rank.
template <class R, class Program, class Coord>
ETC_DEVICE void release_each(
    const Run<Program>& run, i32 owner, const Coord& element, u32 element_idx, bool is_met) {
  using Call = typename R::Call;
  static_assert(Call::kLimit == 0 || R::kWait > 0);
  for (u32 lanes_left; (lanes_left = __ballot_sync(~0u, is_met)) != 0;) {
    const int first = __ffs(lanes_left) - 1;
    const i32 common = __shfl_sync(~0u, owner, first);
    if constexpr (R::kInvertible) {
      const bool is_common = is_met && owner == common;
      const auto box = GroupBox<Call>::template of<R>(run.g, common, element);
      const i32 group[1] = {box.total > 0 ? box.group(0) : 0};
      const bool is_waiting =
          is_common && box.total > 0 && R::element(run.g, common, group[0]) == element_idx;
      fence_groups<Call>();
      mark_groups<Call>(run, common, u32(is_waiting), group, 1u << R::kWait);
      is_met = is_met && !is_common;
    } else {
      release<R>(run, common, of_lane(element, first), __shfl_sync(~0u, element_idx, first));
      is_met = is_met && int(ptx::lane()) != first;
    }
  }
}

// Performs the notifications of a task from number n on, after a fence by the caller. The warp
// whose notification completes an element releases the groups that wait for it.
template <class Call, int n = 0, class Program>
ETC_DEVICE void notify_and_release(const Run<Program>& run, const typename Call::Coord& c) {
  if constexpr (n < Call::kNotifies) {
    Call::template notified<n>(run.g, c, [&](auto event, i32 owner, auto element) ETC_INLINE {
      using Event = decltype(event);
      const EventRef ref = Call::notify(run.g, c, n);
      if constexpr (Releases<Event>::kCount == 0) {  // no queued call waits for it
        if (ptx::lane() == 0) notify_event(run, ref);
        return;
      }
      u32 old = 0;
      if (ptx::lane() == 0) old = count_event(run, ref);
      old = __shfl_sync(~0u, old, 0);
      if (old + 1 != Event::target(run.g, owner, element)) return;
      __syncwarp();  // lane 0's acquire covers the whole warp
      Releases<Event>::each(
          [&](auto entry) ETC_INLINE { release<decltype(entry)>(run, owner, element, ref.index); });
    });
    notify_and_release<Call, n + 1>(run, c);
  }
}

// Whether all notifications of a call are for the same element, on several ranks.
template <class Call>
constexpr bool notifies_ranks() {
  return Call::kNotifiesRanks;
}

// The same for such a call, including the fence: a lane for each rank, so that the atomics overlap.
template <class Call, class Program>
ETC_DEVICE void notify_ranks(const Run<Program>& run, const typename Call::Coord& c) {
  static_assert(Call::kNotifies <= 32);
  const int lane = int(ptx::lane());
  const EventRef ref = Call::notify(run.g, c, minimum(lane, Call::kNotifies - 1));
  const bool has_one = lane < Call::kNotifies;
  if (has_one) ptx::fence_acq_rel<true>();
  Call::template notified<0>(run.g, c, [&](auto event, i32, auto element) ETC_INLINE {
    using Event = decltype(event);
    if constexpr (Releases<Event>::kCount == 0) {
      if (has_one) notify_event(run, ref);
      return;
    }
    const bool is_met = has_one && count_event(run, ref) + 1 == Event::target(run.g, ref.rank, element);
    __syncwarp();  // one lane's acquire covers the whole warp
    Releases<Event>::each([&](auto entry) ETC_INLINE {
      release_each<decltype(entry)>(run, ref.rank, element, ref.index, is_met);
    });
  });
}

// At the start: releases events that expect no notification. The groups are divided among the warps
// of `kThreads` threads of every worker.
template <int kThreads, class Program>
ETC_DEVICE void release_empty(const Run<Program>& run) {
  Program::WaitingCalls::each([&](auto call) ETC_INLINE {
    using Call = decltype(call);
    constexpr int kTo = Call::kFreeWaits > 0 ? Call::kFreeWaits : Call::kWaits;
    if constexpr ((u32(Call::kMaybeZero) & kFirstBits<kTo>) != 0) {
      const i32 num_waiting = num_groups<Call>(run.g);
      // NOTE: by ptx::warp(), as in all branches of whole warps in which lanes meet.
      const i32 warp = i32(blockIdx.x * (kThreads / 32) + ptx::warp());
#pragma unroll 1
      for (i32 first = warp * 32; first < num_waiting; first += i32(gridDim.x) * kThreads) {
        const i32 group[1] = {first + i32(ptx::lane())};
        const u32 wait_bits = group[0] < num_waiting ? empty_waits<Call>(run, group[0], 0, kTo) : 0;
        mark_groups<Call>(run, run.g.rank, wait_bits != 0, group, wait_bits);
      }
    }
  });
}

}  // namespace etc
