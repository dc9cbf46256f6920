// The tensor lane: workers run its units. Worker i takes the units i, i + workers and
// so on, or those of its atomic tickets, or in a dynamic program those of the queue.
//
// In each worker one producer thread claims units, waits for their events and publishes their tasks
// as work items. All other warps of the lane process the same items in the same order, each in its
// roles: see worker/roles.cuh. The producer thread has the load role, and loads as far ahead as the
// ring of stages has room. In programs without roles and tickets, a first unit that waits for
// nothing is not published.
#pragma once
#include "event/flags.cuh"
#include "ptx/bulk_copy.cuh"
#include "worker/admission.cuh"
#include "worker/calls.cuh"
#include "worker/computes.cuh"
#include "worker/producer.cuh"
#include "worker/transfer_lane.cuh"
#include "worker/work_ring.cuh"

namespace etc {

template <class Program>
class TensorLane {
  using Calls = typename Program::TensorCalls;
  using Computes = ComputesOf<Calls>;
  using Ring = StageRing<Program>;

 public:
  static constexpr bool kHasRoles = Calls::kRoles != 0;
  static constexpr bool kHasStoreWarp = (Calls::kRoles & kStoreRole) != 0;
  // Whether the transfer lane's warps have roles in this lane.
  static constexpr bool kIsAssisted = (Calls::kRoles & kGatherRole) != 0;

 private:
  static constexpr int kComputeThreads = 256;
  static constexpr bool kByTicket = kDrawsTickets<Program>;
  // Warps that read the work items: those that compute, store and assist.
  static constexpr u32 kConsumers =
      kComputeThreads / 32 + u32(kHasStoreWarp) + 2 * u32(kIsAssisted);
  // Whether work items carry words for the compute threads.
  static constexpr bool kHasData = data_words(Calls{}) > 0;
  // Whether the compute threads store, and notify for, the result of a function with roles.
  static constexpr bool kStoresInCompute = Calls::any([](auto call) {
    using Call = decltype(call);
    return has_role<Call>(kComputeRole) && !has_role<Call>(kStoreRole);
  });

  // Whether compute() gets ready(), which waits for the last event of a task.
  template <class Compute>
  static constexpr bool kWaitsInside = requires { Compute::kWaits; };

 public:
  // NOTE: by warp_max(), so that the compiler does not compute the address again where a body uses
  // scratch memory in a branch that divides a warp: see ptx::warp(). In programs with loops or roles
  // it would only occupy a register.
  ETC_DEVICE TensorLane(Run<Program>& run, u8* shared)
      : run_(run),
        base_(Calls::kHasLoops || kHasRoles ? ptx::shared_address(shared)
                                            : ptx::warp_max(ptx::shared_address(shared))),
        units_(base_),
        scratch_(reinterpret_cast<u32*>(shared + kBufferOffset<Program>)) {}

  // The producer thread, before any role begins: the mbarriers that no other warp initializes.
  ETC_DEVICE void init_producer() const {
    Admission(base_).init();
    if constexpr (kLoadsEarly<Program>) {
      ptx::mbarrier_init_fence();
    } else {
      init<1>(0);
    }
  }
  // One thread of each of kWarps other warps: a share of all other mbarriers.
  // NOTE: instructions that run for the first time are slow to fetch. One thread took 0.6 us for all
  // mbarriers, before the first loads.
  template <u32 kWarps>
  ETC_DEVICE void init(u32 warp) const {
    units_.init<kWarps>(warp, kConsumers);
    if (kByTicket && warp == kWarps - 1) {
      units_.init_begun(kComputeThreads / 32);
    }
    if constexpr (kHasRoles) {
      Ring::template init<kWarps>(base_, warp);
      if (kWarps == 1 || warp == kWarps - 2) {
        Computes::template each<Program>(base_, [](auto compute) { return compute.init(), true; });
      }
    }
    ptx::mbarrier_init_fence();
    // Only bulk copies need it.
    if constexpr (kHasRoles) ptx::fence_proxy_async_shared();
  }

  // One thread, once all mbarriers are initialized.
  ETC_DEVICE void publish_initialized() const { Admission(base_).publish_initialized(); }
  ETC_DEVICE void store_start() const { Admission(base_).store_start(); }
  // One thread, after the other warps agree: whether tasks are to run.
  ETC_DEVICE void admit(bool is_running, u32 epoch) const {
    Admission(base_).publish(is_running, epoch);
  }
  // Reads the epoch of admit() into the run.
  // NOTE: a register that keeps it while tiles are computed makes some programs spill.
  ETC_DEVICE void read_epoch() const {
    const Admission admission(base_);
    admission.wait();
    run_.epoch = admission.epoch();
  }

