// The threads of a program's workers, as fibers of one host thread that yield where they would wait
// on a GPU; and asynchronous operations: bulk copies and wgmma.
//
// Operations are delayed as a GPU may delay them: a copy completes some turns after it was issued,
// wgmma is computed when its warp waits for it, and the next thread to run is drawn at random. So a
// missing wait or barrier gives a wrong result for some seed. Addresses that are out of bounds or
// not aligned, barriers with different counts and deadlocks end the run. So do two unordered
// accesses (happens_before.h), although memory is sequentially consistent here.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include "happens_before.h"

BEGIN_UNTRACKED

namespace emulation {


// Where a fiber or the scheduler continues.
// NOTE: the compiler's own setjmp takes less time than that of the C library, which checks and
// hides the addresses. It is not there for all processors. No tail call may follow it.
#ifdef __x86_64__
typedef void* Place[5];
#define MARK_PLACE(place) __builtin_setjmp(place)
#define GO_TO_PLACE(place) __builtin_longjmp(place, 1)
#else
typedef jmp_buf Place;
#define MARK_PLACE(place) _setjmp(place)
#define GO_TO_PLACE(place) _longjmp(place, 1)
#endif

struct Words {
  uint64_t word[6];
};

// A barrier of `of` threads that merges their views and reduces a flag by or.
struct ThreadBarrier {
  uint32_t turn = 0, arrived = 0, of = 0;
  bool any[2] = {};
  Sum sum;
  View* known[2] = {};
  void arrive(uint32_t count, bool value);
  // `seen`: the turn before the thread's arrival.
  bool wait(uint32_t seen);
  bool arrive_and_wait(uint32_t count, bool value);
};

// The views that an mbarrier passes from arrivals and completed copies to waiting threads.
struct Phase {
  Sum sum;
  View* known;        // of the previous phase
  AgentView init;         // at its initialization
  uint32_t agent, clock;  // of the copies that complete in this phase
};

struct Worker {
  uint32_t index, count, rank;
  uint8_t* shared;
  uint32_t shared_bytes;
  Block* blocks;  // of shared memory
  Phase phases[kBarriers];
  uint8_t number[128];  // of the mbarrier at each 8 bytes, from 1; 0: none
  uint32_t barriers;
  uint32_t atomics[kThreads / 32];  // writes so far, by warp
  uint32_t left;                    // threads that have not ended
  Sum ended;                        // what the others knew
  uint32_t* last_access;            // by agent: its last access here from another worker
  ThreadBarrier named[16];
  struct {
    uint32_t turn = 0, arrived = 0, wgmmas = 0, read = 0;  // wgmmas issued and read
    uint64_t polled = 0;  // the turn of its last poll()
    const char* what = nullptr;
    Words words[2][32];
    Sum sum;
    View* known[2];
  } warps[kThreads / 32];
};

// A wgmma of 64 x columns x 16; each thread of a warpgroup has columns / 2 accumulators.
struct WgmmaOp {
  float* sums;
  uint64_t a, b;
  int columns, rows;  // rows of a beyond these are not read
  bool adds, is_half;
  bool a_is_kn, b_is_kn;  // MN-major
  bool are_codes;         // 32 of e4m3 in place of 16 elements of two bytes
  // If a is in registers: those of the thread, their values at the start, and its two rows.
  const uint32_t* registers;
  uint32_t held[4];
  uint16_t a_rows[32];
  AgentView known;                // of a warp's first thread
};
struct Copy {
  uint8_t* to;
  const uint8_t* from;
  uint32_t bytes;
  uint32_t shared;
  AgentView known;
};

// The task whose body a thread runs, for the report of a failure: its call, as the compiler writes
// the type, and its coordinate.
struct RunningTask {
  const char* call;
  const int32_t* coordinate;
  uint32_t axes;
  RunningTask(const char* call, const void* coordinate, uint32_t axes);
  ~RunningTask();
};
template <class Call>
RunningTask running_task(const void* coordinate) {
  return {__PRETTY_FUNCTION__, coordinate, sizeof(typename Call::Coord) / sizeof(int32_t)};
}

// What the scheduler looks at for each thread and turn, next to that of the other threads.
struct Turn {
  const uint32_t* turn;  // waits until this differs from `seen`; nullptr: waits for nothing
  uint32_t seen, last;   // or waits until the turn `last`
  bool is_over;
  bool is_due(uint64_t turns) const {
    return !is_over && (turn == nullptr || *turn != seen || turns >= last);
  }
};

struct Thread {
  ucontext_t context;  // its entry
  Place place;         // where it resumes
  Worker* worker;
  uint32_t id;
  bool has_begun = false;
  Turn* next;
  WgmmaOp wgmmas[64];
  uint32_t count = 0, ends[8], groups = 0;  // of wgmmas; the end of each group
  uint32_t wgmmas_done = 0;
  Copy copies[64];
  uint32_t copied = 0;
  AgentView known;
  Fences fences;
  const RunningTask* task = nullptr;
};
extern Thread* own;

// Lets other threads run.
void yield();
// Yields sometimes.
void may_yield();
// As yield(), by a thread that may read the same memory again until others have written it.
// `changes`: differs once they have; the thread waits for that, but a few turns at most.
void poll(const uint32_t* changes = nullptr);
[[noreturn]] void fail(const char* what);
// With a global address, which places.py names.
[[noreturn]] void fail_at(const char* what, uint64_t address);
// The kernels' clock, in nanoseconds. A turn of all threads takes a microsecond, or more without
// progress, so that a run that hangs ends soon.
uint64_t now();
void note_progress();

// All lanes' words, after all lanes of the warp have called with the same `what`. `orders`: merges
// the lanes' views.
const Words* exchange(const char* what, Words words, bool orders = false);

// The memory at a shared address of a worker, which must be a multiple of `unit`.
inline uint8_t* at(const Worker& worker, uint32_t offset, uint32_t bytes, uint32_t unit) {
  if (offset + uint64_t(bytes) > worker.shared_bytes) {
    fail("an access out of bounds of shared memory");
  }
  if (offset % unit != 0) fail("a shared address that is not aligned");
  return worker.shared + offset;
}
inline uint8_t* at(uint32_t address, uint32_t bytes, uint32_t unit) {
  return at(*own->worker, address, bytes, unit);
}
// The memory at a global address, which must be in an array.
uint8_t* global(uint64_t address, uint64_t bytes, uint32_t unit);
bool is_written(uint64_t address);  // whether the program may write there
// The 128-byte swizzle of bulk copies and the tensor cores.
inline uint32_t swizzled(uint32_t address) { return address ^ ((address >> 7 & 7) << 4); }

// The running thread's part of a wgmma.
void multiply(const WgmmaOp& op);

// An mbarrier, 8 bytes as on the GPU.
struct Barrier {
  int16_t pending;
  uint16_t expected;
  int32_t bytes_and_phase;  // pending bytes * 2 + phase
};
static_assert(sizeof(Barrier) == 8);
// On the running thread's worker, or on `worker`.
void init_barrier(uint32_t address, uint32_t count);
// An arrival at another worker's mbarrier orders nothing that this thread did last.
void arrive(Worker& worker, uint32_t address, uint32_t count);
void expect(uint32_t address, uint32_t bytes);
// Whether a phase is over, for which the thread waits a little.
bool try_wait(uint32_t address, uint32_t parity, bool is_once = false);

// A tensor map as rank_memory.py writes it.
struct Map {
  uint64_t pointer;
  uint32_t itemsize, axes, extent[3], side[3];
  uint64_t pitch[3];
};
static_assert(sizeof(Map) <= 128);

// An operation in flight; `kind` determines the fields in use.
struct AsyncOp {
  enum Kind { kLoad, kBytes, kCopies } kind;
  Worker* worker;
  uint32_t shared, barrier;
  const Map* map;
  int32_t first[3];
  Copy* copies;
  uint32_t count;  // of copies or bytes
  uint64_t global;
  uint64_t due;  // the earliest turn
  AgentView known;   // of the issuing thread
};
void issue_async(AsyncOp op);  // by the running thread

// An access of the running thread, or of an operation that it issued.
void access_shared(const Worker& worker, uint32_t address, uint32_t bytes, const Access& access);
void access_global(const void* at, uint64_t bytes, const Access& access);
void access_atomic(const void* at, uint64_t bytes);
// An atomic of four bytes that stores change(before); returns the value before.
void use_word(uint64_t address, const Atomic& how);
template <class Change>
UNTRACKED uint32_t change_word(uint64_t address, const Atomic& how, Change change) {
  uint32_t* const word = reinterpret_cast<uint32_t*>(global(address, 4, 4));
  use_word(address, how);
  const uint32_t before = *word;
  if (how.writes) *word = change(before), note_progress();
  return before;
}

// The argument block of a rank's run.
const void* arguments_of(uint32_t rank);

}  // namespace emulation

END_UNTRACKED
