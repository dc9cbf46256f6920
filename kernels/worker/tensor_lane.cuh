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
#include "worker/claimed_units.cuh"
#include "worker/computes.cuh"
#include "worker/stage_ring.cuh"
#include "worker/transfer_lane.cuh"
#include "worker/work_ring.cuh"

namespace etc {

template <class Program>
class TensorLane {
  using Calls = typename Program::TensorCalls;
  using Computes = ComputesOf<Calls>;
  using Ring = StageRing<Program>;
  using Units = ClaimedUnits<Program>;
  using Next = typename Units::Next;

 public:
  static constexpr bool kHasRoles = Calls::kRoles != 0;
  static constexpr bool kHasStoreWarp = (Calls::kRoles & kStoreRole) != 0;
  // Whether the transfer lane's warps have roles in this lane.
  static constexpr bool kIsAssisted = (Calls::kRoles & kGatherRole) != 0;

 private:
  static constexpr int kComputeThreads = 256;
  static constexpr bool kByTicket = kDrawsTickets<Program>;
  // Whether the compute threads may know a worker's first unit without a work item.
  static constexpr bool kKnowsFirst = !kHasRoles && !kByTicket;
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

  // Whether the producer thread passes from one unit of a call to its own next one.
  template <class Call>
  static constexpr bool kRepeats = has_role<Call>(kLoadRole) && !kByTicket;
  // Whether the producer thread may get units of tasks that do not exist: none is queued.
  template <class Call>
  static constexpr bool kMayBeSurplus = Call::kLimit > 0 && !kIsQueued<Call>;
  // Whether a function prepares its loads, and whether it does so before the last wait.
  template <class Call>
  static constexpr bool kPrepares = has_role<Call>(kPrepareRole);
  template <class Call>
  static constexpr bool kReadsEarly = Call::kReadsBeforeWait && !kIsQueued<Call>;
  // Whether compute() gets ready(), which waits for the last event of a task.
  template <class Compute>
  static constexpr bool kWaitsInside = requires { Compute::kWaits; };
  // Whether all that such a task loads is known with the count.
  template <class Call>
  static constexpr bool kLoadsWithCount =
      kMayBeSurplus<Call> && Call::kWaits == int(!Call::kCountIsGiven);

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
  ETC_DEVICE void admit(bool runs, u32 epoch) const { Admission(base_).publish(runs, epoch); }
  // Reads the epoch of admit() into the run.
  // NOTE: a register that keeps it while tiles are computed makes some programs spill.
  ETC_DEVICE void read_epoch() const {
    const Admission admission(base_);
    admission.wait();
    run_.epoch = admission.epoch();
  }

  // Another thread, as early as possible: fetches the tensor maps of the first call.
  ETC_DEVICE void prefetch_maps() const {
    Calls::first([&](auto call) {
      using Call = decltype(call);
      if constexpr (has_role<Call>(kLoadRole)) FunctionOf<Call>::prefetch_maps(run_);
    });
  }

