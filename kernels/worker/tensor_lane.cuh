// The tensor lane: clusters of workers take units u = cluster, cluster + clusters, ...
// Its roles run in different warps of a worker and go through the same units:
// two warpgroups compute, one warp loads, one stores, and the transfer lane's two warps
// forward what other ranks own.
#pragma once
#include "tasks/matmul.cuh"
#include "worker/calls.cuh"
#include "worker/transfer_lane.cuh"

namespace etc {

// A device function of the matmul family says so; its work is split over the roles.
template <class Call>
struct IsMatmul {
  static constexpr bool value = requires { Call::template Function<Call>::kSends; };
};
template <class Call>
struct Sends {
  template <class F>
  static constexpr bool sends() {
    if constexpr (requires { F::kSends; }) return F::kSends;
    return false;
  }
  static constexpr bool value = sends<typename Call::template Function<Call>>();
};

template <class Program>
class TensorLane {
  using Calls = typename Program::TensorCalls;
  static constexpr int kComputeThreads = 256;

 public:
  ETC_DEVICE TensorLane(const Run<Program>& run, Matmul matmul) : run_(run), matmul_(matmul) {}

  // One thread.
  ETC_DEVICE void load() const {
    u32 ring = 0;
    each_task([&](auto call, i32 t) {
      using Call = decltype(call);
      if constexpr (IsMatmul<Call>::value) {
        const auto c = Call::at(run_.g, t);
        const Waiter who{kTensorLane, Call::kCall, u32(t)};
        if constexpr (Call::kWaits > 0) {
          if (!wait_events<false, Program, Call>(run_, c, who)) return false;
          ptx::fence_proxy_async();  // what peers wrote, before bulk loads of it
        }
        return matmul_.load<Call>(run_, c, ring, who);
      }
      return true;
    });
  }

  // One thread.
  ETC_DEVICE void store() const {
    u32 round = 0, images = 0, entered = 0;
    each_task([&](auto call, i32 t) {
      using Call = decltype(call);
      if constexpr (IsMatmul<Call>::value) {
        const Waiter who{kTensorLane, Call::kCall, u32(t)};
        return Call::template Function<Call>::template store<Call>(
            matmul_, run_, Call::at(run_.g, t), round, images, entered, who);
      }
      return true;
    });
    ptx::wait_stores<0>();
  }

  // A warp of the transfer lane, before it turns to that lane alone.
  ETC_DEVICE void send(
      u32 half, TransferLane<Program>& transfer, Tracer<Program>& trace) const {
    u32 images = 0, entered = 0;
    each_task([&](auto call, i32 t) {
      using Call = decltype(call);
      if constexpr (Sends<Call>::value) {
        const Waiter who{kTensorLane, Call::kCall, u32(t)};
        return Call::template Function<Call>::template send<Call>(
            matmul_, run_, Call::at(run_.g, t), half, images, entered, who, trace,
            [&] { transfer.try_one(); });
      }
      return true;
    });
  }

  // The 256 compute threads.
  ETC_DEVICE void compute(Tracer<Program>& trace) const {
    u32 ring = 0, round = 0;
    each_unit([&](i32 unit) {
      // NOTE: steps are found first and the product is one piece of code, not one a call.
      u32 steps = 0;
      bool gated = false;
      Waiter who{kTensorLane, 0, 0};
      bool going = true;
      const u64 begin = trace.now();
      Calls::visit(run_.g, unit, [&](auto call, i32 u) {
        using Call = decltype(call);
        const i32 t = task_of<Call>(u);
        if (t < 0) return;
        who = Waiter{kTensorLane, Call::kCall, u32(t)};
        if constexpr (IsMatmul<Call>::value) {
          steps = Matmul::num_steps<Call>(run_, Call::at(run_.g, t));
          gated = Call::kGated;
        } else {
          going = run_body<Call>(t, who);
        }
      });
      if constexpr (Program::kHasMatmul) {
        if (steps > 0) {
          going = matmul_.consume<Program::kIsHalf, Program::kWeightIsKN>(
              run_, steps, gated, ring, round, who);
        }
      }
      trace.add(who.lane, who.call, who.task, begin);
      if constexpr (Program::kIsMixed) {
        // All compute threads leave together: the next task may be of the other kind.
        going = !ptx::named_barrier_any<kComputeThreads>(1, !going);
      }
      return going;
    });
  }

 private:
  // The task of a call's unit that this worker runs; -1 if there is none for it.
  template <class Call>
  ETC_DEVICE i32 task_of(i32 unit) const {
    if constexpr (Call::kCluster == Program::kTensorCluster) {
      return unit;
    } else {
      const i32 t = unit * Program::kTensorCluster + i32(blockIdx.x) % Program::kTensorCluster;
      return t < Call::tasks(run_.g) ? t : -1;
    }
  }

  template <class F>
  ETC_DEVICE void each_unit(F f) const {
    const i32 clusters = i32(gridDim.x) / Program::kTensorCluster;
    const i32 total = Calls::units(run_.g);
    for (i32 u = i32(blockIdx.x) / Program::kTensorCluster; u < total; u += clusters) {
      if (!f(u)) return;
    }
  }
  template <class F>
  ETC_DEVICE void each_task(F f) const {
    each_unit([&](i32 unit) {
      bool going = true;
      Calls::visit(run_.g, unit, [&](auto call, i32 u) {
        const i32 t = task_of<decltype(call)>(u);
        if (t >= 0) going = f(call, t);
      });
      return going;
    });
  }

  template <class Call>
  ETC_DEVICE bool run_body(i32 t, Waiter who) const {
    const auto c = Call::at(run_.g, t);
    u32 entered = 0;
    bool ready = true;
    if (threadIdx.x == 0) {
      ready = wait_events<false, Program, Call>(run_, c, who) &&
              wait_peers<Program, Call>(run_, c, who, entered);
    }
    if (ptx::named_barrier_any<kComputeThreads>(1, !ready)) return false;
    using Body = Task<Program, Call, kComputeThreads>;
    Call::template Function<Body>::run(Body(run_.g, c, i32(threadIdx.x)));
    ptx::named_barrier<1, kComputeThreads>();
    if (threadIdx.x == 0) notify_all<Program, Call>(run_, c, 1);
    return true;
  }

  const Run<Program>& run_;
  Matmul matmul_;
};

}  // namespace etc
