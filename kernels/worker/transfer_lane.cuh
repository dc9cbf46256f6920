// The transfer lane: single warps that copy and reduce, concurrently with the tensor lane.
#pragma once
#include "queue/pop.cuh"
#include "worker/admission.cuh"
#include "worker/calls.cuh"
#include "worker/task.cuh"
#include "worker/trace.cuh"

namespace etc {

// Whether the call has a pace, which may be 0 ns per task in a run.
template <class Call>
constexpr bool kHasPace = Call::pace != Call::Defaults::pace;

template <class Program>
constexpr bool kIsPaced =
    Program::TransferCalls::any([](auto call) { return kHasPace<decltype(call)>; });

// One warp of the lane. Units are claimed in order with an atomic ticket. A warp holds a claimed
// unit until it can run, so the order alone determines that the lane cannot deadlock. In a dynamic
// program it may hold a ticket whose unit has not been pushed; a unit from the queue can run.
template <class Program>
class TransferLane {
  using Calls = typename Program::TransferCalls;

 public:
  ETC_DEVICE TransferLane(const Run<Program>& run, u32 base, Tracer<Program>& trace)
      : run_(run), base_(base), trace_(trace), entered_(0), unit_(-1), has_ticket_(false) {
    total_ = Program::kDynamic ? kLaneOver : Calls::units(run.g);
  }

  // Runs the claimed task if it is ready. is_alone: the warp has nothing else to do, so it waits
  // until the task is ready. False, only if it is alone: no unit is left, the unit could not run in
  // time, or the run was aborted.
  ETC_DEVICE bool step(bool is_alone) {
    if constexpr (Calls::kCount == 0) {
      return !is_alone;
    } else {
      Waiter who{kTransferLane, 0, 0};
      const Result result = try_one(is_alone, who);
      if (result == kEmpty) return !is_alone;
      if (result == kRan || (result == kNotReady && !is_alone)) return true;
      if (lane_index() == 0) report_wait(who);
      return !is_alone;
    }
  }

 private:
  enum Result : int { kRan, kNotReady, kEmpty, kFailed };

  // kNotReady only if the warp is not alone: a unit below total_ belongs to a call. who: on lane 0,
  // what the unit waits for.
  ETC_DEVICE Result try_one(bool is_alone, Waiter& who) {
    if (!draw(is_alone)) return is_alone ? kFailed : kNotReady;
    if (unit_ >= total_) return kEmpty;
    Result result = kNotReady;
    Calls::visit(run_.g, unit_, [&](auto call, i32 t) ETC_INLINE {
      using Call = decltype(call);
      const auto c = Call::at(run_.g, t);
      if (lane_index() == 0) {
        who = {kTransferLane, Call::kCall, u32(t)};
        result = wait_ready<Call>(c, t, is_alone, who);
      }
      result = static_cast<Result>(__shfl_sync(~0u, int(result), 0));
      if (result == kRan) execute<Call>(c, t);
    });
    if (result == kRan) unit_ = -1;
    return result;
  }

  // One lane. In a dynamic program the unit may not have been pushed.
  ETC_DEVICE void report_wait(const Waiter& who) const {
    if constexpr (Program::kDynamic) {
      using TransferUnits = WorkQueue<Program, typename Program::TransferQueue>;
      if (unit_ < 0) return TransferUnits::report(run_);
    }
    report(run_, who);
  }

  ETC_DEVICE static i32 lane_index() { return threadIdx.x % 32; }

  // Claims a unit, unless there is one. False in a dynamic program: not alone, if it has not been
  // pushed; alone, if it was not pushed in time or the run was aborted.
  ETC_DEVICE bool draw(bool is_alone) {
    if constexpr (Program::kDynamic) {
      const auto poll = [&] { return draw_once(), unit_ >= 0 || !is_alone; };
      return spin<true, true>(run_, run_.g.wait_limit, poll) && unit_ >= 0;
    } else {
      draw_once();
      return true;
    }
  }
  ETC_DEVICE void draw_once() {
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

  // One lane. kNotReady only if the warp is not alone. Each wait has the limit, the pace has none.
  template <class Call>
  ETC_DEVICE Result wait_ready(
      const typename Call::Coord& c, i32 t, bool is_alone, Waiter& who) {
    // NOTE: before the other waits, since a unit is due for 2 s only: see is_due().
    while (is_paced<Call>() && !is_due(due<Call>(t))) {
      if (!is_alone) return kNotReady;
      ptx::nanosleep(200);
      if (run_.aborted()) return kFailed;
    }
    Patience patience;
    u32 kind = who.kind, element_idx = who.index;
    while (!is_ready<Call>(c, who)) {
      if (who.kind == kOutOfRange) return kFailed;
      if (!is_alone) return kNotReady;
      if (who.kind != kind || who.index != element_idx) {
        patience = {}, kind = who.kind, element_idx = who.index;
      }
      ptx::nanosleep(100);
      if (!patience.template lasts<false>(run_, run_.g.wait_limit)) return kFailed;
    }
    return kRan;
  }

  // One lane. A unit of a queued call is ready once it is pushed.
  template <class Call>
  ETC_DEVICE bool is_ready(const typename Call::Coord& c, Waiter& who) {
    bool is_met;
    if constexpr (kIsQueued<Call>) {
      is_met = is_in_range<Program, Call>(run_, c, who);
    } else {
      is_met = waits_are_met<Program, Call>(run_, c, who);
    }
    return is_met && peers_have_started<Program, Call>(run_, c, who, entered_);
  }

  template <class Call>
  ETC_DEVICE bool is_paced() const {
    return kHasPace<Call> && Call::pace(run_.g) != 0;
  }
  template <class Call>
  ETC_DEVICE u32 due(i32 t) const {
    return Admission(base_).start() + u32(t) * u32(Call::pace(run_.g));
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
    notify_all<Program, Call>(run_, c);
    trace_.add(kTransferLane, Call::kCall, u32(t), begin);
  }

  // Whether tasks may send to a far rank.
  template <class Call>
  static constexpr bool kSendsFar = kHasFar<Program> && Call::kFar;
  // If the task's rank is far, sends its region and its notification in one message.
  template <class Call>
  ETC_DEVICE bool send_far(const typename Call::Coord& c) const {
    const EventRef event = Call::notify(run_.g, c, 0);
    if (!run_.is_far(event.rank)) return false;
    Call::template Function<Task<Program, Call, 32>>::template send<typename Program::Far>(
        Task<Program, Call, 32>(run_.g, c, i32(ptx::lane()), nullptr), run_.self(),
        run_.far_word(event.index));
    return true;
  }

  const Run<Program>& run_;
  const u32 base_;  // shared address
  Tracer<Program>& trace_;
  u32 entered_;
  i32 unit_, total_;
  bool has_ticket_;
  u32 ticket_;
};

}  // namespace etc
