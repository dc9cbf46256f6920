// A unit of a queue: its events are met before it is pushed. What it loads may be out of range.
#pragma once
#include "worker/unit.cuh"

namespace etc {

template <class Unit>
ETC_DEVICE bool wait_queued(const Unit& unit) {
  return is_in_range<typename Unit::Program, typename Unit::Call>(
      unit.state.run, unit.coord, unit.waiter);
}

template <class Unit>
ETC_DEVICE void lead_queued(const Unit& unit) {
  unit.is_going = wait_queued(unit);
  if (unit.is_going) unit.start();
}

}  // namespace etc
