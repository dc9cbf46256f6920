// Runs of a program, and the entry point of its library. The same for all programs, so that the
// compiler takes it from its cache.
#include <signal.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "async_copies.h"
#include "tensor_cores.h"

BEGIN_UNTRACKED

extern "C" void run_program(const void* arguments);  // entry.h

namespace emulation {

// NOTE: no operator new: there is no C++ library.
template <class T>
static T* make(size_t count) {
  T* const made = static_cast<T*>(calloc(count, sizeof(T)));
  if (made == nullptr) abort();
  return made;
}

const void* arguments_of(uint32_t rank) { return arguments[rank]; }

static void run_thread() {
  run_program(arguments[own->worker->rank]);
  if (own->count > 0) fail("wgmma instructions that no thread waited for");
  if (own->copied > 0) fail("asynchronous copies without mbarrier_arrive_copied");
  Worker& worker = *own->worker;
  worker.ended.add(own->known);
  if (worker.left == 1) {
    View* const all = worker.ended.take();
    for (uint32_t i = 0; i < row_size; ++i) {
      if (worker.last_access[i] <= all->clock[i]) continue;
      fail("a worker ends while its shared memory may still be written");
    }
    drop(all);
  }
  own->next->is_over = true;
  yield();
}
// Of the scheduler, which prepares a thread or continues it.
static uint64_t steps;
// NOTE: separate from the loop, whose variables must not change between the returns of setjmp.
__attribute__((noinline)) static void resume(Thread& t) {
  own = &t, accesses = 0, ++steps;
  if (MARK_PLACE(scheduler) != 0) return;
  if (t.has_begun) GO_TO_PLACE(t.place);
  t.has_begun = true;
  setcontext(&t.context);
  abort();  // not reached
}

static void begin(const void* const* blocks, int count, int shared_bytes) {
  for (size_t w = 0; w < worker_count; ++w) {
    Worker& worker = workers[w];
    worker.index = uint32_t(w) % uint32_t(count), worker.count = uint32_t(count);
    worker.rank = uint32_t(w) / uint32_t(count);
    arguments[worker.rank] = blocks[worker.rank];
    const size_t capacity = (size_t(shared_bytes) + 1023) / 1024 * 1024;
    worker.shared = static_cast<uint8_t*>(aligned_alloc(1024, capacity));
    if (worker.shared == nullptr) abort();
    worker.shared_bytes = uint32_t(shared_bytes);
    worker.blocks = make<Block>(capacity / 16);
    worker.last_access = make<uint32_t>(row_size);
  }
  for (size_t t = 0; t < thread_count; ++t) {
    threads[t].next = &next_turns[t];
    threads[t].worker = &workers[t / kThreads], threads[t].id = uint32_t(t % kThreads);
    threads[t].known.agent = uint32_t(t / kThreads * kAgents + t % kThreads);
    threads[t].known.clock = 1;
  }
}
static void end_blocks(Block* blocks, uint64_t count) {
  for (uint64_t i = 0; i < count; ++i) {
    const Block& block = blocks[i];
    if (block.parts == nullptr) free(block.whole.by_agent);
    for (uint32_t k = 0; block.parts != nullptr && k * block.unit < 16; ++k) {
      free(block.parts[k].by_agent);
    }
    free(block.parts);
  }
}
// Begins a run of a rank: shared memory is uninitialized.
static void begin_run(uint32_t rank) {
  for (size_t w = 0; w < worker_count; ++w) {
    Worker& worker = workers[w];
    if (worker.rank != rank) continue;
    const size_t count = (worker.shared_bytes + 15) / 16;
    end_blocks(worker.blocks, count);
    memset(worker.blocks, 0, count * sizeof(Block));
    memset(worker.shared, 0xff, worker.shared_bytes);  // not a number
    memset(worker.number, 0, sizeof worker.number);
    memset(worker.last_access, 0, row_size * sizeof *worker.last_access);
    worker.barriers = 0, worker.left = kThreads;
  }
  for (size_t t = 0; t < thread_count; ++t) {
    if (threads[t].worker->rank != rank) continue;
    threads[t].has_begun = next_turns[t].is_over = false, ++steps;
    ucontext_t& context = threads[t].context;
    getcontext(&context);
    context.uc_stack.ss_sp = stacks + t * kStack, context.uc_stack.ss_size = kStack;
    makecontext(&context, run_thread, 0);
  }
}
// Orders all accesses of a rank's run before its next run.
static void end_run(uint32_t rank) {
  for (uint32_t i = 0; i < in_flight.count; ++i) {
    if (in_flight.items[i].worker->rank == rank) {
      fail("asynchronous copies that no thread waited for");
    }
  }
  Sum sum;
  for (size_t t = 0; t < thread_count; ++t) {
    if (threads[t].worker->rank == rank) sum.add(threads[t].known);
  }
  View* const all = sum.take();
  sum.agents.end();
  for (size_t w = 0; w < worker_count; ++w) {
    const Worker& worker = workers[w];
    if (worker.rank != rank) continue;
    uint32_t* const clock = all->clock + w * kAgents;
    for (uint32_t i = 0; i < kThreads / 32; ++i) {
      raise(clock[kAtomics + i], worker.atomics[i]);
      raise(clock[kWgmmas + i], worker.warps[i].read);
    }
    for (uint32_t i = 0; i < kBarriers; ++i) {
      raise(clock[kFirstBarrier + i], worker.phases[i].clock);
    }
  }
  for (uint32_t row = kGlobal; row < kRows; ++row) {
    memcpy(all->clock + row * row_size, all->clock, row_size * 4);
  }
  for (size_t t = 0; t < thread_count; ++t) {
    Thread& thread = threads[t];
    if (thread.worker->rank != rank) continue;
    thread.known.set(hold(all));
    for (uint32_t& fenced : thread.known.fenced) fenced = thread.known.clock - 1;
    for (int beyond = 0; beyond < 2; ++beyond) {
      put(thread.fences.released[beyond], nullptr), put(thread.fences.seen[beyond], nullptr);
    }
  }
  drop(all);
}
// Names a thread that waits in a body, if there is one.
[[noreturn]] static void fail_deadlock() {
  for (size_t t = 0; t < thread_count; ++t) {
    if (next_turns[t].is_over || threads[t].task == nullptr) continue;
    own = &threads[t];
    break;
  }
  fail("all threads wait for one another");
}
// Each rank runs `runs` times, independently of the others.
static void run_threads(uint32_t ranks, uint32_t runs) {
  size_t left_of[kMaxRanks], left = thread_count;
  uint32_t runs_of[kMaxRanks];
  const size_t of_rank = thread_count / ranks;
  for (uint32_t r = 0; r < ranks; ++r) left_of[r] = of_rank, runs_of[r] = 1, begin_run(r);
  uint64_t slow_warp_until = 0, slow_rank_until = 0;
  uint32_t slow_warp = 0, slow_rank = ranks, idle = 0;  // turns in a row without progress
  for (; left > 0; clock_ns += made_progress ? 1000 : idle < kIdleTurns ? 50'000 : 2'000'000) {
    idle = made_progress ? 0 : idle + 1;
    made_progress = in_flight.count > 0;  // they will complete
    if (turns >= slow_warp_until) {
      slow_warp = draw(uint32_t(thread_count / 32)), slow_warp_until = turns + draw(100);
    }
    if (ranks > 1 && turns >= slow_rank_until) {
      slow_rank = draw(2 * ranks), slow_rank_until = turns + draw(400);
    }
    const bool may_be_slow = idle < kIdleTurns / 2;
    bool can_any = in_flight.count > 0;
    const uint32_t first = draw(uint32_t(thread_count));
    const uint32_t slow = draw(uint32_t(worker_count) * 4);
    for (size_t i = 0; i < thread_count; ++i) {
      const size_t number = first + i < thread_count ? first + i : first + i - thread_count;
      if (!next_turns[number].is_due(turns)) continue;
      can_any = true;
      if (number / kThreads == slow || draw(8) == 0) continue;
      Worker& worker = workers[number / kThreads];
      if (may_be_slow && (number / 32 == slow_warp || worker.rank == slow_rank)) continue;
      resume(threads[number]);
      const bool is_over = next_turns[number].is_over;
      left -= is_over, left_of[worker.rank] -= is_over, worker.left -= is_over;
    }
    complete_due();
    for (uint32_t r = 0; r < ranks; ++r) {
      if (left_of[r] > 0 || runs_of[r] == runs) continue;
      end_run(r), begin_run(r);
      left += of_rank, left_of[r] = of_rank, ++runs_of[r];
      can_any = true;
    }
    if (left > 0 && !can_any) fail_deadlock();
    if (clock_ns > kRunLimit) fail("the run does not end");
    ++turns;
  }
  if (in_flight.count > 0) fail("asynchronous copies that no thread waited for");
}

// Frees all memory. All views at once: where a run failed, some counts of uses are wrong.
static void end_all() {
  for (uint32_t i = 0; i < in_flight.count; ++i) free(in_flight.items[i].copies);
  in_flight.end();
  for (size_t w = 0; w < worker_count; ++w) {
    Worker& worker = workers[w];
    worker.ended.agents.end();
    for (ThreadBarrier& barrier : worker.named) barrier.sum.agents.end();
    for (auto& warp : worker.warps) warp.sum.agents.end();
    for (Phase& phase : worker.phases) phase.sum.agents.end();
    end_blocks(worker.blocks, (worker.shared_bytes + 15) / 16);
    free(worker.blocks), free(worker.shared), free(worker.last_access);
  }
  for (uint32_t i = 0; i < views.count; ++i) free(views.items[i]);
  views.end(), unused_views.end();
  memset(memos, 0, sizeof memos);
  for (uint32_t i = 0; i < range_count; ++i) {
    if (ranges[i].blocks != nullptr) end_blocks(ranges[i].blocks, ranges[i].count());
    free(ranges[i].blocks);
  }
  reads.end(), free_read = 0;
  free(atoms), free(threads), free(next_turns), free(workers);
  munmap(stacks, thread_count * kStack);
}

static void report_fault(int signal, siginfo_t* info, void*) {
  const size_t at = size_t(static_cast<char*>(info->si_addr) - stacks);
  const bool is_guarded = at < thread_count * kStack && at % kStack < kGuard;
  fail(signal == SIGFPE ? "an integer division by zero, or one that overflows"
       : signal == SIGILL || signal == SIGTRAP ? "an instruction that traps"
       : is_guarded ? "a stack overflow: local variables of more than 180 KB"
                    : "an access to an invalid address");
}

// NOTE: a loop that accesses memory ends by its number of accesses; this one finds others.
static uint64_t checked_steps;
static uint32_t checked_accesses;
static void check_steps(int, siginfo_t*, void*) {
  if (steps == checked_steps && accesses == checked_accesses) {
    fail("a loop without end, which accesses no memory");
  }
  checked_steps = steps, checked_accesses = accesses;
}

// While it lives, check_steps is called from time to time.
struct StepTimer {
  static constexpr int kSignal = SIGVTALRM;
  static constexpr long kNanoseconds = 300'000'000;  // of this thread, on a CPU
  timer_t timer;
  struct sigaction before;

