// The places of stages in their ring: which one a stage has, and which stages must be empty before.
//
// Stages lie one after the other. A stage begins where the one before ends if it fits there, else
// at the beginning of the ring: loader, gatherers and compute warps each compute its place from the
// sizes alone. The n-th stage has the mbarriers full(n % kSlots) and empty(n % kSlots), whose
// parity is n / kSlots % 2.
#pragma once
#include "worker/admission.cuh"
#include "worker/computes.cuh"

namespace etc {

// Shared-memory addresses of a stage and of its mbarrier.
struct Stage {
  u32 at, full;
};

// kStageBytes of all functions with the load role, if they agree and it is known; else 0.
template <class... Calls>
ETC_DEVICE constexpr u32 uniform_stage_bytes(CallList<Calls...>) {
  u32 bytes = 0;
  bool is_uniform = true;
  const auto add = [&](auto call) {
    using Call = decltype(call);
    if constexpr (has_role<Call>(kLoadRole)) {
      constexpr u32 kBytes = Call::template Function<Call>::kUniformStageBytes;
      is_uniform = is_uniform && kBytes > 0 && (bytes == 0 || bytes == kBytes);
      bytes = kBytes;
    }
  };
  (add(Calls{}), ...);
  return is_uniform ? bytes : 0;
}

// Whether a call's first loads wait for nothing: no event, no loaded count.
template <class Call>
constexpr bool kLoadsAtOnce = has_role<Call>(kLoadRole) && Call::kWaits == 0 && !Call::kLoads;
template <class First, class... Others>
constexpr bool first_loads_at_once(CallList<First, Others...>) {
  return kLoadsAtOnce<First>;
}
constexpr bool first_loads_at_once(CallList<>) { return false; }
template <class... Calls>
constexpr int num_loading_at_once(CallList<Calls...>) {
  return (0 + ... + int(kLoadsAtOnce<Calls>));
}
// Whether the first loads of a launch begin before it is known whether the launch is skipped.
template <class Program>
constexpr bool kLoadsEarly = !kDrawsTickets<Program> && !Program::TensorCalls::kHasLoops &&
                             first_loads_at_once(typename Program::TensorCalls{});

template <class Program>
struct StageRing {
  using Calls = typename Program::TensorCalls;
  static constexpr u32 kSlots = 16;  // stages between the loader and the compute warps at most
  static constexpr u32 kBytes =
      Calls::kRoles == 0 ? 0 : kBufferOffset<Program> - SharedOf<Program>::kStageOffset;
  static_assert(16 * kSlots <= Shared::kWorkOffset - Shared::kStageBarrierOffset);
  static_assert(8 * kSlots <= Shared::kControlOffset - Shared::kBeginOffset);

  // Where all stages have the same size, stage n has place n % kCount: less to compute between the
  // end of one stage and the beginning of the next.
  static constexpr u32 kUniform = uniform_stage_bytes(Calls{});
  static constexpr u32 kCount =
      kUniform == 0 ? 0 : kBytes / kUniform < kSlots ? kBytes / kUniform : kSlots;

  // Threads that arrive at a full stage after their copies. Where a function does not gather, the
  // loader arrives for them.
  static constexpr u32 kGatherers = Calls::kRoles & kGatherRole ? 64 : 0;

  ETC_DEVICE static u32 full(u32 base, u32 stage_idx) {
    return base + Shared::kStageBarrierOffset + 8 * (stage_idx % kSlots);
  }
  ETC_DEVICE static u32 empty(u32 base, u32 stage_idx) {
    return full(base, stage_idx) + 8 * kSlots;
  }
  ETC_DEVICE static u32 parity(u32 stage_idx) { return stage_idx / kSlots & 1; }
  ETC_DEVICE static Stage stage(u32 base, u32 stage_idx, u32 place) {
    return {base + SharedOf<Program>::kStageOffset + place, full(base, stage_idx)};
  }
  // Where a stage begins after one that ends at `head`.
  ETC_DEVICE static u32 place(u32 head, u32 bytes) { return head + bytes <= kBytes ? head : 0; }

