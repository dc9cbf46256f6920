// Pushing: the warp whose notification meets an event marks the waiting groups, and pushes the
// units of ready groups to their queues. See docs/protocol.md, "Dynamic schedules".
//
// In programs of several ranks, words that ranks share are accessed at system scope, since all
// atomics on a word must have the same scope. Fences are narrower where possible.
#pragma once
#include "event/wait.cuh"
#include "ptx/warp.cuh"

namespace etc {

template <class Program>
constexpr bool kPeersPush = Program::kWorld > 1;

template <class Program, class Queue>
constexpr u32 kLaneOf =
    kIsSame<Queue, typename Program::TensorQueue> ? kTensorLane : kTransferLane;

template <int kCount>
constexpr u32 kFirstBits = kCount == 32 ? ~0u : (1u << kCount) - 1;

// A group in diagnostics, identified by its first task.
template <class Call, class Program>
ETC_DEVICE Waiter group_waiter(const Run<Program>& run, i32 group) {
  constexpr u32 kLane = kLaneOf<Program, typename Call::Queue>;
  return {kLane, Call::kCall, u32(group * Call::group_size(run.g))};
}

// Orders this thread's reads before its writes to the words and slots of a call's groups. At system
// scope if one of the call's waits can be met by peers.
template <class Call>
ETC_DEVICE void fence_groups() {
  ptx::fence_acq_rel<Call::kWaitsForPeers>();
}

// In a slot instead of a unit: this slot and all after it are empty, up to the end of the queue's
// part.
constexpr u32 kEmptySlot = ~0u;

// Up to this number of units of a group are stored by one lane, more by the whole warp.
constexpr u32 kFewUnits = 8;

// A whole warp fills slots of a lane of `owner`, from slot `at` on, with one pass of the groups
// whose lane's bit is set in `lanes[j]`: `units` units of each, from unit `skipped` of the group
// on.
template <class Call, int kCount, class Program>
ETC_DEVICE void fill_slots(
    const Run<Program>& run, i32 owner, u32 at, u32 skipped, u32 units, const u32 (&lanes)[kCount],
    const i32 (&group)[kCount]) {
  using Queue = typename Call::Queue;
  const auto& g = run.g;
  const u32 lane = ptx::lane(), each = u32(Call::group_units(g));
  const u64 slots = run.event_address(owner, Queue::slots(g));
  // NOTE: slots are numbered from the first queued unit. This number is the same on every rank; the
  // number of initial units may differ.
  const u32 first = u32(Call::first_unit(g) - Queue::initial(g)) + skipped + 1;
  if (units <= kFewUnits) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      if (lanes[j] >> lane & 1) {
        const u32 own = at + __popc(lanes[j] & ((1u << lane) - 1)) * units;
#pragma unroll 1
        for (u32 k = 0; k < units; ++k) {
          ptx::store_relaxed(slots + u64(own + k) * 4, first + u32(group[j]) * each + k);
        }
      }
      at += __popc(lanes[j]) * units;
    }
  } else {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      for (u32 left = lanes[j]; left != 0; left &= left - 1, at += units) {
        const u32 unit = first + u32(__shfl_sync(~0u, group[j], __ffs(left) - 1)) * each;
#pragma unroll 4
        for (u32 k = lane; k < units; k += 32) {
          ptx::store_relaxed(slots + u64(at + k) * 4, unit + k);
        }
      }
    }
  }
}

// Instead of a reservation: the queue is full.
constexpr u32 kNoRoom = ~0u;

