// The transfer lane: single warps that copy and reduce, beside the tensor lane.
#pragma once
#include "worker/calls.cuh"
#include "worker/task.cuh"
#include "worker/trace.cuh"

namespace etc {

// One warp's share of the lane. Units are drawn in order by ticket; a drawn unit is kept
// until it can run, so that order alone decides that the lane cannot deadlock.
template <class Program>
class TransferLane {
  using Calls = typename Program::TransferCalls;

 public:
  enum class Step { kRan, kNotReady, kEmpty, kAborted };

  ETC_DEVICE TransferLane(const Run<Program>& run, Tracer<Program>& trace)
      : run_(run), trace_(trace), entered_(0), unit_(-1) {
    total_ = Calls::units(run.g);
  }

  // Runs the drawn task if it is ready; never blocks.
  ETC_DEVICE Step try_one() {
    if constexpr (Calls::kCount == 0) {
      return Step::kEmpty;
    } else {
      draw();
      if (unit_ >= total_) return Step::kEmpty;
      bool ran = false;
      Calls::visit(run_.g, unit_, [&](auto call, i32 t) {
        using Call = decltype(call);
        const auto c = Call::at(run_.g, t);
        bool ready = false;
        if (lane_index() == 0) {
          ready = ptx::global_timer() >= due<Call>(t) &&
                  peers_have_started<Program, Call>(run_, c, entered_) &&
                  waits_are_met<Program, Call>(run_, c);
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

  // Runs the rest of the lane; returns when no unit is left or the program is aborted.
  ETC_DEVICE void drain() {
    if constexpr (Calls::kCount > 0) {
      for (;;) {
        draw();
        if (unit_ >= total_) return;
        bool aborted = false;
        Calls::visit(run_.g, unit_, [&](auto call, i32 t) {
          using Call = decltype(call);
          const auto c = Call::at(run_.g, t);
          bool ready = true;
          if (lane_index() == 0) {
            const Waiter who{kTransferLane, Call::kCall, u32(t)};
            ready = wait_until(run_, due<Call>(t)) && wait_events<true, Program, Call>(run_, c, who) &&
                    wait_peers<Program, Call>(run_, c, who, entered_);
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

  ETC_DEVICE void draw() {
    if (unit_ >= 0) return;
    i32 next = 0;
    if (lane_index() == 0) {
      next = i32(atomicAdd(&run_.control()->tickets[run_.epoch & 1], 1u));
    }
    unit_ = __shfl_sync(~0u, next, 0);
  }

  template <class Call>
  ETC_DEVICE u64 due(i32 t) const {
    return run_.start + u64(t) * u64(Call::pace(run_.g));
  }

  template <class Call>
  ETC_DEVICE void execute(const typename Call::Coord& c, i32 t) {
    const u64 begin = trace_.now();
    __syncwarp();  // what lane 0 acquired holds for all
    Call::template Function<Task<Program, Call, 32>>::run(
        Task<Program, Call, 32>(run_.g, c, lane_index()));
    __syncwarp();
    if (lane_index() == 0) notify_all<Program, Call>(run_, c, 1);
    __syncwarp();
    trace_.add(kTransferLane, Call::kCall, u32(t), begin);
  }

  const Run<Program>& run_;
  Tracer<Program>& trace_;
  u32 entered_;
  i32 unit_, total_;
};

}  // namespace etc