  // One thread: slots first, first + kParts and so on.
  template <u32 kParts>
  ETC_DEVICE static void init(u32 base, u32 first) {
#pragma unroll
    for (u32 n = 0; n < kSlots; n += kParts) {
      if (n + first >= kSlots) break;
      ptx::mbarrier_init(full(base, n + first), 1 + kGatherers);
      ptx::mbarrier_init(empty(base, n + first), 8);
    }
  }
};

// A position in the sequence of stages: `n` stages, of which the last one ends at `head`.
template <class Program>
struct StageCursor {
  u32 n = 0, head = 0;

  // Where the next stage begins.
  ETC_DEVICE u32 next(u32 bytes) {
    using Ring = StageRing<Program>;
    if constexpr (Ring::kUniform > 0) return n++ % Ring::kCount * Ring::kUniform;
    const u32 place = Ring::place(head, bytes);
    head = place + bytes;
    ++n;
    return place;
  }
};

// Where stages go that are written, and which stages must be empty before. `Begins` stores where
// outstanding stages begin: put(n, place) and get(n).
template <class Program, class Begins>
class StagePlacer {
  using Ring = StageRing<Program>;
  // Whether to keep full_ and lap_: a fast path for runs of stages of one size.
  // NOTE: not in programs with loops. Each call that loads has its own copy of this code, and the
  // body of a loop like a decoder's layer exceeds the instruction cache already.
  static constexpr bool kCountsLaps = !Program::TensorCalls::kHasLoops;

 public:
  ETC_DEVICE explicit StagePlacer(Begins begins) : begins_(begins) {}

  ETC_DEVICE StageCursor<Program> cursor() const { return {num_stages_, head_}; }
  ETC_DEVICE u32 outstanding() const { return num_stages_ - oldest_; }

  // The first `count` stages, from the ring's first byte on.
  ETC_DEVICE void first(u32 bytes, u32 count) {
    if constexpr (Ring::kUniform == 0) {
      if constexpr (kCountsLaps) start_laps(bytes);
      for (; num_stages_ < count; ++num_stages_, head_ += bytes) begins_.put(num_stages_, head_);
    }
    num_stages_ = count;
  }

  // The next stage: calls wait_empty(n) for each stage n that has to be empty first, in order.
  // False if one returns false.
  template <class WaitEmpty>
  ETC_DEVICE bool next(u32 bytes, u32& place, WaitEmpty wait_empty) {
    if constexpr (Ring::kUniform > 0) {
      place = num_stages_ % Ring::kCount * Ring::kUniform;
      if (num_stages_ - oldest_ == Ring::kCount && !wait_empty(oldest_++)) return false;
      ++num_stages_;
      return true;
    }
    if (kCountsLaps && bytes != bytes_) [[unlikely]] start_laps(bytes);
    place = Ring::place(head_, bytes);
    if (kCountsLaps && full_ > 0) [[likely]] {
      if (num_stages_ - oldest_ == full_ && !wait_empty(oldest_++)) return false;
    } else {
      while (oldest_ != num_stages_ &&
             !(num_stages_ - oldest_ < Ring::kSlots && fits(place, bytes, tail_))) {
        if (!wait_empty(oldest_)) return false;
        if (++oldest_ != num_stages_) tail_ = begins_.get(oldest_);
      }
      if (oldest_ == num_stages_) tail_ = place;
      if constexpr (kCountsLaps) {
        if (place == 0) {
          full_ = minimum(lap_, Ring::kSlots);
          lap_ = 1;
        } else if (lap_ > 0) {
          ++lap_;
        }
      }
    }
    begins_.put(num_stages_, place);
    head_ = place + bytes;
    ++num_stages_;
    return true;
  }

