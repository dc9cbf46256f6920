// The units of the tensor lane that a worker claims.
#pragma once
#include "queue/pop.cuh"
#include "worker/work_ring.cuh"

namespace etc {

// By the producer thread.
template <class Program>
class ClaimedUnits {
  using Calls = typename Program::TensorCalls;

 public:
  // The worker's next ticket, and the one that was taken last.
  struct Next {
    u32 ticket = 0;
    i32 taken = 0;
    bool is_drawn = false;
  };

  ETC_DEVICE ClaimedUnits(const Run<Program>& run, u32 base)
      : run_(run), items_(base) {}

  // Calls f(unit, next) for each unit while it returns true. `published` counts the work items that
  // f publishes; f may draw the next ticket early. Where units are neither drawn nor popped, f may
  // run some of the worker's next ones, too, and sets `unit` to the last of them. is_begun: the
  // first unit is not passed to f. False after an abort; without meaning if f returned false.
  template <class F>
  ETC_DEVICE bool each(bool is_begun, const u32& published, F f) const {
    const i32 workers = i32(gridDim.x);
    i32 unit = i32(blockIdx.x);
    Next next;
    if constexpr (Program::kDynamic) {
      while (next_unit(next, published, unit) && f(unit, next)) {
      }
      if (unit != kLaneOver) return false;
    } else if constexpr (Program::kTensorTickets) {
      const i32 total = Calls::units(run_.g);
      next.taken = unit - workers;
      while (unit < total && f(unit, next)) {
        draw(next, published);
        unit = workers + next.taken;
      }
    } else {
      const i32 total = Calls::units(run_.g);
      if (is_begun) unit += workers;
      for (; unit < total && f(unit, next); unit += workers) {
      }
    }
    return true;
  }

  // Draws the next ticket without a wait, after n of the `count` stages of a unit have been loaded:
  // as late as possible for the ticket to arrive in time. `outstanding`: stages that may not be
  // empty again. NOTE: the compute threads have begun the unit once one of its stages is empty.
  ETC_DEVICE void draw_early(u32 n, u32 count, u32 outstanding, Next& next) const {
    constexpr u32 kDrawStage = 6;  // stages before the last one
    if (n + kDrawStage == count && n > outstanding) draw_now(next);
  }

 private:
  // The worker's next ticket. It claims at most one unit ahead: other workers may be idle.
  ETC_DEVICE void draw(Next& next, u32 published) const {
    items_.wait_begun(published);
    draw_now(next);
    next = Next{0, i32(next.ticket)};
  }
  ETC_DEVICE void draw_now(Next& next) const {
    if (next.is_drawn) return;
    next.is_drawn = true;
    if constexpr (Program::kDynamic) {
      next.ticket = WorkQueue<Program, typename Program::TensorQueue>::draw(run_);
    } else {
      next.ticket = draw_ticket(run_, kTensorLane);
    }
  }
  // The next unit of a dynamic program; false after the last one.
  ETC_DEVICE bool next_unit(Next& next, u32 published, i32& unit) const {
    using TensorUnits = WorkQueue<Program, typename Program::TensorQueue>;
    draw(next, published);
    const bool came = spin<false>(run_, run_.g.wait_limit, [&] {
      return (unit = TensorUnits::unit_of(run_, u32(next.taken))) != kNotYet;
    });
    if (!came) TensorUnits::report(run_);
    return came && unit != kLaneOver;
  }

  const Run<Program>& run_;
  WorkRing items_;
};

}  // namespace etc