// A whole warp reserves the slots of `groups` groups of a call: of the first pass, in a part that
// all calls of the lane share, and of the second one, in a part of the call's own (as for later
// passes). Groups with tasks to run are counted from the first slot on, empty ones from the last
// one.
// NOTE: a verified program always has room. If a count loaded from data is too small, late
// notifications of a peer's last run may increase the words that count slots. Such a reservation
// must not be stored outside the queue. Its slots stay empty, so the run ends at its wait limit.
template <class Call, bool kIsEmpty, class Program>
ETC_DEVICE uint2 reserve(const Run<Program>& run, i32 owner, u32 groups) {
  using Queue = typename Call::Queue;
  const auto& g = run.g;
  const auto add = [&](u32 word, u32 n) ETC_INLINE {
    u32 old = 0;
    if (ptx::lane() == 0) {
      old = ptx::fetch_add<kPeersPush<Program>>(run.event_address(owner, word), n);
    }
    return old;
  };
  const u32 units = u32(Call::pass_units(g));
  u32 first, later = 0;
  if constexpr (kIsEmpty) {
    first = u32(Queue::first_part(g)) - add(Queue::empty_slots(g), groups * units) - groups * units;
    if constexpr (Call::kInPasses) {
      later = u32(Call::groups(g)) - add(Call::empty_groups(g), groups) - groups;
    }
  } else {
    first = add(Queue::tail(g), groups * units);
    if constexpr (Call::kInPasses) later = add(Call::passed(g), groups);
  }
  first = __shfl_sync(~0u, first, 0);
  bool has_room = first <= u32(Queue::units(g) - Queue::initial(g)) - groups * units;
  if constexpr (Call::kInPasses) {
    later = __shfl_sync(~0u, later, 0);
    has_room = has_room && later <= u32(Call::groups(g)) - groups;
    later = u32(Call::first_later(g)) + later * units;
  }
  if (!has_room) return {kNoRoom, kNoRoom};
  return {first, later};
}

// Whether a group of this rank, whose waits are met, has only empty tasks.
template <class Call, class Program>
ETC_DEVICE bool is_empty_group(const Run<Program>& run, i32 group) {
  const i32 size = Call::group_size(run.g);
  for (i32 t = group * size; t < (group + 1) * size; ++t) {
    const auto c = Call::at(run.g, t);
    if constexpr (Call::kLoads) {
      if (!Call::waits_in_range(run.g, c) || !Call::in_range(run.g, c)) return false;
    }
    if (Call::template Function<Call>::size(run, c) != 0) return false;
  }
  return true;
}

// Performs the notifications of one task for each lane with `has_one`; each lane has fenced.
template <class Call, int n = 0, class Program>
ETC_DEVICE void notify_and_release_each(
    const Run<Program>& run, const typename Call::Coord& c, u32 parts, bool has_one);

// A whole warp notifies for all tasks of each lane's empty group. None of them is pushed; their
// slots get kEmptySlot.
template <class Call, class Program>
ETC_DEVICE void complete_empty_groups(const Run<Program>& run, bool has_one, i32 group) {
  const auto& g = run.g;
  const u32 lanes = __ballot_sync(~0u, has_one), groups = __popc(lanes);
  if (groups == 0) return;
  __syncwarp();  // one lane's acquire covers the whole warp
  // NOTE: for other groups, the indices that their tasks load may not be written yet.
  const i32 known = __shfl_sync(~0u, group, __ffs(lanes) - 1);
  const uint2 at = reserve<Call, true>(run, g.rank, groups);
  if (at.x == kNoRoom) return;
  const u64 slots = run.event_address(g.rank, Call::Queue::slots(g));
  const u32 units = groups * u32(Call::pass_units(g));
  const u32 part = u32(Call::groups(g) * Call::pass_units(g));
  u32 first = at.x;
#pragma unroll 1
  for (i32 pass = 0; pass < Call::passes(g); ++pass) {
    for (u32 k = ptx::lane(); k < units; k += 32) {
      ptx::store_relaxed(slots + u64(first + k) * 4, kEmptySlot);
    }
    first = at.y + u32(pass) * part;
  }
  ptx::fence_acq_rel<Call::kNotifiesPeers>();
  const i32 size = Call::group_size(g);
  i32 t = (has_one ? group : known) * size;
#pragma unroll 1
  for (i32 k = 0; k < size; ++k, ++t) {
    notify_and_release_each<Call>(run, Call::at(g, t), Call::kCluster, has_one);
  }
}

