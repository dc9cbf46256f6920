// The units of the tensor lane that a cluster claims.
#pragma once
#include "queue/pop.cuh"
#include "worker/ticket_channel.cuh"

namespace etc {

// By the producer threads of a cluster's workers, which go through the same units.
template <class Program>
class ClaimedUnits {
  using Calls = typename Program::TensorCalls;

 public:
  // The cluster's next ticket, its n-th, and the one that was taken last.
  struct Next {
    u32 n = 0, ticket = 0;
    i32 taken = 0;
    bool is_drawn = false, is_sent = false;
  };

  ETC_DEVICE ClaimedUnits(const Run<Program>& run, u32 base)
      : run_(run), base_(base), items_(base) {}

  // Calls f(unit, next) for each unit while it returns true. `published` counts the work items that
  // f publishes; f may draw the next ticket early. Where units are neither drawn nor popped, f may
  // run some of the cluster's next ones, too, and sets `unit` to the last of them. is_begun: the
  // first unit is not passed to f. With tickets, the first worker of a cluster then waits until the
  // second one has received all of them. False after an abort; without meaning if f returned false.
  template <class F>
  ETC_DEVICE bool each(bool is_begun, const u32& published, F f) const {
    const i32 clusters = i32(gridDim.x) / Program::kTensorCluster;
    i32 unit = i32(blockIdx.x) / Program::kTensorCluster;
    Next next;
    if constexpr (Program::kDynamic) {
      while (next_unit(next, published, unit) && f(unit, next)) {
      }
      if (unit != kLaneOver) return false;
    } else if constexpr (Program::kTensorTickets) {
      const i32 total = Calls::units(run_.g);
      next.taken = unit - clusters;
      bool going = true;
      while (unit < total && f(unit, next) && (going = draw(next, published))) {
        unit = clusters + next.taken;
      }
      if (!going) return false;
    } else {
      const i32 total = Calls::units(run_.g);
      if (is_begun) unit += clusters;
      for (; unit < total && f(unit, next); unit += clusters) {
      }
    }
    if constexpr (kDrawsTickets<Program> && Program::kTensorCluster > 1) {
      if (is_first()) return TicketChannel(base_).wait_received(run_, next.n);
    }
    return true;
  }

  // Draws the next ticket without a wait, after n of the `count` stages of a unit have been loaded:
  // as late as possible for the ticket to arrive in time. `outstanding`: stages that may not be
  // empty again. NOTE: the compute threads have begun the unit once one of its stages is empty.
  ETC_DEVICE void draw_early(u32 n, u32 count, u32 outstanding, Next& next) const {
    constexpr u32 kDrawStage = 6, kSendStage = 2;  // stages before the last one
    if (n + kDrawStage == count && n > outstanding) draw_now(next);
    if constexpr (Program::kTensorCluster > 1) {
      if (n + kSendStage == count && next.is_drawn) {
        next.is_sent = TicketChannel(base_).try_send(next.n, next.ticket);
      }
    }
  }
  // In a cluster, the first worker draws, and sends the ticket to the second one.
  ETC_DEVICE static bool is_first() { return blockIdx.x % Program::kTensorCluster == 0; }

 private:
  // The cluster's next ticket; false if the program was aborted. A cluster claims at most one unit
  // ahead: other clusters may be idle.
  ETC_DEVICE bool draw(Next& next, u32 published) const {
    items_.wait_begun(published);
    draw_now(next);
    bool going = true;
    if constexpr (Program::kTensorCluster > 1) {
      const TicketChannel channel(base_);
      if (!is_first()) {
        going = channel.receive(run_, next.n, next.ticket);
      } else if (!next.is_sent) {
        going = channel.send(run_, next.n, next.ticket);
      }
    }
    next = Next{next.n + 1, 0, i32(next.ticket)};
    return going;
  }
  ETC_DEVICE void draw_now(Next& next) const {
    if (!is_first() || next.is_drawn) return;
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
    if (!draw(next, published)) return false;
    const bool came = spin<false>(run_, run_.g.wait_limit, [&] {
      return (unit = TensorUnits::unit_of(run_, u32(next.taken))) != kNotYet;
    });
    if (!came) TensorUnits::report(run_);
    return came && unit != kLaneOver;
  }

  const Run<Program>& run_;
  u32 base_;  // shared address
  WorkRing items_;
};

}  // namespace etc
