// Pushing: the warp whose notification meets an event marks the waiting groups, and pushes the
// units of ready groups to their queues. See README.md.
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
  return {kLane, Call::kCall, u32(group * Call::group(run.g).tasks)};
}

// Orders this thread's reads before its writes to the words and slots of a call's groups. At system
// scope if one of the call's waits can be met by peers.
template <class Call>
ETC_DEVICE void fence_groups() {
  ptx::fence_acq_rel<Call::kWaitsForPeers>();
}

// One lane, for the groups whose bits are set, after the event that makes a call's loaded count known:
// leaves out those that do not exist, and counts their units, so that as many last slots of the
// queue stay empty. The bits of the others.
template <class Call, int kCount, class Program>
ETC_DEVICE u32 without_surplus(const Run<Program>& run, u32 bits, const i32 (&group)[kCount]) {
  const auto& g = run.g;
  u32 surplus = 0;
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    if ((bits >> j & 1) == 0) continue;
    const auto c = Call::group_at(g, group[j]);
    if (!Call::is_surplus(c, Call::count(g, c))) continue;
    bits &= ~(1u << j);
    surplus += u32(group_units<Call>(g));
  }
  if (surplus > 0) {
    ptx::fetch_add<false>(run.event_address(g.rank, Call::Queue::surplus(g)), surplus);
  }
  return bits;
}

// Up to this number of units of a group are stored by one lane, more by the whole warp.
constexpr u32 kFewUnits = 8;

// A whole warp fills slots of a lane of `owner`, from `first_slot` on, with the units of each
// group whose lane's bit is set in `lanes[j]`.
template <class Call, int kCount, class Program>
ETC_DEVICE void fill_slots(
    const Run<Program>& run, i32 owner, u32 first_slot, u32 num_units, const u32 (&lanes)[kCount],
    const i32 (&group)[kCount]) {
  using Queue = typename Call::Queue;
  const auto& g = run.g;
  const u32 lane = ptx::lane();
  const u64 slots = run.event_address(owner, Queue::slots(g));
  // NOTE: slots are numbered from the first queued unit. This number is the same on every rank; the
  // number of initial units may differ.
  const u32 first = u32(Call::first_unit(g) - Queue::initial(g)) + 1;
  if (num_units <= kFewUnits) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      if (lanes[j] >> lane & 1) {
        const u32 lane_slot = first_slot + __popc(lanes[j] & ((1u << lane) - 1)) * num_units;
#pragma unroll 1
        for (u32 k = 0; k < num_units; ++k) {
          ptx::store_relaxed(slots + u64(lane_slot + k) * 4, first + u32(group[j]) * num_units + k);
        }
      }
      first_slot += __popc(lanes[j]) * num_units;
    }
  } else {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      for (u32 lanes_left = lanes[j]; lanes_left != 0;
           lanes_left &= lanes_left - 1, first_slot += num_units) {
        const u32 unit = first + u32(__shfl_sync(~0u, group[j], __ffs(lanes_left) - 1)) * num_units;
#pragma unroll 4
        for (u32 k = lane; k < num_units; k += 32) {
          ptx::store_relaxed(slots + u64(first_slot + k) * 4, unit + k);
        }
      }
    }
  }
}

// Instead of a reservation: the queue is full.
constexpr u32 kNoRoom = ~0u;

// A whole warp reserves `count` slots; the first one.
// NOTE: a verified program always has room. If a count loaded from data is too small, late
// notifications of a peer's last run may increase the words that count slots. Such a reservation
// must not be stored outside the queue. Its slots stay empty, so the run ends at its wait limit.
template <class Queue, class Program>
ETC_DEVICE u32 reserve(const Run<Program>& run, i32 owner, u32 count) {
  const auto& g = run.g;
  u32 first = 0;
  if (ptx::lane() == 0) {
    first = ptx::fetch_add<kPeersPush<Program>>(run.event_address(owner, Queue::tail(g)), count);
  }
  first = __shfl_sync(~0u, first, 0);
  return first <= u32(Queue::units(g) - Queue::initial(g)) - count ? first : kNoRoom;
}

// A whole warp pushes group[j] of each lane with bit j in `bits`. Every lane has fenced.
template <class Call, int kCount, class Program>
ETC_DEVICE void push(const Run<Program>& run, i32 owner, u32 bits, const i32 (&group)[kCount]) {
  u32 lanes[kCount], num_ready = 0;
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    lanes[j] = __ballot_sync(~0u, bits >> j & 1);
    num_ready += __popc(lanes[j]);
  }
  if (num_ready == 0) return;
  const u32 num_units = u32(group_units<Call>(run.g));
  const u32 first_slot = reserve<typename Call::Queue>(run, owner, num_ready * num_units);
  if (first_slot == kNoRoom) return;
  if (Call::kWaits > 1 && num_units > kFewUnits) {
    // NOTE: lanes store for each other, so each needs the acquires of the others.
    __syncwarp();
    fence_groups<Call>();
  }
  fill_slots<Call>(run, owner, first_slot, num_units, lanes, group);
}

// The waits in [first, end) of a group of this rank that expect no notification, as bits. None if a
// loaded index is out of range, which aborts the run.
template <class Call, class Program>
ETC_DEVICE u32 empty_waits(const Run<Program>& run, i32 group, int first, int end) {
  const auto c = Call::group_at(run.g, group);
  if (end > Call::kFreeWaits && !Call::waits_in_range(run.g, c)) {
    if (!run.aborted()) abort_run(run, group_waiter<Call>(run, group), kOutOfRange, 0, 0, 0);
    return 0;
  }
  u32 bits = 0;
#pragma unroll
  for (int n = 0; n < Call::kWaits; ++n) {
    if (n >= first && n < end && Call::wait(run.g, c, n).target == 0) bits |= 1u << n;
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

// A whole warp marks waits `wait_bits` of group[j] if bit j of `waiting` is set, and pushes ready
// groups.
template <class Call, int kCount, class Program>
ETC_DEVICE void mark_groups(
    const Run<Program>& run, i32 owner, u32 waiting, const i32 (&group)[kCount], u32 wait_bits) {
  // NOTE: nothing waits for groups without units, so their words might be written after the run.
  if (group_units<Call>(run.g) == 0) return;
  u32 last = 0;
#pragma unroll
  for (int j = 0; j < kCount; ++j) {  // unrolled, so that many atomics are in flight
    if (waiting >> j & 1 && mark<Call>(run, owner, group[j], wait_bits)) last |= 1u << j;
  }
  if constexpr (Call::kWaits > 1) {
    if (!__any_sync(~0u, last != 0)) return;
    fence_groups<Call>();
  }
  push<Call>(run, owner, last, group);
}

}  // namespace etc