  // Another thread, as early as possible: fetches the tensor maps of the first call. Not where
  // its regions are loaded: no event orders these loads here.
  ETC_DEVICE void prefetch_maps() const {
    Calls::first([&](auto call) {
      using Call = decltype(call);
      if constexpr (has_role<Call>(kLoadRole) && !Call::kLoads) {
        FunctionOf<Call>::prefetch_maps(run_);
      }
    });
  }

  // The producer thread. True if it ran to its end, false after an abort or in a skipped run.
  ETC_DEVICE bool lead() const { return lead_units(run_, base_); }

  // One warp: the store role.
  ETC_DEVICE bool store() const {
    u32 consumed = 0, entered = 0;
    typename Computes::Counters counters;
    bool is_going = true;
    for (WorkItem item; (item = units_.consume(consumed)).task >= 0;) {
      visit_task(item, [&](auto call, i32 task) ETC_INLINE {
        using Call = decltype(call);
        if constexpr (has_role<Call>(kStoreRole)) {
          using Compute = ComputeOf<Call>;
          Waiter who{kTensorLane, Call::kCall, u32(task)};
          is_going = is_going && FunctionOf<Call>::store(
              run_, compute_object<Compute>(), Call::at(run_.g, task), item.size,
              counters.template of<Compute>(), entered, who);
        }
      });
    }
    if (!is_going) report(run_, kInWorker);
    return is_going;
  }

  // A warp runs the transfer lane. `is_assistant`: until the tensor lane ends, the warp also has the
  // gather role there.
  // NOTE: the same loop for both kinds of warps, so that the code of the lane's tasks exists once.
  ETC_DEVICE bool run_transfers(bool is_assistant, Tracer<Program>& trace) const {
    TransferLane<Program> transfer(run_, base_, trace);
    u32 consumed = 0;
    StageGatherer<Program> stages(base_);
    bool is_going = true;
    for (;;) {
      if (!kIsAssisted || !is_assistant || !__all_sync(~0u, units_.is_full(consumed))) {
        if (!transfer.step(!kIsAssisted || !is_assistant)) break;
        continue;
      }
      const WorkItem item = units_.consume(consumed);
      is_assistant = item.task >= 0;
      if (!is_assistant) {
        if (!is_going) report(run_, kInWorker);
        continue;
      }
      visit_task(item, [&](auto call, i32 task) ETC_INLINE {
        using Call = decltype(call);
        if constexpr (has_role<Call>(kGatherRole)) {
          is_going =
              is_going && FunctionOf<Call>::gather(run_, stages, Call::at(run_.g, task), item.size);
        } else if constexpr (Ring::kGatherers > 0 && has_role<Call>(kLoadRole)) {
          stages.skip(FunctionOf<Call>::stages(run_, item.size));
        }
      });
    }
    return is_going;
  }

  // The 256 compute threads: bodies, and the compute role.
  ETC_DEVICE bool compute(Tracer<Program>& trace) const {
    u32 consumed = 0, last = 0;
    StageReader<Program> stages(base_);
    typename Computes::Counters counters;
    bool is_going = true;  // alike on all threads of a warpgroup
    if constexpr (Program::kDynamic) release_empty<kComputeThreads>(run_);
    for (bool is_known = knows_first(run_);; is_known = false) {
      const u32 entry = consumed;
      WorkItem item = is_known   ? WorkItem{i32(blockIdx.x), 0, 0}
                      : kHasData ? units_.read(consumed)
                                 : units_.consume(consumed);
      if constexpr (kByTicket) units_.begin();
      if (item.task < 0) break;
      // NOTE: calls with the same Compute run one piece of code: so it is not in visit_task().
      u32 call_idx = 0, variant = 0;
      Waiter who{kTensorLane, 0, 0};
      const u64 begin = trace.now();
      visit_task(item, [&](auto call, i32 task) ETC_INLINE {
        using Call = decltype(call);
        who = Waiter{kTensorLane, Call::kCall, u32(task)};
        if constexpr (has_role<Call>(kComputeRole)) {
          call_idx = Computes::template index<ComputeOf<Call>>();
          variant = FunctionOf<Call>::kVariant;
        } else {
          is_going = run_body<Call>(task, who, is_going, consumed);
          item = WorkItem{-1, 0, 0};  // so that it occupies no registers while the body runs
        }
      });
      if constexpr (Computes::kCount > 0) {
        const u32 size = item.size;
        if constexpr (Computes::kCount > 1) {
          // Another function has used the buffer.
          if (size > 0 && call_idx != last) is_going = meet(is_going);
          if (size > 0) last = call_idx;
        }
        if (is_going && size > 0) {
          const auto run = [&](auto compute) ETC_INLINE {
            using Compute = decltype(compute);
            const Work work{size, variant, kHasData ? units_.data<Program>(entry) : 0};
            auto& role_counters = counters.template of<Compute>();
            constexpr u32 kVariants = variants<Compute>(Calls{});
            if constexpr (kWaitsInside<Compute>) {
              const auto ready = [&]() ETC_INLINE {
                return !Compute::kWaits || wait_last(consumed);
              };
              is_going =
                  compute.template compute<kVariants>(run_, stages, work, role_counters, ready);
            } else {
              is_going = compute.template compute<kVariants>(run_, stages, work, role_counters);
            }
          };
          Computes::template visit<Program>(base_, call_idx, run);
        }
      }
      if constexpr (kHasData) {
        item = units_.next(entry);  // again: it occupies no registers while a tile is computed
        units_.release(entry);
      }
      if (kStoresInCompute && item.task >= 0) {
        visit_task(item, [&](auto call, i32 task) ETC_INLINE {
          using Call = decltype(call);
          if constexpr (has_role<Call>(kComputeRole) && !has_role<Call>(kStoreRole)) {
            is_going = notify_stored<Call>(task, who, is_going);
          }
        });
      }
      trace.add(who.lane, who.call, who.task, begin, stages.take_empty());
    }
    if (!is_going) report(run_, kInWorker);
    return is_going;
  }