  // The producer thread. True if it ran to its end, false after an abort or in a skipped run.
  ETC_DEVICE bool lead() const {
    u32 published = 0, entered = 0;
    StageLoader<Program> stages(base_);
    WaitCache seen;
    CountCache<Program::kLimits> counts;
    begin_first(stages);
    const Admission admission(base_);
    // NOTE: other programs wait before their first task, to save registers; so does this form of
    // the code.
    constexpr bool kWaitsFirst = kByTicket || kLoadsEarly<Program>;
    bool is_admitted = kWaitsFirst && admission.wait(), lost = kWaitsFirst && !is_admitted;
    if (lost) return false;
    if constexpr (kLoadsEarly<Program>) run_.epoch = admission.epoch();
    const auto lead_call = [&](i32& unit, Next& next) ETC_INLINE {
      bool going = true;
      Waiter who{kTensorLane, 0, 0};
      Calls::visit(run_.g, unit, [&](auto call, i32 u) ETC_INLINE {
        using Call = decltype(call);
        i32 left = 0;  // units of the call from this one on
        const auto lead_unit = [&]() ETC_INLINE {
          const i32 t = u;
          if (!is_admitted) {
            going = is_admitted = admission.wait();
            if (!going) return;
          }
          const auto c = Call::at(run_.g, t);
          who = Waiter{kTensorLane, Call::kCall, u32(t)};
          bool fits = true;
          if constexpr (kMayBeSurplus<Call>) {
            if constexpr (!Call::kCountIsGiven) {
              going = wait_event_once<Program, Call>(run_, c, 0, who, seen);
              if (!going) return;
            }
            const i32 count = counts.template of<Call>(run_.g, c);
            // NOTE: before the count is used, so that its load and the others overlap.
            if constexpr (kLoadsWithCount<Call>) fits = Call::in_range(run_.g, c);
            if (Call::is_surplus(c, count)) {
              const i32 others = skip_block<Call>(t, next);
              if constexpr (kRepeats<Call>) u += others, unit += others, left -= others;
              return;
            }
          }
          if constexpr (kPrepares<Call>) {
            going = load_prepared<Call>(c, t, published, stages, next, who, seen);
          } else if constexpr (kIsQueued<Call>) {
            going = is_in_range<Program, Call>(run_, c, who);
          } else if constexpr (kLoadsWithCount<Call>) {
            going = fits || who.fail(kOutOfRange, 0, 0);
          } else if constexpr (Call::kReadsBeforeWait) {
            going = wait_first<Call>(c, who, seen);
            if (!going) return;
            units_.publish(published, item_of<Call>(t));
            if constexpr (Call::kLoads) {  // the count of the last wait
              going = Call::waits_in_range(run_.g, c) || who.fail(kOutOfRange, 0, 0);
              if (!going) return;
            }
            going = wait_some<Program, Call>(run_, c, Call::kWaits - 1, Call::kWaits, who);
            if constexpr (kByTicket) units_.wait_begun(published);
          } else {
            if constexpr (Call::kLoadsAhead) {
              going = load_ahead<Call>(c, stages, who, seen);
              if (!going) return;
            }
            going = wait_events<Program, Call>(run_, c, who, seen);
          }
          if (kPrepares<Call> || !going) return;
          if constexpr (has_role<Call>(kLoadRole) && !kPrepares<Call>) {
            if constexpr (FunctionOf<Call>::kWritesPeers) {
              const auto started = [&]() ETC_INLINE {
                return wait_starts<Program, Call>(run_, c, who, entered);
              };
              going = load<Call>(c, t, published, stages, next, seen, started);
            } else {
              going = load<Call>(c, t, published, stages, next, seen);
            }
          } else if constexpr (!kPrepares<Call>) {
            units_.publish(published, item_of<Call>(t));
          }
        };
        if constexpr (kRepeats<Call>) {
          // NOTE: units of a call follow each other without a search for their call.
          const i32 workers = i32(gridDim.x);
          left = Calls::template left<Call>(run_.g, u);
#pragma unroll 1
          for (;; u += workers, unit += workers) {
            lead_unit();
            left -= workers;
            if (!going || left <= 0) break;
          }
        } else {
          lead_unit();
        }
      });
      // Before that only a run that was aborted fails, or the compute threads report it.
      if (!going && is_admitted) report(run_, who);
      lost = !going;
      return going;
    };
    const bool ended = Units(run_, base_).each(knows_first(), published, lead_call);
    units_.publish(published, {-1, 0, 0});
    if constexpr (kHasRoles) {
      lost = lost || !(is_admitted || admission.wait());
    }
    return ended && !lost;
  }

  // One warp: the store role.
  ETC_DEVICE bool store() const {
    u32 consumed = 0, entered = 0;
    typename Computes::Counters counters;
    bool going = true;
    for (WorkItem a; (a = units_.consume(consumed)).task >= 0;) {
      visit_task(a, [&](auto call, i32 t) ETC_INLINE {
        using Call = decltype(call);
        if constexpr (has_role<Call>(kStoreRole)) {
          using Compute = ComputeOf<Call>;
          Waiter who{kTensorLane, Call::kCall, u32(t)};
          going = going && FunctionOf<Call>::store(
              run_, compute_object<Compute>(), Call::at(run_.g, t), a.size,
              counters.template of<Compute>(), entered, who);
        }
      });
    }
    if (!going) report(run_, kInWorker);
    return going;
  }