  // Whether the next stage, of `bytes`, continues a run of equal ones, see full_.
  static constexpr bool kHasLaps = kCountsLaps && Ring::kUniform == 0;
  ETC_DEVICE bool is_in_laps(u32 bytes) const {
    return kHasLaps && bytes == bytes_ && full_ > 0;
  }
  // If is_in_laps(): next() for `count` stages; calls begin(n, place) for each. By one thread of a
  // warp.
  // NOTE: a short loop. The loading thread's time for a stage bounds many tiles: with one more
  // ptx::uniform() in the loop, some take a sixth longer.
  template <class WaitEmpty, class Begin>
  ETC_DEVICE bool next_in_laps(u32 bytes, u32 count, WaitEmpty wait_empty, Begin begin) {
    u32 stage_idx = ptx::uniform(num_stages_), head = ptx::uniform(head_);
    u32 oldest = ptx::uniform(oldest_);
    const u32 full = ptx::uniform(full_), end = stage_idx + count;
#pragma unroll 1
    for (; stage_idx != end; ++stage_idx) {
      const u32 place = Ring::place(head, bytes);
      if (stage_idx - oldest == full && !wait_empty(oldest++)) return false;
      begins_.put(stage_idx, place);
      if constexpr (kDrawsTickets<Program>) {
        num_stages_ = stage_idx + 1, oldest_ = oldest;  // for outstanding()
      }
      begin(stage_idx, place);
      head = place + bytes;
    }
    num_stages_ = stage_idx, head_ = head, oldest_ = oldest;
    return true;
  }

  // Calls wait_empty(n) for the outstanding stages up to `last`, in order. False if one returns
  // false.
  template <class WaitEmpty>
  ETC_DEVICE bool pass(u32 last, WaitEmpty wait_empty) {
    while (oldest_ != num_stages_ && i32(last - oldest_) >= 0) {
      if (!wait_empty(oldest_)) return false;
      if (++oldest_ != num_stages_ && Ring::kUniform == 0) tail_ = begins_.get(oldest_);
    }
    return true;
  }

  // Whether a next stage would leave stage `stage_idx`, and all after it, in place.
  ETC_DEVICE bool has_room_after(u32 stage_idx, u32 bytes) const {
    if (stage_idx == num_stages_) return true;
    if constexpr (Ring::kUniform > 0) return num_stages_ - stage_idx < Ring::kCount;
    return num_stages_ - stage_idx < Ring::kSlots &&
        fits(Ring::place(head_, bytes), bytes, begins_.get(stage_idx));
  }

  // Passes over stages that other threads fill.
  ETC_DEVICE void skip(RingStages stages) {
    if constexpr (Ring::kUniform > 0) {
      num_stages_ += stages.count;
      if (num_stages_ - oldest_ > Ring::kCount) oldest_ = num_stages_ - Ring::kCount;
      return;
    }
    if (stages.count > Ring::kSlots) {  // only the last kSlots can be outstanding
      const u32 count = stages.count - Ring::kSlots;
      bytes_ = full_ = 0;
      head_ = head_after(count, stages.bytes);
      oldest_ = num_stages_ += count;
      stages.count = Ring::kSlots;
    }
    u32 place;
    const auto is_empty = [](u32) { return true; };
    for (u32 i = 0; i < stages.count; ++i) next(stages.bytes, place, is_empty);
  }

 private:
  ETC_DEVICE void start_laps(u32 bytes) {
    if (full_ > 0) tail_ = begins_.get(oldest_);
    bytes_ = bytes, lap_ = 0;
    full_ = num_stages_ > 0 ? 0 : minimum(Ring::kBytes / bytes, Ring::kSlots);
  }
  // Whether a stage at `place` overlaps none of the outstanding ones, of which the oldest begins at
  // `tail` and the newest ends at head_. They lie in [tail, head_), or around the ring's end.
  ETC_DEVICE bool fits(u32 place, u32 bytes, u32 tail) const {
    const bool is_after = place >= head_, is_before = place + bytes <= tail;
    return tail < head_ ? is_after || is_before : is_after && is_before;
  }
  ETC_DEVICE u32 head_after(u32 count, u32 bytes) const {
    const u32 here = (Ring::kBytes - head_) / bytes;  // before the ring's end
    if (count <= here) return head_ + count * bytes;
    return ((count - here - 1) % (Ring::kBytes / bytes) + 1) * bytes;
  }

  u32 num_stages_ = 0, head_ = 0;  // stages so far, and where the last one ends
  u32 oldest_ = 0, tail_ = 0;      // the oldest outstanding stage, and where it begins
  // Stages of `bytes_` follow each other. lap_: how many since the last one at the ring's first
  // byte, or 0. full_: 0 until all outstanding stages have that size, then how many the ring holds:
  // a new stage waits only for the one `full_` before it. tail_ and lap_ are not updated meanwhile.
  u32 bytes_ = 0, lap_ = 0, full_ = 0;
  Begins begins_;
};

}  // namespace etc
