// A function that streams operands: while its events are not met, but for the first kWaitsAhead
// ones, its stages begin with these operands, which no task writes.
#pragma once
#include "worker/unit.cuh"

namespace etc {

// The first event after the first kWaitsAhead that is not met; kWaits if all are. None is loaded.
template <class Unit>
ETC_DEVICE int first_late_event(const Unit& unit) {
  using Call = typename Unit::Call;
  const auto& run = unit.state.run;
#pragma unroll
  for (int n = Call::kWaitsAhead; n < Call::kWaits; ++n) {
    if (!unit.state.events.look(run, n, Call::wait(run.g, unit.coord, n))) return n;
  }
  return Call::kWaits;
}

// Waits for all events after the first kWaitsAhead ones, and begins stages meanwhile.
template <class Unit>
ETC_DEVICE bool load_ahead(const Unit& unit) {
  using Call = typename Unit::Call;
  using Function = FunctionOf<Call>;
  const auto& run = unit.state.run;
  auto& stages = unit.state.stages;
  Patience patience;
  RingStages all{};
  u32 size = 0, num_ahead = 0, num_begun = 0;
#pragma unroll 1  // it polls by one piece of code
  for (int late; (late = first_late_event(unit)) < Call::kWaits;) {
    // NOTE: after the first poll, since what is loaded for the task is loaded again after each.
    if (all.bytes == 0) {
      Function::prefetch_maps(run);  // x is loaded right after the wait
      size = Function::size(run, unit.coord);
      all = Function::stages(run, size);
      // The last stage may wait for the start of peers: see kWritesPeers.
      num_ahead = all.count - u32(Function::kWritesPeers && all.count > 0);
      stages.start_ahead();
    }
    if (num_begun < num_ahead && stages.has_room_ahead(all.bytes)) {
      if (!Function::load_ahead(run, stages, unit.coord, size, num_begun++)) return false;
      stages.add_ahead();
    } else if (!patience.template lasts<false>(run, run.g.wait_limit)) {
      const EventRef event = Call::wait(run.g, unit.coord, late);
      return unit.waiter.fail(kEventWait, event.index, event.target);
    }
  }
  return true;
}

// Waits for the first ones, after which what it loads is known.
template <class Unit>
ETC_DEVICE bool wait_ahead(const Unit& unit) {
  using Call = typename Unit::Call;
#pragma unroll
  for (int n = 0; n < Call::kWaitsAhead; ++n) {
    if (!unit.wait(n)) return false;
  }
  if constexpr (Call::kLoads) {
    if (!Call::in_range(unit.state.run.g, unit.coord)) return unit.fail_range();
  }
  return true;
}

template <class Unit>
ETC_DEVICE void lead_ahead(const Unit& unit) {
  unit.is_going = wait_ahead(unit) && load_ahead(unit);
  if (unit.is_going) unit.start();
}

}  // namespace etc
