// The threads of a program's workers as fibers of one host thread, which take turns where they
// would wait on a GPU; and what goes on beside them: bulk copies, products of the tensor cores.
//
// What a GPU may do late is done late here: a copy lands some turns after it was issued, a
// product is computed when its warp waits for it, and whose turn it is, is drawn at random. So a
// wait or a barrier that is missing shows as a wrong result for some seed. Memory itself is in
// order: a fence that is missing does not show.
#pragma once
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

namespace emulation {

constexpr uint32_t kThreads = 384, kMaxCluster = 2, kMaxRanks = 8;
constexpr uint32_t kPlace = 24;  // bits of a shared address below the worker's place in its cluster

struct Words {
  uint64_t word[6];
};

// Threads that wait for one another; whether any of them brought true.
struct Meeting {
  uint32_t turn = 0, come = 0;
  bool any[2] = {};
  bool meet(uint32_t count, bool value);
};

struct Worker {
  uint32_t index, count, place, rank;
  uint8_t* shared;
  Worker* cluster[kMaxCluster];
  Meeting all, named[16], *pair;
  struct {
    uint32_t turn = 0, come = 0;
    Words words[2][32];
  } warps[kThreads / 32];
};

// A product of 64 x columns x 16, of which each thread of a warpgroup has columns / 2 sums.
struct Product {
  float* sums;
  uint64_t a, b;
  int columns;
  bool adds, is_half;
};
struct Copy {
  uint8_t* to;
  const uint8_t* from;
  uint32_t bytes;
};

struct Thread {
  ucontext_t context;
  Worker* worker;
  uint32_t id;
  bool is_over = false;
  const uint32_t* turn = nullptr;  // waits until this is no longer `seen`
  uint32_t seen = 0;
  Product products[64];
  uint32_t count = 0, ends[8], groups = 0;  // of the products; behind the last one of each group
  Copy copies[64];
  uint32_t copied = 0;
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

// Each lane's words, once all lanes of the warp have brought theirs.
const Words* exchange(Words words);

// A shared address, of any worker of the cluster.
inline uint8_t* at(uint32_t place, uint32_t address) {
  return own->worker->cluster[place]->shared + (address & ((1u << kPlace) - 1));
}
inline uint8_t* at(uint32_t address) { return at(own->worker->place, address); }
// Where a byte of rows of 128 lies, as bulk copies and the tensor cores have them.
inline uint32_t swizzled(uint32_t address) { return address ^ ((address >> 7 & 7) << 4); }

// An mbarrier, in the 8 bytes that it has on the GPU.
struct Barrier {
  int16_t pending;
  uint16_t expected;
  int32_t bytes_and_phase;  // bytes still to come * 2 + phase

  bool is_over(uint32_t phase) const { return uint32_t(bytes_and_phase & 1) != phase; }
  void arrive(uint32_t count) {
    go_on();
    pending = int16_t(pending - int(count));
    if (pending < 0) fail("more arrivals at an mbarrier than it expects");
    settle();
  }
  void expect(uint32_t bytes) { bytes_and_phase += int32_t(bytes) * 2; }
  void complete(uint32_t bytes) {
    bytes_and_phase -= int32_t(bytes) * 2;
    settle();
  }

 private:
  void settle() {
    if (pending > 0 || bytes_and_phase >> 1 != 0) return;
    pending = int16_t(expected);
    bytes_and_phase ^= 1;
  }
};
static_assert(sizeof(Barrier) == 8);
inline Barrier& barrier(uint32_t address) { return *reinterpret_cast<Barrier*>(at(address)); }

// A tensor map as emulation.py makes it.
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
};
void later(const Later& what);

// Bytes between global memory and a box in shared memory, in every worker of `mask`.
void move_box(const Later& box, bool is_store);

}  // namespace emulation