  // A warp runs the transfer lane. `assists`: until the tensor lane ends, the warp also has the
  // gather role there.
  // NOTE: the same loop for both kinds of warps, so that the code of the lane's tasks exists once.
  ETC_DEVICE bool run_transfers(bool assists, Tracer<Program>& trace) const {
    TransferLane<Program> transfer(run_, base_, trace);
    u32 consumed = 0;
    StageGatherer<Program> stages(base_);
    bool going = true;
    for (;;) {
      if (!kIsAssisted || !assists || !__all_sync(~0u, units_.is_full(consumed))) {
        if (!transfer.step(!kIsAssisted || !assists)) break;
        continue;
      }
      const WorkItem a = units_.consume(consumed);
      assists = a.task >= 0;
      if (!assists) {
        if (!going) report(run_, kInWorker);
        continue;
      }
      visit_task(a, [&](auto call, i32 t) ETC_INLINE {
        using Call = decltype(call);
        if constexpr (has_role<Call>(kGatherRole)) {
          going = going &&
                  FunctionOf<Call>::gather(run_, stages, Call::at(run_.g, t), a.size);
        } else if constexpr (Ring::kGatherers > 0 && has_role<Call>(kLoadRole)) {
          stages.skip(FunctionOf<Call>::stages(run_, a.size));
        }
      });
    }
    return going;
  }

  // The 256 compute threads: bodies, and the compute role.
  ETC_DEVICE bool compute(Tracer<Program>& trace) const {
    u32 consumed = 0, last = 0;
    StageReader<Program> stages(base_);
    typename Computes::Counters counters;
    bool going = true;  // alike on all threads of a warpgroup
    if constexpr (Program::kDynamic) release_empty<kComputeThreads>(run_);
    for (bool known = knows_first();; known = false) {
      const u32 entry = consumed;
      WorkItem a = known      ? WorkItem{i32(blockIdx.x), 0, 0}
                   : kHasData ? units_.read(consumed)
                              : units_.consume(consumed);
      if constexpr (kByTicket) units_.begin();
      if (a.task < 0) break;
      // NOTE: calls with the same Compute run one piece of code: so it is not in visit_task().
      u32 index = 0, variant = 0;
      Waiter who{kTensorLane, 0, 0};
      const u64 begin = trace.now();
      visit_task(a, [&](auto call, i32 t) ETC_INLINE {
        using Call = decltype(call);
        who = Waiter{kTensorLane, Call::kCall, u32(t)};
        if constexpr (has_role<Call>(kComputeRole)) {
          index = Computes::template index<ComputeOf<Call>>();
          variant = FunctionOf<Call>::kVariant;
        } else {
          going = run_body<Call>(t, who, going, consumed);
          a = WorkItem{-1, 0, 0};  // so that it occupies no registers while the body runs
        }
      });
      if constexpr (Computes::kCount > 0) {
        const u32 size = a.size;
        if constexpr (Computes::kCount > 1) {
          // Another function has used the buffer.
          if (size > 0 && index != last) going = meet(going);
          if (size > 0) last = index;
        }
        if (going && size > 0) {
          const auto run = [&](auto compute) ETC_INLINE {
            using Compute = decltype(compute);
            const Work work{size, variant, kHasData ? units_.data<Program>(entry) : 0};
            auto& own = counters.template of<Compute>();
            constexpr u32 kVariants = variants<Compute>(Calls{});
            if constexpr (kWaitsInside<Compute>) {
              const auto ready = [&]() ETC_INLINE { return !Compute::kWaits || wait_last(consumed); };
              going = compute.template compute<kVariants>(run_, stages, work, own, ready);
            } else {
              going = compute.template compute<kVariants>(run_, stages, work, own);
            }
          };
          Computes::template visit<Program>(base_, index, run);
        }
      }
      if constexpr (kHasData) {
        a = units_.next(entry);  // again: it occupies no registers while a tile is computed
        units_.release(entry);
      }
      if (kStoresInCompute && a.task >= 0) {
        visit_task(a, [&](auto call, i32 t) ETC_INLINE {
          using Call = decltype(call);
          if constexpr (has_role<Call>(kComputeRole) && !has_role<Call>(kStoreRole)) {
            going = notify_stored<Call>(t, who, going);
          }
        });
      }
      trace.add(who.lane, who.call, who.task, begin, stages.take_empty());
    }
    if (!going) report(run_, kInWorker);
    return going;
  }

