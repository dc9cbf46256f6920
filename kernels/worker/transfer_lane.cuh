// The transfer lane: single warps that copy and reduce, concurrently with the tensor lane.
#pragma once
#include "queue/pop.cuh"
#include "worker/calls.cuh"
#include "worker/task.cuh"
#include "worker/trace.cuh"

namespace etc {

// One warp of the lane. Units are claimed in order with an atomic ticket. A warp holds a claimed
// unit until it can run, so the order alone determines that the lane cannot deadlock. In a dynamic
// program a warp holds a ticket until its unit is pushed; that unit can run.
template <class Program>
class TransferLane {
  using Calls = typename Program::TransferCalls;

 public:
  enum class Step { kRan, kNotReady, kEmpty, kAborted };

  ETC_DEVICE TransferLane(const Run<Program>& run, Tracer<Program>& trace)
      : run_(run), trace_(trace), entered_(0), unit_(-1), has_ticket_(false) {
    total_ = Program::kDynamic ? kLaneOver : Calls::units(run.g);
  }

  // Runs the claimed task if it is ready; never blocks.
  ETC_DEVICE Step try_one() {
    if constexpr (Calls::kCount == 0) {
      return Step::kEmpty;
    } else {
      draw();
      if (Program::kDynamic && unit_ < 0) return Step::kNotReady;
      if (unit_ >= total_) return Step::kEmpty;
      bool ran = false;
      Calls::visit(run_.g, unit_, [&](auto call, i32 t) ETC_INLINE {
        using Call = decltype(call);
        const auto c = Call::at(run_.g, t);
        bool ready = false;
        if (lane_index() == 0) {
          Waiter who{kTransferLane, Call::kCall, u32(t)};
          ready = (!is_paced<Call>() || is_due(due<Call>(t))) && is_ready<Call>(c, who) &&
                  peers_have_started<Program, Call>(run_, c, entered_);
          if (who.kind == kOutOfRange) report(run_, who);
        }
        if (!__shfl_sync(~0u, int(ready), 0)) return;
        execute<Call>(c, t);
        ran = true;
      });
      if (!ran) return Step::kNotReady;
      unit_ = -1;
      return Step::kRan;
    }
  }

  // Runs the rest of the lane; returns when no unit is left or the run is aborted.
  ETC_DEVICE void drain() {
    if constexpr (Calls::kCount > 0) {
      for (;;) {
        if (!draw_waiting() || unit_ >= total_) return;
        bool aborted = false;
        Calls::visit(run_.g, unit_, [&](auto call, i32 t) ETC_INLINE {
          using Call = decltype(call);
          const auto c = Call::at(run_.g, t);
          bool ready = true;
          if (lane_index() == 0) {
            Waiter who{kTransferLane, Call::kCall, u32(t)};
            ready = (!is_paced<Call>() || wait_until_due(run_, due<Call>(t))) &&
                    wait_ready<Call>(c, who) &&
                    wait_peers<Program, Call>(run_, c, who, entered_);
            if (!ready) report(run_, who);
          }
          aborted = !__shfl_sync(~0u, int(ready), 0);
          if (!aborted) execute<Call>(c, t);
        });
        if (aborted) return;
        unit_ = -1;
      }
    }
  }

 private:
  ETC_DEVICE static i32 lane_index() { return threadIdx.x % 32; }

  // In a dynamic program the unit may not be pushed yet.
  ETC_DEVICE void draw() {
    if (unit_ >= 0) return;
    i32 next = 0;
    if (lane_index() == 0) {
      if constexpr (Program::kDynamic) {
        using TransferUnits = WorkQueue<Program, typename Program::TransferQueue>;
        if (!has_ticket_) ticket_ = TransferUnits::draw(run_);
        next = TransferUnits::unit_of(run_, ticket_);
      } else {
        next = i32(draw_ticket(run_, kTransferLane));
      }
    }
    unit_ = __shfl_sync(~0u, next, 0);
    has_ticket_ = unit_ < 0;
  }
  // False if the run was aborted.
  ETC_DEVICE bool draw_waiting() {
    if constexpr (Program::kDynamic) {
      using TransferUnits = WorkQueue<Program, typename Program::TransferQueue>;
      const bool arrived =
          spin<true, true>(run_, run_.g.wait_limit, [&] { return draw(), unit_ >= 0; });
      if (!arrived && lane_index() == 0) TransferUnits::report(run_);
      return arrived;
    } else {
      draw();
      return true;
    }
  }

  // One lane. A unit of a dynamic program is ready once it is pushed.
  template <class Call>
  ETC_DEVICE bool is_ready(const typename Call::Coord& c, Waiter& who) const {
    if constexpr (Program::kDynamic) return is_in_range<Program, Call>(run_, c, who);
    return waits_are_met<Program, Call>(run_, c, who);
  }
  template <class Call>
  ETC_DEVICE bool wait_ready(const typename Call::Coord& c, Waiter& who) const {
    if constexpr (Program::kDynamic) return is_in_range<Program, Call>(run_, c, who);
    WaitCache none;
    return wait_events<true, Program, Call>(run_, c, who, none);
  }

  template <class Call>
  ETC_DEVICE bool is_paced() const {  // false is known at compile time
    return Call::pace(run_.g) != 0;
  }
  template <class Call>
  ETC_DEVICE u32 due(i32 t) const {
    return run_.start + u32(t) * u32(Call::pace(run_.g));
  }

  template <class Call>
  ETC_DEVICE void execute(const typename Call::Coord& c, i32 t) {
    const u64 begin = trace_.now();
    __syncwarp();  // lane 0's acquire covers the whole warp
    if constexpr (kSendsFar<Call>) {
      if (send_far<Call>(c)) {
        trace_.add(kTransferLane, Call::kCall, u32(t), begin);
        return;
      }
    }
    // NOTE: the lane index is read here, or values that a body derives from it stay in registers.
    if (!is_idle<Call>(run_.g, c)) {
      Call::template Function<Task<Program, Call, 32>>::run(
          Task<Program, Call, 32>(run_.g, c, i32(ptx::lane()), nullptr));
    }
    __syncwarp();
    notify_all<Program, Call>(run_, c, 1);
    trace_.add(kTransferLane, Call::kCall, u32(t), begin);
  }

  // Whether tasks may send to a far rank.
  template <class Call>
  static constexpr bool kSendsFar = kHasFar<Program> && requires { Call::kFar; };
  // If the task's rank is far, sends its region and its notification in one message.
  template <class Call>
  ETC_DEVICE bool send_far(const typename Call::Coord& c) const {
    const EventRef event = Call::notify(run_.g, c, 0);
    if (!run_.is_far(event.rank)) return false;
    Call::template Function<Task<Program, Call, 32>>::template send<typename Program::Far>(
        Task<Program, Call, 32>(run_.g, c, i32(ptx::lane()), nullptr), run_.self(),
        run_.far_word(event.index), Call::notify_step(0));
    return true;
  }

  const Run<Program>& run_;
  Tracer<Program>& trace_;
  u32 entered_;
  i32 unit_, total_;
  bool has_ticket_;
  u32 ticket_;
};

}  // namespace etc
