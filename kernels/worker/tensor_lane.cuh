// The tensor lane: clusters of workers take units u = cluster, cluster + clusters, ..., or
// the next one that nobody has taken, or in a dynamic program whatever is ready.
// In each worker one thread leads: it takes the units, waits for their events and tells
// the other roles, which go through the same units: two warpgroups compute, one warp
// stores, or tells where to, and the transfer lane's two warps forward what other ranks own,
// or gather the rows that a product picks. The leading thread loads as well, as far ahead as
// the engine's stages allow. A first unit that everybody knows, and that needs nothing, is begun
// untold.
#pragma once
#include "ptx/bulk_copy.cuh"
#include "queue/pop.cuh"
#include "worker/calls.cuh"
#include "worker/empty_run.cuh"
#include "worker/ticket_channel.cuh"
#include "worker/transfer_lane.cuh"
#include "worker/work_ring.cuh"

namespace etc {

template <class Program>
class TensorLane {
 public:
  // Whether the transfer lane's warps assist.
  static constexpr bool kIsAssisted = Program::kSends || Program::kGathers;

 private:
  using Calls = typename Program::TensorCalls;
  using Engine = typename Program::Engine;
  static constexpr int kComputeThreads = 256;
  static constexpr bool kByTicket = Program::kDynamic || Program::kTensorTickets;
  // Whether who computes may know a worker's first unit without hearing of it.
  static constexpr bool kKnowsFirst =
      !Program::kHasMatmul && !kByTicket && Program::kTensorCluster == 1;
  // Warps that listen: those that compute, store and assist.
  static constexpr u32 kConsumers =
      kComputeThreads / 32 + u32(Program::kHasMatmul) + 2 * u32(kIsAssisted);

 public:
  ETC_DEVICE TensorLane(const Run<Program>& run, u8* shared)
      : run_(run),
        engine_{ptx::shared_address(shared)},
        units_(ptx::shared_address(shared)),
        scratch_(reinterpret_cast<u32*>(shared + Engine::kScratchOffset)) {}

  // One thread, before any role begins.
  ETC_DEVICE void init() const {
    units_.init(kConsumers);
    if constexpr (kByTicket) {
      units_.init_begun(kComputeThreads / 32);
      TicketChannel(engine_.base).init();
    }
    if constexpr (Program::kHasMatmul) engine_.init();
    ptx::mbarrier_init_fence();
    // NOTE: the fence takes 0.3 us, and only bulk copies and clusters' messages need it.
    if constexpr (Program::kHasMatmul || Program::kCluster > 1) ptx::fence_proxy_async();
  }

  // One thread.
  ETC_DEVICE void lead() const {
    u32 ring = 0, published = 0;
    WaitCache seen;
    each_unit(published, [&](i32 unit, Next& next) {
      bool going = true;
      Waiter who{kTensorLane, 0, 0};
      Calls::visit(run_.g, unit, [&](auto call, i32 u) {
        using Call = decltype(call);
        const i32 t = task_of<Call>(u);
        if (t < 0) return;
        const auto c = Call::at(run_.g, t);
        who = Waiter{kTensorLane, Call::kCall, u32(t)};
        u32 ahead = 0;  // stages whose weight is under way
        if constexpr (Program::kDynamic) {
          going = is_in_range<Program, Call>(run_, c, who);
        } else if constexpr (Call::kReadsBeforeWait) {
          going = wait_some<Program, Call>(run_, c, 0, Call::kWaits - 1, who);
          if (!going) return;
          units_.publish(published, {unit, 0});
          going = wait_some<Program, Call>(run_, c, Call::kWaits - 1, Call::kWaits, who);
          if constexpr (kByTicket) units_.wait_begun(published);
        } else {
          if constexpr (Call::kWeightAhead) {
            going = load_ahead<Call>(c, ring, ahead, who);
            if (!going) return;
          }
          going = wait_events<false, Program, Call>(run_, c, who, seen);
        }
        if (!going) return;
        if constexpr (Call::kIsMatmul) {
          if (Call::kWaits > 0 && (Program::kDynamic || seen.is_unfenced)) {
            ptx::fence_proxy_async_global();  // what others did, before bulk copies of this task
            seen.is_unfenced = false;
          }
          const u32 size = Engine::template size<Call>(run_, c);
          u32 run = 0;
          if constexpr (Call::kHasRuns) {
            if (size == 0 && is_first()) run = take_run<Program, Call>(run_, next.taken, t);
          }
          units_.publish(published, {unit, size | run, u32(next.taken)});
          const auto loaded = [&](u32 n, u32 stages) { draw_early(n, stages, next); };
          if constexpr (Call::kWeightAhead) {
            going = engine_.template load<Call>(run_, c, size, ring, loaded, ahead);
          } else {
            going = engine_.template load<Call>(run_, c, size, ring, loaded);
          }
        } else {
          units_.publish(published, {unit, 0});
        }
      });
      if (!going) report(run_, who);
      return going;
    });
    units_.publish(published, {-1, 0});
  }

