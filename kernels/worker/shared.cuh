// A worker's shared memory: barriers, the ring of work items, then the buffers of the engine, which
// are scratch memory for other tasks of the tensor lane.
#pragma once
#include "event/wait.cuh"

namespace etc {

struct Shared {
  static constexpr u32 kBarrierBytes = 512, kRingBytes = 512, kScratchBytes = 24576;
  static constexpr u32 kRingOffset = kBarrierBytes;
  static constexpr u32 kEngineOffset = kRingOffset + kRingBytes;
};

// The engine of a program without matrix multiplication.
struct NoEngine {
  static constexpr u32 kScratchOffset = Shared::kEngineOffset;
  static constexpr u32 kSharedBytes = kScratchOffset + Shared::kScratchBytes;
  u32 base;

  // Declared for code that is discarded in programs without matrix multiplication.
  template <class Call, class Run, class Coord>
  static u32 size(const Run&, const Coord&);
  template <class Call, class Run, class Coord, class Loaded>
  bool load(const Run&, const Coord&, u32, u32&, Loaded) const;
  template <class Call, class Run, class Coord>
  bool gather(const Run&, const Coord&, u32, u32&) const;
  static u32 num_stages(u32 size);
};

}  // namespace etc