 private:
  template <class Compute>
  ETC_DEVICE Compute compute_object() const {
    return Computes::template make<Program, Compute>(base_);
  }

  // Whether this worker's first unit is a task of the first call, which waits for nothing: it is
  // not published, which saves 0.2 us when a run begins.
  ETC_DEVICE bool knows_first() const {
    bool ready = false;
    if constexpr (kKnowsFirst) {
      Calls::first([&](auto call) {
        using Call = decltype(call);
        ready = Call::kWaits == 0 && !Call::kLoads && !Call::kReadsBeforeWait &&
                i32(blockIdx.x) < Call::units(run_.g);
        if constexpr (Calls::kHasLoops) {  // its loop may have no turns
          bool is_first = false;
          Calls::visit(run_.g, i32(blockIdx.x), [&](auto found, i32) ETC_INLINE {
            is_first = kIsSame<decltype(found), Call>;
          });
          ready = ready && is_first;
        }
      });
    }
    return ready;
  }

  // The producer thread, at the start: waits until all mbarriers are initialized, and begins the
  // first stages of a task that waits for nothing.
  ETC_DEVICE void begin_first(StageLoader<Program>& stages) const {
    if constexpr (kLoadsEarly<Program>) {
      const auto ready = [&]() ETC_INLINE { Admission(base_).wait_initialized(); };
      const i32 first = i32(blockIdx.x);
      bool is_found = false;
      const auto load_first = [&](auto call, i32 unit) ETC_INLINE {
        using Call = decltype(call);
        if constexpr (kLoadsAtOnce<Call>) {
          is_found = true;
          if (unit >= Call::units(run_.g)) return ready();
          FunctionOf<Call>::load_first(run_, stages, Call::at(run_.g, unit), ready);
        }
      };
      if constexpr (num_loading_at_once(Calls{}) == 1) {
        Calls::first([&](auto call) ETC_INLINE { load_first(call, first); });
      } else {
        Calls::visit(run_.g, first, load_first);
        if (!is_found) ready();
      }
    }
  }

  // The waits of a task before it begins, and whether what it loads is in range.
  template <class Call>
  ETC_DEVICE bool wait_first(
      const typename Call::Coord& c, Waiter& who, WaitCache& seen) const {
    if constexpr (kIsQueued<Call>) {
      return is_in_range<Program, Call>(run_, c, who);
    } else if constexpr (!kReadsEarly<Call>) {
      return wait_events<Program, Call>(run_, c, who, seen);
    } else {
#pragma unroll
      for (int n = 0; n + 1 < Call::kWaits; ++n) {
        if (!wait_event_once<Program, Call>(run_, c, n, who, seen)) return false;
      }
      if constexpr (Call::kLoads) {
        if (!Call::in_range(run_.g, c)) return who.fail(kOutOfRange, 0, 0);
      }
      return true;
    }
  }
  // The last event of a task that begins before it. Once it is met, a second work item is published.
  template <class Call>
  struct LastEvent {
    const TensorLane& lane;
    const typename Call::Coord& c;
    i32 task;
    u32& published;
    Waiter& who;
    WaitCache& seen;
    bool is_known = !kReadsEarly<Call>;
    static constexpr int kLast = Call::kWaits - 1;

