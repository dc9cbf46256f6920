// A unit of a call whose count of tasks is loaded: from the count on, its tasks do not exist.
#pragma once
#include "worker/ready/ways.cuh"

namespace etc {

// Whether the producer thread may get units of tasks that do not exist: none is queued.
template <class Call>
constexpr bool kMayBeSurplus = Call::kLimit > 0 && !kIsQueued<Call>;
// Whether all that such a task loads is known with the count: nothing else is waited for, but where
// the task begins to load before its other waits are met.
template <class Call>
constexpr bool kWaitsAfterCount = Call::kLoadsAhead && !Call::kReadsBeforeWait &&
                                  Call::kWaitsAhead == int(!Call::kCountIsGiven);
template <class Call>
constexpr bool kLoadsWithCount =
    kMayBeSurplus<Call> && !has_role<Call>(kPrepareRole) &&
    (kWaitsAfterCount<Call> || Call::kWaits == int(!Call::kCountIsGiven));

// The surplus units after this one in its block. By tickets, claims all of them: 0. Else how far
// the last one of this worker is.
template <class Unit>
ETC_DEVICE i32 skip_block(const Unit& unit) {
  using Call = typename Unit::Call;
  const auto& run = unit.state.run;
  const i32 num_after = Call::block_end(run.g, unit.task) - unit.task - 1;
  if constexpr (Unit::kByTicket) {
    // NOTE: units that are assigned without a ticket have negative tickets.
    const i32 end = unit.state.tickets.current + 1 + num_after;
    if (end > 0) draw_up_to(run, kTensorLane, u32(end));
    return 0;
  }
  const i32 workers = i32(gridDim.x);
  return num_after / workers * workers;
}

// Waits for the count.
template <class Unit>
ETC_DEVICE bool wait_count(const Unit& unit) {
  if constexpr (!Unit::Call::kCountIsGiven) return unit.wait(0);
  return true;
}

// What the count says of a task. is_in_range: for kLoadsWithCount.
struct CountedTask {
  bool is_in_range, is_surplus;
};

template <class Unit>
ETC_DEVICE CountedTask counted_task(const Unit& unit) {
  using Call = typename Unit::Call;
  const auto& g = unit.state.run.g;
  const i32 count = unit.state.counts.template of<Call>(g, unit.coord);
  // NOTE: before the count is used, so that its load and the others overlap.
  bool is_in_range = true;
  if constexpr (kLoadsWithCount<Call>) is_in_range = Call::in_range(g, unit.coord);
  return {is_in_range, Call::is_surplus(unit.coord, count)};
}

// A task that exists.
template <class Unit>
ETC_DEVICE void lead_counted(const Unit& unit, const CountedTask& task) {
  if constexpr (kLoadsWithCount<typename Unit::Call>) {
    unit.is_going = task.is_in_range || unit.fail_range();
    if constexpr (kWaitsAfterCount<typename Unit::Call>) {
      if (unit.is_going) unit.is_going = load_ahead(unit);
    }
    if (unit.is_going) unit.start();
  } else {
    lead_ready(unit);
  }
}

}  // namespace etc
