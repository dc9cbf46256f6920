// Calls of a program with loops that only wait, for events that they do not load: all of them wait
// by one piece of code.
// NOTE: the instruction cache has 128 KB. The code of a loop's body such as a decoder's layer hardly
// fits, and what does not is fetched from L2 in each turn.
#pragma once
#include "worker/ready/counted.cuh"

namespace etc {

// A unit of such a call, until it is ready.
struct Pending {
  static constexpr int kMostEvents = 3;
  EventRef events[kMostEvents];
  int num_events = -1;            // -1: there is no unit
  int early_event = kMostEvents;  // the one before which the body begins, if it does
  WorkItem item{};

  template <class Unit>
  ETC_DEVICE void set(const Unit& unit) {
    using Call = typename Unit::Call;
#pragma unroll
    for (int n = 0; n < Call::kWaits; ++n) events[n] = Call::wait(unit.state.run.g, unit.coord, n);
    num_events = Call::kWaits;
    if constexpr (Call::kReadsBeforeWait) early_event = Call::kWaits - 1;
    item = work_item<typename Unit::Program, Call>(unit.task);
  }
};

template <class Calls, class Call>
constexpr bool kIsPending =
    Calls::kHasLoops && !has_role<Call>(kLoadRole) && !Call::kLoads && !kIsQueued<Call> &&
    !kMayBeSurplus<Call> && Call::kWaits <= Pending::kMostEvents;

// Waits, and publishes the task, or both of its work items: see worker/ready/early.cuh. False after
// an abort.
template <class Program>
ETC_DEVICE bool lead_pending(
    const Run<Program>& run, const WorkRing& items, const Pending& pending, Waiter& waiter,
    WaitCache& cache, u32& num_published) {
#pragma unroll
  for (int n = 0; n < Pending::kMostEvents; ++n) {
    if (n >= pending.num_events) break;
    const EventRef& event = pending.events[n];
    const bool is_early = n == pending.early_event;
    if (is_early) items.publish(num_published, pending.item);
    if (cache.update(n, event) && !wait_event(run, event, waiter)) return false;
    if (kDrawsTickets<Program> && is_early) items.wait_begun(num_published);
  }
  items.publish(num_published, pending.item);
  return true;
}

}  // namespace etc
