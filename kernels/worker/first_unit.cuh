// A worker's first unit, where it waits for nothing: the compute threads run it without a work
// item, or the producer thread begins its loads before the run is admitted.
#pragma once
#include "worker/stage_ring.cuh"

namespace etc {

// Whether the compute threads may know a worker's first unit without a work item.
template <class Program>
constexpr bool kKnowsFirst = Program::TensorCalls::kRoles == 0 && !kDrawsTickets<Program>;

// Whether this worker's first unit is a task of the first call, which waits for nothing: it is
// not published, which saves 0.2 us when a run begins.
template <class Program>
ETC_DEVICE bool knows_first(const Run<Program>& run) {
  using Calls = typename Program::TensorCalls;
  bool is_ready = false;
  if constexpr (kKnowsFirst<Program>) {
    Calls::first([&](auto call) {
      using Call = decltype(call);
      is_ready = Call::kWaits == 0 && !Call::kLoads && !Call::kReadsBeforeWait &&
                 i32(blockIdx.x) < Call::units(run.g);
      if constexpr (Calls::kHasLoops) {  // its loop may have no turns
        bool is_first = false;
        Calls::visit(run.g, i32(blockIdx.x), [&](auto visited_call, i32) ETC_INLINE {
          is_first = kIsSame<decltype(visited_call), Call>;
        });
        is_ready = is_ready && is_first;
      }
    });
  }
  return is_ready;
}

// The producer thread, at the start: waits until all mbarriers are initialized, and begins the
// first stages of a task that waits for nothing.
template <class Program>
ETC_DEVICE void begin_first(const Run<Program>& run, u32 base, StageLoader<Program>& stages) {
  using Calls = typename Program::TensorCalls;
  if constexpr (kLoadsEarly<Program>) {
    const auto ready = [&]() ETC_INLINE { Admission(base).wait_initialized(); };
    const i32 first = i32(blockIdx.x);
    bool is_found = false;
    const auto load_first = [&](auto call, i32 task) ETC_INLINE {
      using Call = decltype(call);
      if constexpr (kLoadsAtOnce<Call>) {
        is_found = true;
        if (task >= Call::units(run.g)) return ready();
        FunctionOf<Call>::load_first(run, stages, Call::at(run.g, task), ready);
      }
    };
    if constexpr (num_loading_at_once(Calls{}) == 1) {
      Calls::first([&](auto call) ETC_INLINE { load_first(call, first); });
    } else {
      Calls::visit(run.g, first, load_first);
      if (!is_found) ready();
    }
  }
}

}  // namespace etc
