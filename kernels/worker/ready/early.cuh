// A body that reads before its last wait: its task is published when all other events are met, and
// again when the last one is.
#pragma once
#include "worker/unit.cuh"

namespace etc {

template <class Unit>
ETC_DEVICE void lead_early(const Unit& unit) {
  using Program = typename Unit::Program;
  using Call = typename Unit::Call;
  const auto& state = unit.state;
  unit.is_going = unit.wait_before_last();
  if (!unit.is_going) return;
  unit.publish();
  if constexpr (Call::kLoads) {  // the count of the last wait
    unit.is_going = Call::waits_in_range(state.run.g, unit.coord) || unit.fail_range();
    if (!unit.is_going) return;
  }
  unit.is_going = wait_some<Program, Call>(
      state.run, unit.coord, Call::kWaits - 1, Call::kWaits, unit.waiter);
  if constexpr (Unit::kByTicket) state.items.wait_begun(state.num_published);
  if (unit.is_going) unit.start();
}

}  // namespace etc
