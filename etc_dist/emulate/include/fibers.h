// The threads of a program's workers, as fibers of one host thread that yield where they would wait
// on a GPU; and asynchronous operations: bulk copies and wgmma.
//
// What a GPU may do late is done late here. A copy completes some turns after it was issued, wgmma
// is computed when its warp waits for it, and the next thread to run is drawn at random. So a
// missing wait or barrier gives a wrong result for some seed. Addresses that are out of bounds or
// not aligned, barriers with different counts and threads that wait for one another end the run.
// So do two accesses that are not ordered (happens_before.h), though memory itself is sequentially
// consistent here.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include "happens_before.h"

BEGIN_UNSEEN

namespace emulation {

constexpr uint32_t kMaxCluster = 2;
constexpr uint32_t kPlace = 24;  // bits of a shared address below the worker's place in its cluster

struct Words {
  uint64_t word[6];
};

// Threads that wait for one another; whether any of them brought true. Each learns what all know.
struct Meeting {
  uint32_t turn = 0, come = 0, of = 0;
  bool any[2] = {};
  Sum sum;
  View* known[2] = {};
  bool meet(uint32_t count, bool value);
};

// What an mbarrier hands on: from who arrives, and what completes, to who waits.
struct Phase {
  Sum sum;
  View* known;        // in the phase before
  Known init;         // who made it, when
  uint32_t agent, clock;  // of what completes in this phase
};

struct Worker {
  uint32_t index, count, place, rank;
  uint8_t* shared;
  uint32_t shared_bytes;
  Block* blocks;  // of shared memory
  Phase phases[kBarriers];
  uint8_t number[128];  // of the mbarrier at each 8 bytes, from 1 on
  uint32_t barriers;
  const struct Thread* storers[kStorers];
  uint32_t atomics[kThreads / 32];  // of its warps that have written
  uint32_t left;                    // threads that have not ended
  uint32_t* come;                   // of each agent, what it last did here from elsewhere
  Worker* cluster[kMaxCluster];
  Meeting named[16], *pair;
  struct {
    uint32_t turn = 0, come = 0, products = 0, read = 0;  // that its first thread has issued
    const char* what = nullptr;
    Words words[2][32];
    Sum sum;
    View* known[2];
  } warps[kThreads / 32];
};

// A product of 64 x columns x 16, of which each thread of a warpgroup has columns / 2 sums.
struct Product {
  float* sums;
  uint64_t a, b;
  int columns;
  bool adds, is_half, is_kn;  // b has its rows along k
  Known known;                // of a warp's first thread
};
struct Copy {
  uint8_t* to;
  const uint8_t* from;
  uint32_t bytes;
  uint32_t shared;
  Known known;
};

struct Thread {
  ucontext_t context;  // where it begins,
  jmp_buf place;       // and where it was last
  Worker* worker;
  uint32_t id;
  bool has_begun = false, is_over = false;
  const uint32_t* turn = nullptr;  // waits until this is no longer `seen`
  uint32_t seen = 0;
  Product products[64];
  uint32_t count = 0, ends[8], groups = 0;  // of the products; behind the last one of each group
  uint32_t products_done = 0;
  Copy copies[64];
  uint32_t copied = 0;
  uint32_t store_groups = 0;  // that it has committed
  Known known, told;          // now, and when it last arrived at another worker's mbarrier
  Fences fences;
};
extern Thread* own;

// Lets others take their turn.
void yield();
// The same, now and then.
void may_yield();
void wait_turn(const uint32_t* turn);
[[noreturn]] void fail(const char* what);
// Time as the kernels see it, in nanoseconds. A turn of every thread takes a microsecond, or
// more where nobody brought anything forward, so that a run that hangs ends soon.
uint64_t now();
void go_on();  // tells that somebody did

// Each lane's words, once all lanes of the warp have brought theirs, to the same function.
// `orders`: and each learns what all know.
const Words* exchange(const char* what, Words words, bool orders = false);

// `bytes` at a shared address, of any worker of the cluster, that is a multiple of `unit`;
inline uint8_t* at(const Worker& worker, uint32_t address, uint32_t bytes, uint32_t unit) {
  const uint32_t offset = address & ((1u << kPlace) - 1);
  if (offset + uint64_t(bytes) > worker.shared_bytes) {
    fail("an access out of bounds of shared memory");
  }
  if (offset % unit != 0) fail("a shared address that is not aligned");
  return worker.shared + offset;
}
inline uint8_t* at(uint32_t address, uint32_t bytes, uint32_t unit) {
  return at(*own->worker, address, bytes, unit);
}
// and at a global one, which must be in some array.
uint8_t* global(uint64_t address, uint64_t bytes, uint32_t unit);
bool is_written(uint64_t address);  // by anybody, while the program runs
// Where a byte of rows of 128 lies, as bulk copies and the tensor cores have them.
inline uint32_t swizzled(uint32_t address) { return address ^ ((address >> 7 & 7) << 4); }

// An mbarrier, in the 8 bytes that it has on the GPU.
struct Barrier {
  int16_t pending;
  uint16_t expected;
  int32_t bytes_and_phase;  // bytes still to come * 2 + phase
};
static_assert(sizeof(Barrier) == 8);
// That of the running thread's worker, or of another one.
void init_barrier(uint32_t address, uint32_t count);
void arrive(Worker& worker, uint32_t address, uint32_t count);
void expect(uint32_t address, uint32_t bytes);
bool is_over(uint32_t address, uint32_t parity);

// A tensor map as memory.py writes it.
struct Map {
  uint64_t pointer;
  uint32_t itemsize, axes, extent[5], side[5];
  uint64_t pitch[5];
};
static_assert(sizeof(Map) <= 128);

// What will happen some turns later: `kind` says which of the fields it has.
struct Later {
  enum Kind { kLoad, kCopies, kWord } kind;
  Worker* worker;
  uint32_t shared, barrier, mask, value;
  const Map* map;
  int32_t first[5];
  Copy* copies;
  uint32_t count;
  uint64_t due;  // not before this turn
  Known known;   // of who issued it
};
void later(Later what);  // by the running thread

// An access of the running thread, or of what it issued.
void access_shared(const Worker& worker, uint32_t address, uint32_t bytes, const Access& access);
void access_global(const void* at, uint64_t bytes, const Access& access);
void access_atomic(const void* at, uint64_t bytes);
// An atomic of four bytes: change(before) is what is there then. What was there before.
void use_word(uint64_t address, const Atomic& how);
template <class Change>
UNSEEN uint32_t change_word(uint64_t address, const Atomic& how, Change change) {
  uint32_t* const word = reinterpret_cast<uint32_t*>(global(address, 4, 4));
  use_word(address, how);
  const uint32_t before = *word;
  if (how.writes) *word = change(before), go_on();
  return before;
}

// A bulk store of the running thread: of a box, or of `bytes` to `global` if there is no map.
// Shared memory is read some turns later, and global memory written later still.
void store_later(const Later& box, uint64_t global, uint32_t bytes);
// Until all but the last `pending` groups of them have read, or written, too.
void wait_stores(uint32_t pending, bool are_written);

}  // namespace emulation

END_UNSEEN
