// Taking: units of a dynamic program's queue, in the order in which they were pushed.
#pragma once
#include "queue/push.cuh"

namespace etc {

// Those who want a unit of a lane stand in line: each draws a ticket, and the unit of that
// number is theirs, as soon as there is one.
template <class Program, class Queue>
struct Line {
  static constexpr i32 kNotYet = -1;

  ETC_DEVICE static u32 draw(const Run<Program>& run) {
    // NOTE: only this rank draws, so its own scope does.
    return ptx::fetch_add<false>(run.event_address(run.g.rank, Queue::head(run.g)), 1);
  }

  // The unit of a ticket, whose waits are met; the number of units if the lane is over.
  ETC_DEVICE static i32 look(const Run<Program>& run, u32 ticket) {
    const auto& g = run.g;
    const u32 initial = u32(Queue::initial(g)), units = u32(Queue::units(g));
    if (ticket < initial) return i32(ticket);
    if (ticket >= units) return i32(units);
    const u64 slot = run.event_address(g.rank, Queue::slots(g) + ticket - initial);
    const u32 word = ptx::load_acquire<kPeersPush<Program>>(slot);
    return word == 0 ? kNotYet : i32(initial + word - 1);
  }

  // For a unit that did not come in time: tells of the first wait that is not met.
  ETC_DEVICE static void report(const Run<Program>& run) {
    bool found = false;
    Program::QueuedCalls::each([&](auto call) {
      using Call = decltype(call);
      if constexpr (kIsSame<typename Call::Queue, Queue>) {
        const i32 groups = Call::groups(run.g);
        for (i32 group = 0; group < groups && !found; ++group) {
          found = report_group<Call>(run, group);
        }
      }
    });
    constexpr u32 kLane = kLaneOf<Program, Queue>;
    if (!found) give_up(run, Waiter{kLane, 0, 0}, kInsideWorker, 0, 0, 0);
  }

 private:
  template <class Call>
  ETC_DEVICE static bool report_group(const Run<Program>& run, i32 group) {
    const auto c = Call::group_at(run.g, group);
#pragma unroll 1
    for (int n = 0; n < Call::kWaits; ++n) {
      if (n == Call::kFreeWaits && !Call::waits_in_range(run.g, c)) return false;
      const EventRef event = Call::wait(run.g, c, n);
      const u32 have = ptx::load_relaxed(run.event_address(run.g.rank, event.index));
      if (i32(have - event.target) >= 0) continue;
      give_up(run, group_waiter<Call>(run, group), kEventWait, event.index, have, event.target);
      return true;
    }
    return false;
  }
};

}  // namespace etc