    ETC_DEVICE bool is_met() {
      if (!is_known && seen.look(lane.run_, kLast, Call::wait(lane.run_.g, c, kLast))) publish();
      return is_known;
    }
    // False if the program was aborted.
    ETC_DEVICE bool wait() {
      if (is_known) return true;
      if (!wait_event_once<Program, Call>(lane.run_, c, kLast, who, seen)) return false;
      publish();
      return true;
    }

   private:
    ETC_DEVICE void publish() {
      is_known = true;
      if constexpr (kByTicket) lane.units_.wait_begun(published);
      lane.units_.publish(published, lane.item_of<Call>(task));
      lane.fence_loads<Call>(seen);
    }
  };

  // The load role of a task of a function that prepares.
  template <class Call>
  ETC_DEVICE bool load_prepared(
      const typename Call::Coord& c, i32 task, u32& published, StageLoader<Program>& stages,
      Next& next, Waiter& who, WaitCache& seen) const {
    if (!wait_first<Call>(c, who, seen)) return false;
    const auto prepared = FunctionOf<Call>::prepare(run_, c);
    LastEvent<Call> event{*this, c, task, published, who, seen};
    return load<Call>(prepared, task, published, stages, next, seen, event);
  }
  // Orders other threads' writes before the bulk copies of a task.
  template <class Call>
  ETC_DEVICE void fence_loads(WaitCache& seen) const {
    if (Call::kWaits > 0 && (kIsQueued<Call> || seen.is_unfenced)) {
      ptx::fence_proxy_async_global();
      seen.is_unfenced = false;
    }
  }
  // The load role of a task whose waits are met, but for that of `event`, if there is one:
  // publishes it and loads its stages. c: its coordinate, or what prepare() returned. For a function
  // that writes to peers, `event` is the wait for their start.
  template <class Call, class Prepared, class... Event>
  ETC_DEVICE bool load(
      const Prepared& c, i32 task, u32& published, StageLoader<Program>& stages, Next& next,
      WaitCache& seen, Event&... event) const {
    using Function = FunctionOf<Call>;
    fence_loads<Call>(seen);
    const u32 size = Function::size(run_, c);
    const auto publish = [&]() ETC_INLINE {
      if constexpr (Function::kDataWords > 0) {
        u32 words[Function::kDataWords];
        Function::data(run_, c, size, words);
        units_.write_data<Program>(published, words);
      }
      units_.publish(published, item_of<Call>(task, size));
    };
    return Function::load(run_, stages, c, size, publish, event..., [&](u32 n) ETC_INLINE {
      if constexpr (kByTicket) {
        const u32 count = Function::stages(run_, size).count;
        Units(run_, base_).draw_early(n, count, stages.outstanding(), next);
      }
    });
  }

  // While the events of a task are not met, but for the first kWaitsAhead ones, begins its stages
  // with the streamed operands, which no task writes. False if the program was aborted.
  template <class Call>
  ETC_DEVICE bool load_ahead(
      const typename Call::Coord& c, StageLoader<Program>& stages, Waiter& who,
      WaitCache& seen) const {
    using Function = FunctionOf<Call>;
    if constexpr (Call::kWaitsAhead > 0) {
#pragma unroll
      for (int n = 0; n < Call::kWaitsAhead; ++n) {
        if (!wait_event_once<Program, Call>(run_, c, n, who, seen)) return false;
      }
    }
    // NOTE: before what is loaded for the task, which would be loaded again after each poll.
    if (late_waits_are_met<Program, Call>(run_, c, seen)) return true;
    Function::prefetch_maps(run_);  // x is loaded right after the wait
    if constexpr (Call::kLoads) {
      if (!Call::in_range(run_.g, c)) return who.fail(kOutOfRange, 0, 0);
    }
    const u32 size = Function::size(run_, c);
    const RingStages all = Function::stages(run_, size);
    stages.start_ahead();
    // The last stage may wait for the start of peers: see kWritesPeers.
    const u32 most = all.count - u32(Function::kWritesPeers && all.count > 0);
    for (u32 n = 0; n < most && stages.has_room_ahead(all.bytes); ++n) {
      if (n > 0 && late_waits_are_met<Program, Call>(run_, c, seen)) return true;
      if (!Function::load_ahead(run_, stages, c, size, n)) return false;
      stages.add_ahead();
    }
    return true;
  }