// A whole warp pushes group[j] of each lane with bit j in `bits`. With kCompletesEmpty, empty
// groups are completed instead. Every lane has fenced.
template <class Call, bool kCompletesEmpty, int kCount, class Program>
ETC_DEVICE void push(const Run<Program>& run, i32 owner, u32 bits, const i32 (&group)[kCount]) {
  const auto& g = run.g;
  if constexpr (Call::kMayBeEmpty && kCompletesEmpty) {
    static_assert(kCount == 1);
    const bool has_one = bits != 0 && owner == g.rank && is_empty_group<Call>(run, group[0]);
    if (has_one) bits = 0;
    complete_empty_groups<Call>(run, has_one, group[0]);
  }
  u32 lanes[kCount], groups = 0;
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    lanes[j] = __ballot_sync(~0u, bits >> j & 1);
    groups += __popc(lanes[j]);
  }
  if (groups == 0) return;
  uint2 at = reserve<Call, false>(run, owner, groups);
  if (at.x == kNoRoom) return;
  const u32 units = u32(Call::pass_units(g));
  if (Call::kWaits > 1 && units > kFewUnits) {
    // NOTE: lanes store for each other, so each needs the acquires of the others.
    __syncwarp();
    fence_groups<Call>();
  }
  fill_slots<Call>(run, owner, at.x, 0, units, lanes, group);
  if constexpr (Call::kInPasses) {
#pragma unroll 1
    for (i32 pass = 1; pass < Call::passes(g); ++pass, at.y += u32(Call::groups(g)) * units) {
      fill_slots<Call>(run, owner, at.y, u32(pass) * units, units, lanes, group);
    }
  }
}

// The waits in [from, to) of a group of this rank that expect no notification, as bits. None if a
// loaded index is out of range, which aborts the run.
template <class Call, class Program>
ETC_DEVICE u32 empty_waits(const Run<Program>& run, i32 group, int from, int to) {
  const auto c = Call::group_at(run.g, group);
  if (to > Call::kFreeWaits && !Call::waits_in_range(run.g, c)) {
    if (!run.aborted()) abort_run(run, group_waiter<Call>(run, group), kOutOfRange, 0, 0, 0);
    return 0;
  }
  u32 bits = 0;
#pragma unroll
  for (int n = 0; n < Call::kWaits; ++n) {
    if (n >= from && n < to && Call::wait(run.g, c, n).target == 0) bits |= 1u << n;
  }
  return bits;
}

// Marks waits of a group as met; true if these were the last ones. One lane, which has fenced.
template <class Call, class Program>
ETC_DEVICE bool mark(const Run<Program>& run, i32 owner, i32 group, u32 bits) {
  if constexpr (Call::kWaits == 1) {
    return true;  // NOTE: an element is met once, so no state is needed
  } else {
    constexpr bool kSystem = kPeersPush<Program>;
    constexpr u32 kAll = kFirstBits<Call::kWaits>, kFree = kFirstBits<Call::kFreeWaits>;
    const u64 word = run.event_address(owner, Call::state(run.g, group));
    u32 old = ptx::fetch_or<kSystem>(word, bits);
    if constexpr (kFree != kAll) {
      const u32 now = old | bits;
      if (now != kAll && (old & kFree) != kFree && (now & kFree) == kFree) {
        // Loaded counts are valid only now, after all marks: waits for a count of 0 are met.
        // Never a peer's thread.
        ptx::fence_acq_rel<false>();
        bits = empty_waits<Call>(run, group, Call::kFreeWaits, Call::kWaits);
        if (bits == 0) return false;
        old = ptx::fetch_or<kSystem>(word, bits);
      }
    }
    return old != kAll && (old | bits) == kAll;
  }
}

// A whole warp marks waits `marks` of group[j] if bit j of `waiting` is set, and pushes ready
// groups.
template <class Call, bool kCompletesEmpty, int kCount, class Program>
ETC_DEVICE void mark_groups(
    const Run<Program>& run, i32 owner, u32 waiting, const i32 (&group)[kCount], u32 marks) {
  // NOTE: nothing waits for groups without units, so their words might be written after the run.
  if (Call::group_units(run.g) == 0) return;
  u32 last = 0;
#pragma unroll
  for (int j = 0; j < kCount; ++j) {  // unrolled, so that many atomics are in flight
    if (waiting >> j & 1 && mark<Call>(run, owner, group[j], marks)) last |= 1u << j;
  }
  if constexpr (Call::kWaits > 1) {
    if (!__any_sync(~0u, last != 0)) return;
    fence_groups<Call>();
  }
  push<Call, kCompletesEmpty>(run, owner, last, group);
}

}  // namespace etc