 private:
  template <class Compute>
  ETC_DEVICE Compute compute_object() const {
    return Computes::template make<Program, Compute>(base_);
  }

  // The compute threads meet. Whether all are going.
  // NOTE: first those of a warp, else the compiler does not know that they go on together.
  ETC_DEVICE static bool meet(bool is_going) {
    return !ptx::named_barrier_any<kComputeThreads>(1, !__all_sync(~0u, is_going));
  }

  template <class F>
  ETC_DEVICE void visit_task(const WorkItem& item, F f) const {
    const i32 call = __shfl_sync(~0u, i32(item.call), 0);
    Calls::template select<0, Calls::kCount>(call, [&](auto call) ETC_INLINE { f(call, item.task); });
  }

  // The compute threads meet, once the ranks that a task writes to have begun.
  template <class Call>
  ETC_DEVICE bool meet_peers(
      const typename Call::Coord& coord, const Waiter& who, bool is_going) const {
    if constexpr (Call::kPeers > 0) {
      u32 entered = 0;
      if (threadIdx.x == 0) {
        is_going = wait_peers<Program, Call>(run_, coord, who, entered) && is_going;
      }
    }
    return meet(is_going);
  }
  // `consumed` counts the work items of this warp. A task that reads before its last wait consumes
  // a second one once the wait is met.
  template <class Call>
  ETC_DEVICE bool run_body(i32 task, Waiter who, bool is_going, u32& consumed) const {
    const auto coord = Call::at(run_.g, task);
    if (!meet_peers<Call>(coord, who, is_going)) return false;
    using Body = Task<Program, Call, kComputeThreads>;
    const Body body(run_.g, coord, i32(ptx::thread()), scratch_);
    if constexpr (Call::kReadsBeforeWait) {
      // Waits once, however often the body calls it.
      bool has_waited = kIsQueued<Call>, is_met = true;
      const auto wait = [&]() ETC_INLINE {
        if (!has_waited) is_met = wait_last(consumed);
        has_waited = true;
        return is_met;
      };
      Call::template Function<Body>::run(body, wait);
      if (!wait()) return false;
    } else if constexpr (Call::kHasFlags) {
      const bool is_met = Call::template Function<Body>::run(body, Flags<Program>(run_));
      if (!meet(is_met)) {
        if constexpr (Call::kFlagWaits > 0) {
          const EventRef event = Call::flag_wait(run_.g, coord, 0);
          who.fail(kEventWait, event.index, event.target);
          if (threadIdx.x == 0) report(run_, who);
        }
        return false;
      }
    } else if (!is_idle<Call>(run_.g, coord)) {
      Call::template Function<Body>::run(body);
    }
    ptx::named_barrier<kComputeThreads>(1);
    if (ptx::warp() == 0) notify_all<Program, Call>(run_, coord);
    return true;
  }

  // The compute threads, after they have stored a task's result.
  template <class Call>
  ETC_DEVICE bool notify_stored(i32 task, Waiter who, bool is_going) const {
    const auto coord = Call::at(run_.g, task);
    if (!meet_peers<Call>(coord, who, is_going)) return false;
    if (ptx::warp() == 0) notify_all<Program, Call>(run_, coord);
    return true;
  }

  // Waits for a task's last event. False if the program was aborted before: then the next work item
  // is the lane's end, and is not consumed here.
  ETC_DEVICE bool wait_last(u32& consumed) const {
    while (!units_.is_full(consumed)) {
    }
    if (units_.next(consumed).task < 0) return false;
    units_.consume(consumed);
    if constexpr (kByTicket) units_.begin();
    return true;
  }

  Run<Program>& run_;  // lead() and read_epoch() set its epoch
  u32 base_;  // shared address
  WorkRing units_;
  u32* scratch_;
};

}  // namespace etc