  // The producer thread of a static program, at the surplus task t: skips those after it in its
  // block. By tickets, claims all of them; else returns how far the last one of this worker is.
  template <class Call>
  ETC_DEVICE i32 skip_block(i32 t, const Next& next) const {
    const i32 rest = Call::block_end(run_.g, t) - t - 1;
    if constexpr (kByTicket) {
      // NOTE: units that are assigned without a ticket have negative tickets.
      const i32 end = next.taken + 1 + rest;
      if (end > 0) draw_up_to(run_, kTensorLane, u32(end));
      return 0;
    }
    const i32 workers = i32(gridDim.x);
    return rest / workers * workers;
  }

  // The compute threads meet. Whether all are going.
  // NOTE: first those of a warp, else the compiler does not know that they go on together.
  ETC_DEVICE static bool meet(bool going) {
    return !ptx::named_barrier_any<kComputeThreads>(1, !__all_sync(~0u, going));
  }

  template <class Call>
  ETC_DEVICE static WorkItem item_of(i32 task, u32 size = 0) {
    return {task, size, u32(Calls::template index<Call>())};
  }
  template <class F>
  ETC_DEVICE void visit_task(const WorkItem& item, F f) const {
    const i32 call = __shfl_sync(~0u, i32(item.call), 0);
    Calls::template select<0, Calls::kCount>(call, [&](auto call) ETC_INLINE { f(call, item.task); });
  }

  // The compute threads meet, once the ranks that a task writes to have begun.
  template <class Call>
  ETC_DEVICE bool meet_peers(const typename Call::Coord& c, const Waiter& who, bool going) const {
    if constexpr (Call::kPeers > 0) {
      u32 entered = 0;
      if (threadIdx.x == 0) going = wait_peers<Program, Call>(run_, c, who, entered) && going;
    }
    return meet(going);
  }
  // `consumed` counts the work items of this warp. A task that reads before its last wait consumes
  // a second one once the wait is met.
  template <class Call>
  ETC_DEVICE bool run_body(i32 t, Waiter who, bool going, u32& consumed) const {
    const auto c = Call::at(run_.g, t);
    if (!meet_peers<Call>(c, who, going)) return false;
    using Body = Task<Program, Call, kComputeThreads>;
    const Body body(run_.g, c, i32(ptx::thread()), scratch_);
    if constexpr (Call::kReadsBeforeWait) {
      // Waits once, however often the body calls it.
      bool has_waited = kIsQueued<Call>, met = true;
      const auto wait = [&]() ETC_INLINE {
        if (!has_waited) met = wait_last(consumed);
        has_waited = true;
        return met;
      };
      Call::template Function<Body>::run(body, wait);
      if (!wait()) return false;
    } else if constexpr (Call::kHasFlags) {
      const bool met = Call::template Function<Body>::run(body, Flags<Program>(run_));
      if (!meet(met)) {
        if constexpr (Call::kFlagWaits > 0) {
          const EventRef event = Call::flag_wait(run_.g, c, 0);
          who.fail(kEventWait, event.index, event.target);
          if (threadIdx.x == 0) report(run_, who);
        }
        return false;
      }
    } else if (!is_idle<Call>(run_.g, c)) {
      Call::template Function<Body>::run(body);
    }
    ptx::named_barrier<kComputeThreads>(1);
    if (ptx::warp() == 0) notify_all<Program, Call>(run_, c);
    return true;
  }

  // The compute threads, after they have stored a task's result.
  template <class Call>
  ETC_DEVICE bool notify_stored(i32 t, Waiter who, bool going) const {
    const auto c = Call::at(run_.g, t);
    if (!meet_peers<Call>(c, who, going)) return false;
    if (ptx::warp() == 0) notify_all<Program, Call>(run_, c);
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