  // One warp.
  ETC_DEVICE void store() const {
    u32 consumed = 0, round = 0, images = 0, entered = 0;
    bool going = true;
    for (WorkItem a; (a = units_.template consume<Program::kDynamic>(consumed)).unit >= 0;) {
      visit_task(a.unit, [&](auto call, i32 t) {
        using Call = decltype(call);
        if constexpr (Call::kIsMatmul) {
          Waiter who{kTensorLane, Call::kCall, u32(t)};
          going = going && Call::template Function<Call>::template store<Call>(
              engine_, run_, Call::at(run_.g, t), size_of(a), round, images, entered, who);
          if constexpr (Call::kHasRuns) {
            if (going && a.run() > 0) {
              going = complete_run<Program, Call>(run_, t, a, entered, who);
              if (!going) report(run_, who);
            }
          }
        }
      });
    }
    if (threadIdx.x % 32 == 0) ptx::wait_stores<0>();
    if (!going) report(run_, kInWorker);
  }

  // A warp of the transfer lane, before it turns to that lane alone: forwards what other
  // ranks own, or gathers what products pick.
  ETC_DEVICE void assist(
      u32 half, TransferLane<Program>& transfer, Tracer<Program>& trace) const {
    u32 consumed = 0, images = 0, entered = 0, ring = 0;
    bool going = true;
    for (;;) {
      while (!__all_sync(~0u, units_.is_full(consumed))) transfer.try_one();
      const WorkItem a = units_.consume(consumed);
      if (a.unit < 0) break;
      visit_task(a.unit, [&](auto call, i32 t) {
        using Call = decltype(call);
        if constexpr (Call::kSends) {
          const Waiter who{kTensorLane, Call::kCall, u32(t)};
          going = going && Call::template Function<Call>::template send<Call>(
              engine_, run_, Call::at(run_.g, t), half, images, entered, who, trace,
              [&] { transfer.try_one(); });
        } else if constexpr (Call::kGathers) {
          going = going && engine_.template gather<Call>(
              run_, Call::at(run_.g, t), size_of(a), ring);
        } else if constexpr (Program::kGathers && Call::kIsMatmul) {
          ring += Engine::num_stages(size_of(a));
        }
      });
    }
    if (!going) report(run_, kInWorker);
  }

  // The 256 compute threads.
  ETC_DEVICE void compute(Tracer<Program>& trace) const {
    u32 consumed = 0, ring = 0, round = 0;
    bool going = true;  // alike on all threads of a warpgroup
    if constexpr (Program::kDynamic) release_empty<kComputeThreads>(run_);
    for (bool known = knows_first();; known = false) {
      const WorkItem a = known ? WorkItem{i32(blockIdx.x), 0} : units_.consume(consumed);
      if constexpr (kByTicket) units_.begin();
      if (a.unit < 0) break;
      // NOTE: the product is one piece of code, not one a call.
      bool gated = false;
      Waiter who{kTensorLane, 0, 0};
      const u64 begin = trace.now();
      visit_task(a.unit, [&](auto call, i32 t) {
        using Call = decltype(call);
        who = Waiter{kTensorLane, Call::kCall, u32(t)};
        if constexpr (Call::kIsMatmul) {
          gated = Call::kGated;
        } else {
          if constexpr (Program::kHasMatmul) {
            // The body may use the output buffer: let the last tile leave it.
            going = going && engine_.wait_emptied(run_, round);
          }
          going = run_body<Call>(t, who, going, consumed);
        }
      });
      if constexpr (Program::kHasMatmul) {
        const u32 size = size_of(a);
        if (going && size > 0) {
          going = engine_.template consume<Program::kIsHalf, Program::kWeightIsKN>(
              run_, size, gated, ring, round);
        }
      }
      trace.add(who.lane, who.call, who.task, begin);
    }
    if (!going) report(run_, kInWorker);
  }

