// A worker: 384 threads, three warpgroups.
//   warps 0..7   consumers of the tensor lane; after its end they run the transfer lane
//   warp 8       producer of the tensor lane: claims units, waits, loads
//   warp 9       stores results of the tensor lane
//   warps 10, 11 the transfer lane; they also gather for the tensor lane
// Which of them a device function uses: worker/roles.cuh.
#pragma once
#include "ptx/registers.cuh"
#include "worker/defaults.cuh"
#include "worker/tensor_lane.cuh"

namespace etc {

constexpr int kWorkerThreads = 384;
constexpr u32 kProducerWarp = 8;
constexpr int kOtherWarps = kWorkerThreads / 32 - 1;
// Named barriers; those from 0 to 3, and two in functions/wgmma_turns.cuh, have other uses.
constexpr u32 kInitBarrier = 4, kAgreeBarrier = 5;

// Registers per thread: 168 at launch; those of the three warpgroups must sum to 504.
constexpr int kComputeRegisters = 200, kServiceRegisters = 104;

// NOTE: without functions with roles, tasks of the transfer lane may need the number at launch.
template <class Program>
constexpr bool kSharesRegisters =
    TensorLane<Program>::kHasRoles || Program::TransferCalls::kCount == 0;

// Notifies the partners that send to this rank of the epoch; a whole warp.
template <class Program>
ETC_DEVICE void begin_far(const Run<Program>& run, u32 lane) {
  if constexpr (kHasFar<Program>) {
    const u64 word = run.far_started(run.g.rank / near_ranks<Program>());
#pragma unroll 1
    for (u32 host = lane; host < u32(Program::kHosts); host += 32) {
      if (((run.g.far_senders[host / 32] >> (host % 32)) & 1) == 0) continue;
      ptx::fence_acq_rel<true>();
      Program::Far::add(word, 1, run.partner(i32(host)));
    }
  }
}

// By the store warp of each worker, while the first tasks run.
template <class Program>
ETC_DEVICE void begin_epoch(const Run<Program>& run) {
  constexpr u32 kTicketPair = 15;
  const u32 lane = threadIdx.x % 32;
  const auto& g = run.g;
  const u32 next = (run.epoch + 1) & 1;
  if (blockIdx.x == 0) {
    if (lane < near_ranks<Program>()) {
      const u64 word = run.near_block(lane) + u64(run.local(g.rank)) * 4;
      ptx::store_release(word, run.epoch);
    }
    if (kHasFar<Program>) begin_far(run, lane);
    if (lane / 2 == kTicketPair) run.control()->tickets[lane % 2][next] = 0;
  }
  u32* counters = reinterpret_cast<u32*>(
      run.self() + sizeof(SymmetricHead) + u64(next) * g.event_capacity * 4);
  u64* words = nullptr;
  if constexpr (kHasFar<Program>) words = reinterpret_cast<u64*>(run.far_word(0, next));
  for (u32 i = blockIdx.x * 32 + lane; i < g.event_capacity; i += gridDim.x * 32) {
    counters[i] = 0;
    if constexpr (kHasFar<Program>) words[i] = 0;
  }
}

// One thread, once its whole worker has read the epoch: the last worker increments it.
// NOTE: at the end of a run this would cost an exposed microsecond.
template <class Program>
ETC_DEVICE void leave_epoch(const Run<Program>& run) {
  Control* control = run.control();
  if (ptx::fetch_add_acq_rel(u64(&control->begun), 1) != gridDim.x - 1) return;
  ptx::store_relaxed(u64(&control->begun), 0);
  ptx::store_relaxed(u64(&control->epoch), run.epoch + 1);
}

// One thread, once its whole worker has ended. The last worker waits until all that this rank has
// sent has arrived, so the next run may write what this one sent. In an aborted run it aborts far
// ranks instead: messages to a rank that has ended never arrive. The host waits for the others.
template <class Program>
ETC_DEVICE void end_far(const Run<Program>& run) {
  if constexpr (kHasFar<Program>) {
    Control* control = run.control();
    if (ptx::fetch_add_acq_rel(u64(&control->ended), 1) != gridDim.x - 1) return;
    ptx::store_relaxed(u64(&control->ended), 0);
    if (run.aborted()) {
      abort_far(run);
    } else {
      Program::Far::quiet();
    }
  }
}

// The roles of all warps but the producer's. Whether they ran to their end.
template <class Program>
ETC_DEVICE bool run_roles(
    const Run<Program>& run, const TensorLane<Program>& tensor, Tracer<Program>& trace, u32 warp,
    u32 lane) {
  const bool is_compute = warp < kProducerWarp, is_store = warp == kProducerWarp + 1;
  bool is_going = true;
  if (is_compute) {
    if constexpr (kSharesRegisters<Program>) ptx::registers_grow<kComputeRegisters>();
    is_going = tensor.compute(trace);
    if constexpr (Program::TransferCalls::kCount == 0) {  // their work is done
      __syncwarp();
      return is_going;
    }
    // All have grown before any shrinks.
    if constexpr (kSharesRegisters<Program>) ptx::named_barrier<kProducerWarp * 32>(1);
    tensor.read_epoch();
  }
  // NOTE: the compute warps, too: they run the same code of the transfer lane as the service warps,
  // whose registers are fewer.
  if constexpr (kSharesRegisters<Program>) ptx::registers_shrink<kServiceRegisters>();
  if (is_store) {
    if (lane == 0) {
      tensor.read_epoch();
      leave_epoch(run);
    }
    begin_epoch(run);
    if constexpr (TensorLane<Program>::kHasStoreWarp) is_going = tensor.store();
  } else {
    is_going = tensor.run_transfers(!is_compute, trace) && is_going;
  }
  __syncwarp();
  return is_going;
}

template <class Program>
ETC_DEVICE void run_worker(const typename Program::Args& g) {
  const Control* control = reinterpret_cast<const Control*>(g.control);
  // NOTE: where loads can begin early, what is loaded here would delay the fence after init().
  Run<Program> run{g, kLoadsEarly<Program> ? 0 : control->epoch};
  const TensorLane<Program> tensor(run, ptx::shared_memory());
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Tracer<Program> trace(run);
  bool is_lost = false;  // whether a role ended early
  // NOTE: a run that starts after an abort is skipped: it publishes no start and runs no task.
  // Notifications of the aborted run may still arrive, and no run may count in their area.
  bool is_aborted = false;
  if constexpr (!kLoadsEarly<Program>) {
    if (threadIdx.x == kWorkerThreads - 1) tensor.prefetch_maps();
    is_aborted = run.aborted();
  }
  if (warp == kProducerWarp) {
    // NOTE: if loads can begin early, it prepares them while the other warps initialize mbarriers.
    // In other programs that order would only cost registers, which some cannot spare. The producer
    // thread gets the run's epoch with its admission.
    if (lane == 0) tensor.init_producer();
    __syncwarp();
    ptx::named_barrier_arrive<kWorkerThreads>(kInitBarrier);
    if constexpr (kSharesRegisters<Program>) ptx::registers_shrink<kServiceRegisters>();
    if (ptx::elect_one()) {
      is_lost = !tensor.lead();
      if (run.aborted()) run.signal_host();  // by a peer that no wait here depends on
    }
    __syncwarp();
  } else {
    const auto meet = [&]() ETC_INLINE {  // all mbarriers are initialized
      ptx::named_barrier<kWorkerThreads>(kInitBarrier);
    };
    if constexpr (kLoadsEarly<Program>) {
      if (threadIdx.x == kWorkerThreads - 1) tensor.prefetch_maps();
      const u32 own_warp = ptx::warp();
      if (lane == 0) tensor.template init<kOtherWarps>(own_warp - u32(own_warp > kProducerWarp));
      __syncwarp();
      // NOTE: not by the compute warps: the load would delay the thread that publishes.
      u32 abort_word = 0;
      if (own_warp > kProducerWarp) abort_word = run.abort_word();
      meet();
      if (warp == 0 && lane == 0) tensor.publish_initialized();
      run.epoch = control->epoch;
      is_aborted = ptx::defer_use(abort_word) != 0;
    }
    if (kIsPaced<Program> && threadIdx.x == 0) tensor.store_start();
    // A peer may abort at any moment: the threads of a worker must agree.
    const bool is_skipped = ptx::named_barrier_any<kOtherWarps * 32>(kAgreeBarrier, is_aborted);
    if constexpr (!kLoadsEarly<Program>) meet();
    if (threadIdx.x == 0) tensor.admit(!is_skipped, run.epoch);
    if (is_skipped) {
      if (threadIdx.x == 0) {
        run.signal_host();
        leave_epoch(run);
      }
    } else {
      is_lost = !run_roles(run, tensor, trace, warp, lane);
    }
  }

  // NOTE: where a role ended early, bulk loads may still write to shared memory.
  if (ptx::named_barrier_any<kWorkerThreads>(0, is_lost)) {
    const u64 now = ptx::global_timer();
    while (ptx::global_timer() - now < 4000000) ptx::nanosleep(1000);
  }
  if (threadIdx.x == 0) end_far(run);
}

}  // namespace etc

// Device functions follow in the source. Some warps of the block run none, so a body cannot meet
// them at a barrier; and with a GEMM all shared memory is in use.
#undef __syncthreads
#undef __shared__
#define __syncthreads() static_assert(false, "in a body call task.sync(), not __syncthreads()")
#define __shared__ static_assert(false, "in a body use task.scratch, not __shared__");
