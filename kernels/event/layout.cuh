// The layout of events and control words. `etc_dist/codegen/layout.py` has the same numbers;
// every program asserts that they agree.
#pragma once
#include "common/types.cuh"

namespace etc {

// The head of each rank's symmetric block. `started[r]` is the last epoch that near rank r has
// begun, counted from the first one of the host; `abort` is set by a rank whose wait times out. Two
// areas of event counters follow: epoch e counts in area e % 2 and clears the other one, which no
// peer accesses before this rank has started epoch e + 1.
// For far ranks, whose memory is not mapped: they add to all eight bytes of `abort`. Two areas of
// 64-bit words for their notifications follow the counters, then a word for each host: the epochs
// that this rank's partner there has begun.
struct SymmetricHead {
  u32 started[64];
  u32 abort, abort_high;
  u32 unused[190];
};
static_assert(sizeof(SymmetricHead) == 1024);
constexpr u32 kAbortOffset = 64 * sizeof(u32);

// The blocks of a host's ranks, of which `first` is the lowest; 0 for all other ranks.
template <int kNear>
struct NearBlocks {
  u64 block[kNear];
  u64 first;

  ETC_DEVICE bool has(i32 rank) const { return u32(rank) - u32(first) < u32(kNear); }
  ETC_DEVICE u64 operator[](i32 rank) const {
    return has(rank) ? block[u32(rank) - u32(first)] : 0;
  }
  // Whether `rank` is one of them, or a partner of `own_rank`.
  ETC_DEVICE bool reaches(i32 rank, i32 own_rank) const {
    return has(rank) || (rank - own_rank) % kNear == 0;
  }
};

// The record of a failed wait, from which the host makes an error.
struct Fault {
  u32 worker, lane, call, task, event, index, have, want;
};
constexpr u32 kMaxFaults = 64;

// A rank's control block, in local memory.
struct Control {
  u32 epoch;          // of the run that begins; the last worker to read it increments it
  u32 begun;          // workers that have read it
  u32 tickets[2][2];  // next tickets of dynamically claimed lanes, by epoch parity
  u32 faults;         // number of faults; the first kMaxFaults are recorded
  u32 shape;          // number of the shape of the run that failed
  u32 resident;       // workers that had begun when a wait failed; 0 if none failed
  u32 ended;          // workers that have ended, in programs with far ranks
  u32 unused[6];
  Fault fault[kMaxFaults];
};
static_assert(sizeof(Control) == 64 + kMaxFaults * 32);

enum LaneId : u32 { kTensorLane = 0, kTransferLane = 1 };
// The kind of a fault. The first three are waits: for an element of an event tensor, for a peer to
// start, for another role of the worker. kOutOfRange: an index loaded from a runtime tensor is out
// of range.
enum WaitKind : u32 {
  kEventWait = 0,
  kPeerStart = 1,
  kInsideWorker = 2,
  kOutOfRange = 3
};

}  // namespace etc
