// The producer thread of a worker: claims units, waits until each is ready, publishes its task to
// the other warps, and has the load role.
#pragma once
#include "worker/ready/pending.cuh"

namespace etc {

// True if it ran to its end, false after an abort or in a skipped run. It sets the run's epoch.
template <class Program>
ETC_DEVICE bool lead_units(Run<Program>& run, u32 base) {
  using Calls = typename Program::TensorCalls;
  u32 num_published = 0, entered = 0;
  StageLoader<Program> stages(base);
  WaitCache events;
  CountCache<Program::kLimits> counts;
  begin_first(run, base, stages);
  const Admission admission(base);
  // NOTE: other programs wait before their first task, to save registers; so does this form of
  // the code. In programs with loops each call would have a copy of it.
  constexpr bool kWaitsFirst =
      kDrawsTickets<Program> || kLoadsEarly<Program> || Calls::kHasLoops;
  bool is_admitted = kWaitsFirst && admission.wait(), is_lost = kWaitsFirst && !is_admitted;
  if (is_lost) return false;
  if constexpr (kLoadsEarly<Program>) run.epoch = admission.epoch();
  const WorkRing items(base);
  const ClaimedUnits<Program> units(run, base);
  const auto lead_call = [&](i32& lane_unit, auto& tickets) ETC_INLINE {
    bool is_going = true;
    Waiter waiter{kTensorLane, 0, 0};
    Pending pending;
    Calls::visit(run.g, lane_unit, [&](auto call, i32 call_unit) ETC_INLINE {
      using Call = decltype(call);
      // Whether the thread passes from one unit of the call to its own next one.
      constexpr bool kRepeats = has_role<Call>(kLoadRole) && !kDrawsTickets<Program>;
      i32 num_left = 0;  // units of the call from this one on
      const auto lead_unit = [&]() ETC_INLINE {
        if (!is_admitted) {
          is_going = is_admitted = admission.wait();
          if (!is_going) return;
        }
        const ProducerState<Program> state{
            run, items, units, tickets, stages, events, counts, num_published, entered};
        const i32 task = call_unit;
        const auto coord = Call::at(run.g, task);
        waiter = Waiter{kTensorLane, Call::kCall, u32(task)};
        const Unit<Program, Call> unit{state, waiter, coord, task, is_going};
        if constexpr (kIsPending<Calls, Call>) {
          pending.set(unit);
        } else if constexpr (kMayBeSurplus<Call>) {
          is_going = wait_count(unit);
          if (!is_going) return;
          const CountedTask counted_unit = counted_task(unit);
          if (counted_unit.is_surplus) {
            const i32 num_units = skip_block(unit);
            if constexpr (kRepeats) {
              call_unit += num_units, lane_unit += num_units, num_left -= num_units;
            }
            return;
          }
          lead_counted(unit, counted_unit);
        } else {
          lead_ready(unit);
        }
      };
      if constexpr (kRepeats) {
        // NOTE: units of a call follow each other without a search for their call.
        const i32 workers = i32(gridDim.x);
        num_left = Calls::template left<Call>(run.g, call_unit);
#pragma unroll 1
        for (;; call_unit += workers, lane_unit += workers) {
          lead_unit();
          num_left -= workers;
          if (!is_going || num_left <= 0) break;
        }
      } else {
        lead_unit();
      }
    });
    if (is_going && pending.num_events >= 0) {
      is_going = lead_pending(run, items, pending, waiter, events, num_published);
    }
    // Before that only a run that was aborted fails, or the compute threads report it.
    if (!is_going && is_admitted) report(run, waiter);
    is_lost = !is_going;
    return is_going;
  };
  const bool has_ended = units.each(knows_first(run), num_published, lead_call);
  items.publish(num_published, {-1, 0, 0});
  if constexpr (Calls::kRoles != 0) {
    is_lost = is_lost || !(is_admitted || admission.wait());
  }
  return has_ended && !is_lost;
}

}  // namespace etc