 private:
  // What the engine has to know of a unit, without the run that it may come with.
  ETC_DEVICE static u32 size_of(WorkItem a) {
    return Program::kHasRuns && a.run() > 0 ? 0 : a.size;
  }

  // Whether this worker's first unit is a task of the first call, which waits for nothing: it is
  // not announced, which saves 0.2 us when a run begins.
  ETC_DEVICE bool knows_first() const {
    bool ready = false;
    if constexpr (kKnowsFirst) {
      Calls::first([&](auto call) {
        using Call = decltype(call);
        ready = Call::kWaits == 0 && !Call::kLoads && !Call::kReadsBeforeWait &&
                i32(blockIdx.x) < Call::units(run_.g);
      });
    }
    return ready;
  }

  // Where no task writes a product's weight, and nothing has to be loaded to know which it is,
  // the ring is filled with it while the events are not met. False if the program was aborted.
  template <class Call>
  ETC_DEVICE bool load_ahead(
      const typename Call::Coord& c, u32 ring, u32& ahead, Waiter& who) const {
    const u32 size = Engine::template size<Call>(run_, c);
    const u32 most = minimum(Engine::num_stages(size), Engine::kStages);
    for (; ahead < most && !waits_are_met<Program, Call>(run_, c, who); ++ahead) {
      if (!engine_.template load_weight<Call>(run_, c, size, ahead, ring + ahead)) {
        return false;
      }
    }
    return true;
  }

  // The task of a call's unit that this worker runs; -1 if there is none for it.
  template <class Call>
  ETC_DEVICE i32 task_of(i32 unit) const {
    if constexpr (Call::kCluster == Program::kTensorCluster) {
      return unit;
    } else if constexpr (Program::kDynamic) {
      constexpr i32 kShare = Program::kTensorCluster / Call::kCluster;
      const i32 size = Call::group_size(run_.g), units = Call::group_units(run_.g);
      const i32 group = unit / units;
      const i32 member = (unit - group * units) * kShare + i32(blockIdx.x) % kShare;
      return member < size ? group * size + member : -1;
    } else {
      const i32 t = unit * Program::kTensorCluster + i32(blockIdx.x) % Program::kTensorCluster;
      return t < Call::tasks(run_.g) ? t : -1;
    }
  }
  template <class F>
  ETC_DEVICE void visit_task(i32 unit, F f) const {
    Calls::visit(run_.g, unit, [&](auto call, i32 u) { f(call, task_of<decltype(call)>(u)); });
  }

  // The cluster's next ticket, its n-th, and the one that was taken last.
  struct Next {
    u32 n = 0, ticket = 0;
    i32 taken = 0;
    bool is_drawn = false, is_sent = false;
  };

  // `told` counts what f tells; f may draw the next ticket early.
  template <class F>
  ETC_DEVICE void each_unit(const u32& published, F f) const {
    const i32 clusters = i32(gridDim.x) / Program::kTensorCluster;
    i32 unit = i32(blockIdx.x) / Program::kTensorCluster;
    Next next;
    if constexpr (Program::kDynamic) {
      while (next_unit(next, published, unit) && f(unit, next)) {
      }
    } else if constexpr (Program::kTensorTickets) {
      const i32 total = Calls::units(run_.g);
      next.taken = unit - clusters;
      while (unit < total && f(unit, next) && draw(next, published)) {
        unit = clusters + next.taken;
      }
    } else {
      const i32 total = Calls::units(run_.g);
      if (knows_first()) unit += clusters;
      for (; unit < total && f(unit, next); unit += clusters) {
      }
    }
  }

