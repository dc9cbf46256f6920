// A worker's shared memory: mbarriers and small values, the ring of work items, the ring of
// stages, then the buffer.
#pragma once
#include "event/wait.cuh"

namespace etc {

// Offsets that are the same in all programs; SharedOf in worker/computes.cuh has the others.
struct Shared {
  static constexpr u32 kStageBarrierOffset = 0;  // of the stage ring
  static constexpr u32 kWorkOffset = 256;        // work items
  static constexpr u32 kBeginOffset = 576;       // where outstanding stages begin
  static constexpr u32 kControlOffset = 704;     // of the Compute objects of a program

  static constexpr u32 kWorkBytes = kBeginOffset - kWorkOffset;
  static constexpr u32 kWorkItems = 8;       // that the ring of work items holds
  static constexpr u32 kMostDataWords = 28;  // that a work item carries
  // Scratch memory of bodies, in the buffer at the end of shared memory. The buffer may be smaller
  // if a program has no bodies on the tensor lane.
  static constexpr u32 kScratchBytes = 24576;
};

template <class Program>
constexpr u32 kBufferOffset = Program::kSharedBytes - Program::kBufferBytes;

}  // namespace etc
