// A function that prepares its loads: its load role gets what prepare() returned and, where it
// reads before the last wait, the last event, which it waits for itself.
#pragma once
#include "worker/ready/queued.cuh"

namespace etc {

// The last event of a task that begins before it. Once it is met, a second work item is published.
template <class Program, class Call>
struct LastEvent {
  static constexpr int kLast = Call::kWaits - 1;

  Run<Program>& run;
  const WorkRing& items;
  const typename Call::Coord& coord;
  i32 task;
  u32& num_published;
  Waiter& waiter;
  WaitCache& events;
  bool is_known = !Call::kReadsBeforeWait || kIsQueued<Call>;

  ETC_DEVICE bool is_met() {
    if (!is_known && events.look(run, kLast, Call::wait(run.g, coord, kLast))) publish();
    return is_known;
  }
  // False if the program was aborted.
  ETC_DEVICE bool wait() {
    if (is_known) return true;
    if (!wait_event_once<Program, Call>(run, coord, kLast, waiter, events)) return false;
    publish();
    return true;
  }

 private:
  ETC_DEVICE void publish() {
    is_known = true;
    if constexpr (kDrawsTickets<Program>) items.wait_begun(num_published);
    items.publish(num_published, work_item<Program, Call>(task));
    fence_loads<Call>(events);
  }
};

template <class Unit>
ETC_DEVICE bool wait_first(const Unit& unit) {
  if constexpr (kIsQueued<typename Unit::Call>) {
    return wait_queued(unit);
  } else if constexpr (Unit::Call::kReadsBeforeWait) {
    return unit.wait_before_last();
  } else {
    return unit.wait_all();
  }
}

template <class Unit>
ETC_DEVICE void lead_prepared(const Unit& unit) {
  using Program = typename Unit::Program;
  using Call = typename Unit::Call;
  const auto& state = unit.state;
  unit.is_going = wait_first(unit);
  if (!unit.is_going) return;
  const auto prepared = FunctionOf<Call>::prepare(state.run, unit.coord);
  LastEvent<Program, Call> event{
      state.run,           state.items, unit.coord,  unit.task,
      state.num_published, unit.waiter, state.events};
  unit.is_going = unit.load(prepared, event);
}

}  // namespace etc