  StepTimer() {
    checked_steps = UINT64_MAX;  // unlike the last count of an earlier run
    struct sigaction action = {};
    action.sa_sigaction = check_steps, action.sa_flags = SA_NODEFER | SA_ONSTACK | SA_SIGINFO;
    sigaction(kSignal, &action, &before);
    sigevent event = {};
    event.sigev_notify = SIGEV_THREAD_ID, event.sigev_signo = kSignal;
    event._sigev_un._tid = gettid();
    if (timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &timer) != 0) abort();
    const itimerspec times = {{0, kNanoseconds}, {0, kNanoseconds}};
    timer_settime(timer, 0, &times, nullptr);
  }
  ~StepTimer() {
    timer_delete(timer);
    sigaction(kSignal, &before, nullptr);
  }
};

constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP};

// Runs the threads; the faults of their bodies end the run.
static void run_guarded(uint32_t ranks, uint32_t runs) {
  static char handler_stack[64 * 1024];  // that of a thread may have overflowed
  stack_t stack = {}, stack_before;
  stack.ss_sp = handler_stack, stack.ss_size = sizeof handler_stack;
  sigaltstack(&stack, &stack_before);
  struct sigaction action = {}, before[sizeof kSignals / sizeof *kSignals];
  action.sa_sigaction = report_fault, action.sa_flags = SA_NODEFER | SA_ONSTACK | SA_SIGINFO;
  struct sigaction* place = before;
  for (int signal : kSignals) sigaction(signal, &action, place++);
  {
    const StepTimer timer;
    if (_setjmp(end) == 0) run_threads(ranks, runs);
  }
  place = before;
  for (int signal : kSignals) sigaction(signal, place++, nullptr);
  sigaltstack(&stack_before, nullptr);
}

