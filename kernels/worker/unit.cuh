// A unit of the producer thread: how it waits, and how it is passed to the other warps. In which
// order it does both is the subject of worker/ready/.
#pragma once
#include "worker/claimed_units.cuh"
#include "worker/first_unit.cuh"
#include "worker/task.cuh"

namespace etc {

// What the producer thread keeps from one unit to the next: references to its variables.
// NOTE: not the values. The compiler would generate other code for members of one object.
template <class Program>
struct ProducerState {
  Run<Program>& run;
  const WorkRing& items;
  const ClaimedUnits<Program>& units;
  typename ClaimedUnits<Program>::Tickets& tickets;
  StageLoader<Program>& stages;
  WaitCache& events;
  CountCache<Program::kLimits>& counts;
  u32& num_published;  // work items
  u32& entered;        // peers that have started
};

// Orders other threads' writes before the bulk copies of a task.
template <class Call>
ETC_DEVICE void fence_loads(WaitCache& events) {
  if (Call::kWaits > 0 && (kIsQueued<Call> || events.is_unfenced)) {
    ptx::fence_proxy_async_global();
    events.is_unfenced = false;
  }
}

// The load role of a task whose waits are met, but for that of `event`, if there is one: publishes
// it and loads its stages. `prepared`: its coordinate, or what prepare() returned. For a function
// that writes to peers, `event` is the wait for their start. False after an abort.
template <class Call, class Program, class Prepared, class... Event>
ETC_DEVICE bool load_stages(
    Run<Program>& run, const WorkRing& items, const ClaimedUnits<Program>& units,
    typename ClaimedUnits<Program>::Tickets& tickets, StageLoader<Program>& stages,
    WaitCache& events, u32& num_published, const Prepared& prepared, i32 task,
    Event&... event) {
  using Function = FunctionOf<Call>;
  fence_loads<Call>(events);
  const u32 size = Function::size(run, prepared);
  const auto publish = [&]() ETC_INLINE {
    if constexpr (Function::kDataWords > 0) {
      u32 words[Function::kDataWords];
      Function::data(run, prepared, size, words);
      items.template write_data<Program>(num_published, words);
    }
    items.publish(num_published, work_item<Program, Call>(task, size));
  };
  return Function::load(run, stages, prepared, size, publish, event..., [&](u32 n) ETC_INLINE {
    if constexpr (kDrawsTickets<Program>) {
      const u32 count = Function::stages(run, size).count;
      units.draw_early(n, count, stages.outstanding(), tickets);
    }
  });
}

// The functions that wait return false after an abort, and if a wait lasted too long.
template <class ProgramType, class CallType>
struct Unit {
  using Program = ProgramType;
  using Call = CallType;
  static constexpr bool kByTicket = kDrawsTickets<Program>;

  const ProducerState<Program>& state;
  Waiter& waiter;
  const typename Call::Coord& coord;
  const i32 task;
  bool& is_going;  // set by the ways of worker/ready/: false after an abort

  // Waits for its n-th event.
  ETC_DEVICE bool wait(int n) const {
    return wait_event_once<Program, Call>(state.run, coord, n, waiter, state.events);
  }
  // Waits for all events, and checks that what it loads is in range.
  ETC_DEVICE bool wait_all() const {
    return wait_events<Program, Call>(state.run, coord, waiter, state.events);
  }
  // The same of all events but the last.
  ETC_DEVICE bool wait_before_last() const {
#pragma unroll
    for (int n = 0; n + 1 < Call::kWaits; ++n) {
      if (!wait(n)) return false;
    }
    if constexpr (Call::kLoads) {
      if (!Call::in_range(state.run.g, coord)) return fail_range();
    }
    return true;
  }
  // What it loads is out of range: false.
  ETC_DEVICE bool fail_range() const { return waiter.fail(kOutOfRange, 0, 0); }

  ETC_DEVICE void publish() const {
    state.items.publish(state.num_published, work_item<Program, Call>(task));
  }

  // Once its waits are met: publishes it, and loads its stages.
  ETC_DEVICE void start() const {
    if constexpr (!has_role<Call>(kLoadRole)) {
      publish();
    } else if constexpr (FunctionOf<Call>::kWritesPeers) {
      const auto wait_start = [&]() ETC_INLINE {
        return wait_starts<Program, Call>(state.run, coord, waiter, state.entered);
      };
      is_going = load(coord, wait_start);
    } else {
      is_going = load(coord);
    }
  }

  template <class Prepared, class... Event>
  ETC_DEVICE bool load(const Prepared& prepared, Event&... event) const {
    return load_stages<Call>(
        state.run, state.items, state.units, state.tickets, state.stages, state.events,
        state.num_published, prepared, task, event...);
  }
};

}  // namespace etc
