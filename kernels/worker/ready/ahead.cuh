// A function that streams operands: while its events are not met, but for the first kWaitsAhead
// ones, its stages begin with these operands, which no task writes.
#pragma once
#include "worker/unit.cuh"

namespace etc {

// Whether the events after the first kWaitsAhead are met.
template <class Unit>
ETC_DEVICE bool has_late_events(const Unit& unit) {
  return late_waits_are_met<typename Unit::Program, typename Unit::Call>(
      unit.state.run, unit.coord, unit.state.events);
}

// False if the program was aborted.
template <class Unit>
ETC_DEVICE bool load_ahead(const Unit& unit) {
  using Call = typename Unit::Call;
  using Function = FunctionOf<Call>;
  const auto& run = unit.state.run;
  auto& stages = unit.state.stages;
  if constexpr (Call::kWaitsAhead > 0) {
#pragma unroll
    for (int n = 0; n < Call::kWaitsAhead; ++n) {
      if (!unit.wait(n)) return false;
    }
  }
  // NOTE: before what is loaded for the task, which would be loaded again after each poll.
  if (has_late_events(unit)) return true;
  Function::prefetch_maps(run);  // x is loaded right after the wait
  if constexpr (Call::kLoads) {
    if (!Call::in_range(run.g, unit.coord)) return unit.fail_range();
  }
  const u32 size = Function::size(run, unit.coord);
  const RingStages all = Function::stages(run, size);
  stages.start_ahead();
  // The last stage may wait for the start of peers: see kWritesPeers.
  const u32 num_ahead = all.count - u32(Function::kWritesPeers && all.count > 0);
  for (u32 n = 0; n < num_ahead && stages.has_room_ahead(all.bytes); ++n) {
    if (n > 0 && has_late_events(unit)) return true;
    if (!Function::load_ahead(run, stages, unit.coord, size, n)) return false;
    stages.add_ahead();
  }
  return true;
}

template <class Unit>
ETC_DEVICE void lead_ahead(const Unit& unit) {
  unit.is_going = load_ahead(unit);
  if (!unit.is_going) return;
  unit.is_going = unit.wait_all();
  if (unit.is_going) unit.start();
}

}  // namespace etc
