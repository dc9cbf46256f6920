// A worker's shared memory: barriers, the ring of announced units, then the buffers of the
// engine, or words that a task of the tensor lane may use as it likes.
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

  // Named in what is left out where no call multiplies.
  template <class Call, class Run, class Coord>
  static u32 size(const Run&, const Coord&);
  template <class Call, class Run, class Coord, class Loaded>
  bool load(const Run&, const Coord&, u32, u32&, Loaded) const;
  template <class Call, class Run, class Coord>
  bool gather(const Run&, const Coord&, u32, u32&) const;
  static u32 num_stages(u32 size);
};

}  // namespace etc