  // The cluster's next ticket; false if the program was aborted. A leader draws one unit
  // ahead, not more: others may be idle.
  ETC_DEVICE bool draw(Next& next, u32 published) const {
    units_.wait_begun(published);
    ask(next);
    bool going = true;
    if constexpr (Program::kTensorCluster > 1) {
      const TicketChannel channel(engine_.base);
      if (!is_first()) {
        going = channel.receive(run_, next.n, next.ticket);
      } else if (!next.is_sent) {
        going = channel.send(run_, next.n, next.ticket);
      }
    }
    next = Next{next.n + 1, 0, i32(next.ticket)};
    return going;
  }
  // The same, as far as it takes no wait, once n of a unit's stages are being loaded: as late as
  // the ticket is there in time. NOTE: those who compute have begun a unit of which more stages
  // are being loaded than the ring has.
  ETC_DEVICE void draw_early(u32 n, u32 stages, Next& next) const {
    constexpr u32 kDrawStage = 6, kSendStage = 2;  // stages before the last one
    if constexpr (kByTicket) {
      if (n + kDrawStage == stages && n > Engine::kStages) ask(next);
      if (n + kSendStage == stages && next.is_drawn) {
        next.is_sent = TicketChannel(engine_.base).try_send(next.n, next.ticket);
      }
    }
  }
  // Of a cluster, the first worker draws and tells the second one.
  ETC_DEVICE static bool is_first() { return blockIdx.x % Program::kTensorCluster == 0; }
  ETC_DEVICE void ask(Next& next) const {
    if (!is_first() || next.is_drawn) return;
    next.is_drawn = true;
    if constexpr (Program::kDynamic) {
      next.ticket = WorkQueue<Program, typename Program::TensorQueue>::draw(run_);
    } else {
      next.ticket = draw_ticket(run_, kTensorLane);
    }
  }
  // The next unit of a dynamic program; false if there is none any more.
  ETC_DEVICE bool next_unit(Next& next, u32 published, i32& unit) const {
    using TensorUnits = WorkQueue<Program, typename Program::TensorQueue>;
    for (;;) {
      if (!draw(next, published)) return false;
      const bool came = spin<false>(run_, run_.g.wait_limit, [&] {
        return (unit = TensorUnits::unit_of(run_, u32(next.taken))) != kNotYet;
      });
      if (!came) TensorUnits::report(run_);
      if constexpr (Program::TensorQueue::kHasEmptyGroups) {
        if (came && unit == kRestIsEmpty) {
          if (is_first()) TensorUnits::skip_part(run_, u32(next.taken));
          continue;
        }
      }
      return came && unit != kLaneOver;
    }
  }

  // `heard` counts what this warp has heard; a task that reads early hears of its last wait.
  template <class Call>
  ETC_DEVICE bool run_body(i32 t, Waiter who, bool going, u32& consumed) const {
    const auto c = Call::at(run_.g, t);
    if constexpr (Call::kPeers > 0) {
      u32 entered = 0;
      if (threadIdx.x == 0) going = wait_peers<Program, Call>(run_, c, who, entered) && going;
    }
    if (ptx::named_barrier_any<kComputeThreads>(1, !going)) return false;
    using Body = Task<Program, Call, kComputeThreads>;
    const Body body(run_.g, c, i32(ptx::thread()), scratch_);
    if constexpr (Call::kReadsBeforeWait) {
      // Once, whether the body asks never or more often.
      bool asked = Program::kDynamic, met = true;
      const auto wait = [&] {
        if (!asked) met = wait_last(consumed);
        asked = true;
        return met;
      };
      Call::template Function<Body>::run(body, wait);
      if (!wait()) return false;
    } else if (!is_idle<Call>(run_.g, c)) {
      Call::template Function<Body>::run(body);
    }
    ptx::named_barrier<kComputeThreads>(1);
    if (threadIdx.x < 32) notify_all<Program, Call>(run_, c, 1);
    return true;
  }

  // Whether a task's last wait is met; false if the program was aborted before, in which case
  // this was the last announcement, and is left to be heard again.
  ETC_DEVICE bool wait_last(u32& consumed) const {
    while (!units_.is_full(consumed)) {
    }
    if (units_.next(consumed).unit < 0) return false;
    units_.consume(consumed);
    if constexpr (kByTicket) units_.begin();
    return true;
  }

  const Run<Program>& run_;
  Engine engine_;
  WorkRing units_;
  u32* scratch_;
};

}  // namespace etc
