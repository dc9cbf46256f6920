// The ordinary way: a unit is ready once all its events are met.
#pragma once
#include "worker/unit.cuh"

namespace etc {

template <class Unit>
ETC_DEVICE void lead_waited(const Unit& unit) {
  unit.is_going = unit.wait_all();
  if (unit.is_going) unit.start();
}

}  // namespace etc
