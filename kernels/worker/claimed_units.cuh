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
  // The ticket of the worker's unit, negative without one, and its next ticket if it is drawn.
  struct Tickets {
    u32 next = 0;
    i32 current = 0;
    bool is_drawn = false;
  };

  ETC_DEVICE ClaimedUnits(const Run<Program>& run, u32 base) : run_(run), items_(base) {}

  // Calls f(unit, tickets) for each unit while it returns true. `num_published`: the work items
  // that f has published; f may draw the next ticket early. Where units are neither drawn nor
  // popped, f may run some of the worker's next ones, too, and sets `unit` to the last of them.
  // is_begun: the first unit is not passed to f. False after an abort; without meaning if f
  // returned false.
  template <class F>
  ETC_DEVICE bool each(bool is_begun, const u32& num_published, F f) const {
    const i32 workers = i32(gridDim.x);
    i32 unit = i32(blockIdx.x);
    Tickets tickets;
    if constexpr (Program::kDynamic) {
      while (next_unit(tickets, num_published, unit) && f(unit, tickets)) {
      }
      if (unit != kLaneOver) return false;
    } else if constexpr (Program::kTensorTickets) {
      const i32 total = Calls::units(run_.g);
      tickets.current = unit - workers;
      while (unit < total && f(unit, tickets)) {
        draw(tickets, num_published);
        unit = workers + tickets.current;
      }
    } else {
      const i32 total = Calls::units(run_.g);
      if (is_begun) unit += workers;
      for (; unit < total && f(unit, tickets); unit += workers) {
      }
    }
    return true;
  }

  // Draws the next ticket without a wait, after n of the `count` stages of a unit have been loaded:
  // as late as possible for the ticket to arrive in time. `outstanding`: stages that may not be
  // empty again. NOTE: the compute threads have begun the unit once one of its stages is empty.
  ETC_DEVICE void draw_early(u32 ticket_idx, u32 count, u32 outstanding, Tickets& tickets) const {
    constexpr u32 kDrawStage = 6;  // stages before the last one
    if (ticket_idx + kDrawStage == count && ticket_idx > outstanding) draw_now(tickets);
  }

 private:
  // The worker's next ticket. It claims at most one unit ahead: other workers may be idle.
  ETC_DEVICE void draw(Tickets& tickets, u32 num_published) const {
    items_.wait_begun(num_published);
    draw_now(tickets);
    tickets = Tickets{0, i32(tickets.next)};
  }
  ETC_DEVICE void draw_now(Tickets& tickets) const {
    if (tickets.is_drawn) return;
    tickets.is_drawn = true;
    if constexpr (Program::kDynamic) {
      tickets.next = WorkQueue<Program, typename Program::TensorQueue>::draw(run_);
    } else {
      tickets.next = draw_ticket(run_, kTensorLane);
    }
  }
  // The next unit of a dynamic program; false after the last one.
  ETC_DEVICE bool next_unit(Tickets& tickets, u32 num_published, i32& unit) const {
    using TensorUnits = WorkQueue<Program, typename Program::TensorQueue>;
    draw(tickets, num_published);
    const bool has_unit = spin<false>(run_, run_.g.wait_limit, [&] {
      return (unit = TensorUnits::unit_of(run_, u32(tickets.current))) != kNotYet;
    });
    if (!has_unit) TensorUnits::report(run_);
    return has_unit && unit != kLaneOver;
  }

  const Run<Program>& run_;
  WorkRing items_;
};

}  // namespace etc