// Runs a program on `ranks` GPUs of `count` workers, with their argument blocks and the ranges of
// all arrays, by address. Returns the failure, or nullptr.
extern "C" const char* run_emulated(
    const void* const* blocks, Range* arrays, int array_count, int ranks, int count,
    int shared_bytes, int runs, uint64_t seed) {
  state = (seed + 1) * 0x9e3779b97f4a7c15ull, clock_ns = turns = 0, failure[0] = 0;
  ranges = recent = arrays, range_count = uint32_t(array_count);
  for (uint32_t i = 0; i < range_count; ++i) {
    if (ranges[i].is_written != 0) {
      ranges[i].blocks = make<Block>(ranges[i].count());
    }
  }
  worker_count = size_t(ranks) * size_t(count), thread_count = worker_count * kThreads;
  row_size = uint32_t(worker_count) * kAgents, workers_of_rank = uint32_t(count);
  atoms = make<Used>(kAtoms), atom_count = 0;
  written.bytes = 0;
  workers = make<Worker>(worker_count), threads = make<Thread>(thread_count);
  next_turns = make<Turn>(thread_count);
  stacks = static_cast<char*>(mmap(nullptr, thread_count * kStack, PROT_READ | PROT_WRITE,
                                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (stacks == MAP_FAILED) abort();
  for (size_t t = 0; t < thread_count && t < kMostGuards; ++t) {
    mprotect(stacks + t * kStack, kGuard, PROT_NONE);
  }
  begin(blocks, count, shared_bytes);
  run_guarded(uint32_t(ranks), uint32_t(runs));
  own = nullptr;
  end_all();
  return failure[0] == 0 ? nullptr : failure;
}

}  // namespace emulation

END_UNTRACKED
