// A worker's shared memory: mbarriers and small values, the ring of work items, the ring of
// stages, then the buffer.
#pragma once
#include "event/wait.cuh"

namespace etc {

// Offsets. The host computes Program::kSharedBytes and Program::kBufferBytes with the same
// kStageOffset.
struct Shared {
  static constexpr u32 kStageBarrierOffset = 0;  // of the stage ring
  static constexpr u32 kControlOffset = 256;     // of the Compute objects of a program
  static constexpr u32 kWorkOffset = 512;        // work items, and the channel for tickets
  static constexpr u32 kBeginOffset = 1024;      // where outstanding stages begin
  static constexpr u32 kDataOffset = 1152;       // words that work items carry
  static constexpr u32 kStageOffset = 2048;

  static constexpr u32 kWorkBytes = kBeginOffset - kWorkOffset;
  static constexpr u32 kDataBytes = kStageOffset - kDataOffset;
  // Of the buffer, at the end of shared memory: scratch memory of bodies has this many bytes.
  static constexpr u32 kScratchBytes = 24576;
};

template <class Program>
constexpr u32 kBufferOffset = Program::kSharedBytes - Program::kBufferBytes;

}  // namespace etc
