// Claiming units with atomic tickets: of a lane of a static program, or of a queue of a dynamic
// one. A queue holds units in the order in which they were pushed.
#pragma once
#include "queue/push.cuh"

namespace etc {

// Instead of a unit: not pushed yet; the lane is finished.
constexpr i32 kNotYet = -1, kLaneOver = 0x7fffffff;

// Draws the next ticket of a lane of a static program.
template <class Program>
ETC_DEVICE u32 draw_ticket(const Run<Program>& run, LaneId lane) {
  return ptx::count_up(u64(&run.control()->tickets[lane][run.epoch & 1]));
}

// Draws all remaining tickets below `end` of a lane of a static program.
template <class Program>
ETC_DEVICE void draw_up_to(const Run<Program>& run, LaneId lane, u32 end) {
  atomicMax(&run.control()->tickets[lane][run.epoch & 1], end);
}

// For diagnostics: the count of an element, and the first unmet event of a task.
template <class Program>
ETC_DEVICE u32 have(const Run<Program>& run, const EventRef& event) {
  return ptx::load_relaxed(run.event_address(run.g.rank, event.index));
}
template <class Call, class Program>
ETC_DEVICE bool find_unmet(
    const Run<Program>& run, const typename Call::Coord& c, EventRef& event) {
#pragma unroll 1
  for (int n = 0; n < Call::kWaits; ++n) {
    if (n == Call::kFreeWaits && !Call::waits_in_range(run.g, c)) return false;
    event = Call::wait(run.g, c, n);
    if (event.target != 0 && i32(have(run, event) - event.target) < 0) return true;
  }
  return false;
}

// The queue of a lane of a dynamic program. A consumer draws a ticket, and owns the initial unit of
// that number, whose waits may be unmet, or the unit that is pushed to its slot.
template <class Program, class Queue>
struct WorkQueue {
  ETC_DEVICE static u32 draw(const Run<Program>& run) {
    // NOTE: only this rank draws, so GPU scope suffices.
    return ptx::count_up(run.event_address(run.g.rank, Queue::head(run.g)));
  }

  // The unit of a ticket, which is initial or ready to run, or one of the constants above.
  ETC_DEVICE static i32 unit_of(const Run<Program>& run, u32 ticket) {
    const auto& g = run.g;
    const u32 initial = u32(Queue::initial(g)), num_units = u32(Queue::units(g));
    if (ticket < initial) return i32(ticket);
    if (ticket >= num_units) return kLaneOver;
    const u64 slot = run.event_address(g.rank, Queue::slots(g) + ticket - initial);
    const u32 word = ptx::load_acquire<kPeersPush<Program>>(slot);
    if (word != 0) return i32(initial + word - 1);
    if constexpr (Queue::kHasSurplus) {
      // NOTE: slots are filled without gaps. The surplus may still grow.
      const u32 surplus = ptx::load_relaxed(run.event_address(g.rank, Queue::surplus(g)));
      if (ticket >= num_units - surplus) return kLaneOver;
    }
    return kNotYet;
  }

  // Reports that no unit arrived in time: records the first unmet wait of the earliest call in the
  // graph. Once per rank, since every consumer would record the same.
  ETC_DEVICE static void report(const Run<Program>& run) {
    run.signal_host();
    record_resident(run);
    if (run.aborted() || ptx::load_relaxed(u64(&run.control()->faults)) != 0) return;
    Waiter who{kLaneOf<Program, Queue>, ~0u, 0};
    EventRef event{};
    Program::WaitingCalls::each([&](auto call) ETC_INLINE {
      using Call = decltype(call);
      if (Call::kCall > who.call) return;
      if constexpr (kIsQueued<Call>) {
        const i32 num_queued = group_units<Call>(run.g) > 0 ? num_groups<Call>(run.g) : 0;
        for (i32 group = 0; group < num_queued; ++group) {
          const auto c = Call::group_at(run.g, group);
          if (!find_unmet<Call>(run, c, event)) continue;
          if constexpr (Call::kLimit > 0) {  // the count is known after the first wait
            const bool is_known = event.index != Call::wait(run.g, c, 0).index;
            if (is_known && Call::is_surplus(c, Call::count(run.g, c))) continue;
          }
          who = group_waiter<Call>(run, group);
          return;
        }
      } else {  // claimed early: the wait of such a task may be the cause
#pragma unroll 1
        for (i32 t = 0; t < Call::tasks(run.g); ++t) {
          if (!find_unmet<Call>(run, Call::at(run.g, t), event)) continue;
          who = {kLaneOf<Program, typename Call::Queue>, Call::kCall, u32(t)};
          return;
        }
      }
    });
    if (who.call == ~0u) {
      abort_run(run, Waiter{who.lane, 0, 0}, kInsideWorker, 0, 0, 0);
    } else {
      abort_run(run, who, kEventWait, event.index, have(run, event), event.target);
    }
  }
};

}  // namespace etc
