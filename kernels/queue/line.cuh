// Taking: units by ticket, of a lane or of a dynamic program's queue, where they lie in the
// order in which they were pushed, but for what comes in passes or is void.
#pragma once
#include "queue/push.cuh"

namespace etc {

// In place of a unit: none yet for this ticket; none from this one to the end of the queue's part;
// the lane has no more.
constexpr i32 kNotYet = -1, kNoneHere = -2, kLaneOver = 0x7fffffff;

// The next ticket of a lane of a static program.
template <class Program>
ETC_DEVICE u32 draw_ticket(const Run<Program>& run, LaneId lane) {
  return ptx::count_up(u64(&run.control()->tickets[lane][run.epoch & 1]));
}

// All tickets of a lane of a static program below `end` that nobody has drawn; the first of them.
template <class Program>
ETC_DEVICE u32 draw_up_to(const Run<Program>& run, LaneId lane, u32 end) {
  return atomicMax(&run.control()->tickets[lane][run.epoch & 1], end);
}

// For the record: what an element has, and the first one that a task waits for in vain.
template <class Program>
ETC_DEVICE u32 have(const Run<Program>& run, const EventRef& event) {
  return ptx::load_relaxed(run.event_address(run.g.rank, event.index));
}
template <class Call, class Program>
ETC_DEVICE bool find_unmet(
    const Run<Program>& run, const typename Call::Coord& c, EventRef& event) {
#pragma unroll 1
  for (int n = 0; n < Call::kWaits; ++n) {
    if (n == Call::kFreeWaits && !Call::waits_in_range(run.g, c)) return false;
    event = Call::wait(run.g, c, n);
    if (i32(have(run, event) - event.target) < 0) return true;
  }
  return false;
}

// Those who want a unit of a lane stand in line: each draws a ticket, and the unit of that
// number is theirs, as soon as there is one.
template <class Program, class Queue>
struct Line {
  ETC_DEVICE static u32 draw(const Run<Program>& run) {
    // NOTE: only this rank draws, so its own scope does.
    return ptx::count_up(run.event_address(run.g.rank, Queue::head(run.g)));
  }

  ETC_DEVICE static u32 draw_up_to(const Run<Program>& run, u32 end) {
    const u64 head = run.event_address(run.g.rank, Queue::head(run.g));
    return atomicMax(reinterpret_cast<u32*>(head), end);
  }
  // Nobody draws a ticket any more of the rest of this one's part of the queue.
  ETC_DEVICE static void skip_part(const Run<Program>& run, u32 ticket) {
    const u32 initial = u32(Queue::initial(run.g));
    draw_up_to(run, initial + u32(Queue::end_of_part(run.g, i32(ticket - initial))));
  }

  // The unit of a ticket, whose waits are met.
  ETC_DEVICE static i32 look(const Run<Program>& run, u32 ticket) {
    const auto& g = run.g;
    const u32 initial = u32(Queue::initial(g)), units = u32(Queue::units(g));
    if (ticket < initial) return i32(ticket);
    if (ticket >= units) return kLaneOver;
    const u64 slot = run.event_address(g.rank, Queue::slots(g) + ticket - initial);
    const u32 word = ptx::load_acquire<kPeersPush<Program>>(slot);
    if (Queue::kHasVoids && word == kVoid) return kNoneHere;
    return word == 0 ? kNotYet : i32(initial + word - 1);
  }

  // For a unit that did not come in time: tells of the first wait that is not met, of the
  // earliest call in the graph. One record says it all, as whoever waits would tell the same.
  ETC_DEVICE static void report(const Run<Program>& run) {
    run.tell_host();
    if (run.aborted() || ptx::load_relaxed(u64(&run.control()->faults)) != 0) return;
    Waiter who{kLaneOf<Program, Queue>, ~0u, 0};
    EventRef event{};
    Program::QueuedCalls::each([&](auto call) {
      using Call = decltype(call);
      if (Call::kCall > who.call) return;
      const i32 groups = Call::group_units(run.g) > 0 ? Call::groups(run.g) : 0;
      for (i32 group = 0; group < groups; ++group) {
        if (!find_unmet<Call>(run, Call::group_at(run.g, group), event)) continue;
        who = group_waiter<Call>(run, group);
        return;
      }
    });
    if (who.call == ~0u) {
      give_up(run, Waiter{who.lane, 0, 0}, kInsideWorker, 0, 0, 0);
    } else {
      give_up(run, who, kEventWait, event.index, have(run, event), event.target);
    }
  }
};

}  // namespace etc
