// Where events and control words lie. `etc_dist/codegen/layout.py` holds the same numbers;
// every program asserts that both agree.
#pragma once
#include "common/types.cuh"

namespace etc {

// The head of each rank's symmetric block. `started[r]` is the last epoch that rank r has
// begun; `abort` is set by whoever gives up waiting. Two areas of event counters follow:
// epoch e counts in area e % 2 and clears the other one, which no peer touches before this
// rank has started epoch e + 1.
struct SymmetricHead {
  u32 started[64];
  u32 abort;
  u32 unused[191];
};
static_assert(sizeof(SymmetricHead) == 1024);
constexpr u32 kAbortOffset = 64 * sizeof(u32);

// A wait that was given up, for the host to put into words.
struct Fault {
  u32 worker, lane, call, task, event, index, have, want;
};
constexpr u32 kMaxFaults = 64;

// One rank's own control block, in its local memory.
struct Control {
  u32 epoch;          // of the run that begins; the last worker to know it adds one
  u32 begun;          // workers that know it
  u32 tickets[2][2];  // drawn of a lane whose units go by ticket; by epoch parity
  u32 faults;         // faults seen; the first kMaxFaults are recorded
  u32 shape;          // the number of the shape that the faulty run had
  u32 unused[8];
  Fault fault[kMaxFaults];
};
static_assert(sizeof(Control) == 64 + kMaxFaults * 32);

enum LaneId : u32 { kTensorLane = 0, kTransferLane = 1 };
// What a wait was for, where it was not an element of an event tensor. The last two are no
// waits: kOutOfRange: an index loaded from a runtime tensor leads out of a tensor or event tensor;
// kNotEmpty: a task has something to write that must not, as one before it has not.
enum WaitKind : u32 {
  kEventWait = 0,
  kPeerStart = 1,
  kInsideWorker = 2,
  kOutOfRange = 3,
  kNotEmpty = 4
};

}  // namespace etc
