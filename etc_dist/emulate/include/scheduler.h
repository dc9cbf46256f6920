// The scheduler of the threads, and their barriers. Part of run.cpp.
#pragma once
#include "fibers.h"

BEGIN_UNTRACKED

namespace emulation {

Thread* own = nullptr;

constexpr uint64_t kRunLimit = 2'000'000'000;  // nanoseconds that runs may last
// Turns without progress after which only the clock can end a wait, and runs fast. After half of
// them no thread is slow any more.
constexpr uint32_t kIdleTurns = 128;
constexpr uint32_t kWaitTurns = 16;  // that a thread waits for a change before it polls again
constexpr uint32_t kPollTurns = 64;  // within which a warp that polls does so again
constexpr size_t kStack = 192 * 1024, kGuard = 4096;  // bytes; the guard is the lowest page
constexpr size_t kMostGuards = 16384;  // a process may have 65530 mappings

static Place scheduler;
static jmp_buf end;
static char failure[400];
static const void* arguments[kMaxRanks];
static uint64_t state, clock_ns, turns;
static bool made_progress;
static uint32_t accesses;  // since a thread's turn began
static Worker* workers;
static Thread* threads;
static Turn* next_turns;  // of the threads
static char* stacks;
static size_t worker_count, thread_count;

static uint32_t draw(uint32_t limit) {  // xorshift64
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return uint32_t(state >> 32) % limit;
}

RunningTask::RunningTask(const char* call, const void* coordinate, uint32_t axes)
    : call(call), coordinate(static_cast<const int32_t*>(coordinate)), axes(axes) {
  own->task = this;
}
RunningTask::~RunningTask() {
  if (own->task == this) own->task = nullptr;  // not the end of a copy
}

void fail_at(const char* what, uint64_t address) {
  static char text[160];
  snprintf(text, sizeof text, "%s: @%llx", what, static_cast<unsigned long long>(address));
  fail(text);
}
void fail(const char* what) {
  const Thread& t = *own;
  char* to = failure;
  const auto write = [&](const char* format, auto... values) {
    const size_t left = size_t(failure + sizeof failure - to);
    const size_t length = size_t(snprintf(to, left, format, values...));
    to += length < left ? length : left - 1;
  };
  write("%s; rank %u, worker %u, thread %u", what, t.worker->rank, t.worker->index, t.id);
  if (t.task != nullptr) {
    const char* const name = strstr(t.task->call, "Call_") + strlen("Call_");
    write(", in task %.*s[", int(strcspn(name, "]")), name);
    for (uint32_t i = 0; i < t.task->axes; ++i) {
      write(i == 0 ? "%d" : ", %d", t.task->coordinate[i]);
    }
    write("]");
  }
  _longjmp(end, 1);
}

static void check_lane_writes();  // memory.h

// NOTE: not swapcontext, which makes a system call for the signal mask.
__attribute__((noinline)) void yield() {
  check_lane_writes();
  if (MARK_PLACE(own->place) == 0) GO_TO_PLACE(scheduler);
}
void may_yield() {
  if (draw(8) == 0) yield();
}
void poll(const uint32_t* changes) {
  own->worker->warps[own->id / 32].polled = turns;
  Turn& next = *own->next;
  next.turn = changes, next.last = uint32_t(turns) + kWaitTurns;
  if (changes != nullptr) next.seen = *changes;
  yield();
  next.turn = nullptr;
}
static void wait_turn(const uint32_t* turn, uint32_t seen) {
  Turn& next = *own->next;
  next.turn = turn, next.seen = seen, next.last = UINT32_MAX;
  while (*turn == seen) yield();
  next.turn = nullptr;
}
uint64_t now() { return clock_ns; }
void note_progress() { made_progress = true; }

void ThreadBarrier::arrive(uint32_t count, bool value) {
  const uint32_t this_turn = turn & 1;
  if (arrived == 0) any[this_turn] = false, of = count;
  if (of != count) fail("threads that expect different numbers of threads at one barrier");
  any[this_turn] |= value;
  sum.add(own->known);
  if (++arrived == count) {
    put(known[this_turn], sum.take());
    arrived = 0, ++turn;
    note_progress();
  }
}
bool ThreadBarrier::wait(uint32_t seen) {
  wait_turn(&turn, seen);
  own->known.acquire(known[seen & 1]);  // its clock may have advanced since it arrived
  return any[seen & 1];
}
bool ThreadBarrier::arrive_and_wait(uint32_t count, bool value) {
  const uint32_t seen = turn;
  arrive(count, value);
  return wait(seen);
}

const Words* exchange(const char* what, Words words, bool orders) {
  auto& warp = own->worker->warps[own->id / 32];
  const uint32_t this_turn = warp.turn & 1;
  Words* const all = warp.words[this_turn];
  if (warp.arrived == 0) warp.what = what;
  if (warp.what != what && strcmp(warp.what, what) != 0) fail("lanes of a warp in different warp functions");
  all[own->id % 32] = words;
  if (orders) warp.sum.add(own->known);
  if (++warp.arrived == 32) {
    if (orders) put(warp.known[this_turn], warp.sum.take());
    warp.arrived = 0, ++warp.turn;
    if (turns - warp.polled > kPollTurns) note_progress();
  } else {
    wait_turn(&warp.turn, warp.turn);
  }
  if (orders) own->known.set(hold(warp.known[this_turn]));
  return all;
}

}  // namespace emulation

END_UNTRACKED
