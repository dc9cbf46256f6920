// The way in which a unit, whose task exists, becomes ready: it follows from the call.
#pragma once
#include "worker/ready/ahead.cuh"
#include "worker/ready/early.cuh"
#include "worker/ready/prepared.cuh"
#include "worker/ready/queued.cuh"
#include "worker/ready/waited.cuh"

namespace etc {

template <class Unit>
ETC_DEVICE void lead_ready(const Unit& unit) {
  using Call = typename Unit::Call;
  if constexpr (has_role<Call>(kPrepareRole)) {
    lead_prepared(unit);
  } else if constexpr (kIsQueued<Call>) {
    lead_queued(unit);
  } else if constexpr (Call::kReadsBeforeWait) {
    lead_early(unit);
  } else if constexpr (Call::kLoadsAhead) {
    lead_ahead(unit);
  } else {
    lead_waited(unit);
  }
}

}  // namespace etc
