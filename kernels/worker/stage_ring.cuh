// The ring of stages: shared memory that a loading thread and, for some tasks, gathering warps
// fill, and that the compute warps empty.
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

  ETC_DEVICE static u32 full(u32 base, u32 n) {
    return base + Shared::kStageBarrierOffset + 8 * (n % kSlots);
  }
  ETC_DEVICE static u32 empty(u32 base, u32 n) { return full(base, n) + 8 * kSlots; }
  ETC_DEVICE static u32 parity(u32 n) { return n / kSlots & 1; }
  ETC_DEVICE static Stage stage(u32 base, u32 n, u32 place) {
    return {base + SharedOf<Program>::kStageOffset + place, full(base, n)};
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
    const u32 at = Ring::place(head, bytes);
    head = at + bytes;
    ++n;
    return at;
  }
};

// Where stages go that are written, and which stages must be empty before. `Begins` stores where
// outstanding stages begin: put(n, at) and get(n).
template <class Program, class Begins>
class StagePlacer {
  using Ring = StageRing<Program>;
  // Whether to keep full_ and lap_: a fast path for runs of stages of one size.
  // NOTE: not in programs with loops. Each call that loads has its own copy of this code, and the
  // body of a loop like a decoder's layer exceeds the instruction cache already.
  static constexpr bool kCountsLaps = !Program::TensorCalls::kHasLoops;

 public:
  ETC_DEVICE explicit StagePlacer(Begins begins) : begins_(begins) {}

  ETC_DEVICE StageCursor<Program> cursor() const { return {n_, head_}; }
  ETC_DEVICE u32 outstanding() const { return n_ - oldest_; }

  // The first `count` stages, from the ring's first byte on.
  ETC_DEVICE void first(u32 bytes, u32 count) {
    if constexpr (Ring::kUniform == 0) {
      if constexpr (kCountsLaps) start_laps(bytes);
      for (; n_ < count; ++n_, head_ += bytes) begins_.put(n_, head_);
    }
    n_ = count;
  }

  // The next stage: calls wait_empty(n) for each stage n that has to be empty first, in order.
  // False if one returns false.
  template <class WaitEmpty>
  ETC_DEVICE bool next(u32 bytes, u32& at, WaitEmpty wait_empty) {
    if constexpr (Ring::kUniform > 0) {
      at = n_ % Ring::kCount * Ring::kUniform;
      if (n_ - oldest_ == Ring::kCount && !wait_empty(oldest_++)) return false;
      ++n_;
      return true;
    }
    if (kCountsLaps && bytes != bytes_) [[unlikely]] start_laps(bytes);
    at = Ring::place(head_, bytes);
    if (kCountsLaps && full_ > 0) [[likely]] {
      if (n_ - oldest_ == full_ && !wait_empty(oldest_++)) return false;
    } else {
      while (oldest_ != n_ && !(n_ - oldest_ < Ring::kSlots && fits(at, bytes, tail_))) {
        if (!wait_empty(oldest_)) return false;
        if (++oldest_ != n_) tail_ = begins_.get(oldest_);
      }
      if (oldest_ == n_) tail_ = at;
      if constexpr (kCountsLaps) {
        if (at == 0) {
          full_ = minimum(lap_, Ring::kSlots);
          lap_ = 1;
        } else if (lap_ > 0) {
          ++lap_;
        }
      }
    }
    begins_.put(n_, at);
    head_ = at + bytes;
    ++n_;
    return true;
  }

  // Whether the next stage, of `bytes`, continues a run of equal ones, see full_.
  static constexpr bool kHasLaps = kCountsLaps && Ring::kUniform == 0;
  ETC_DEVICE bool is_in_laps(u32 bytes) const {
    return kHasLaps && bytes == bytes_ && full_ > 0;
  }
  // If is_in_laps(): next() for `count` stages; calls begin(n, at) for each. By one thread of a
  // warp.
  // NOTE: a short loop. The loading thread's time for a stage bounds many tiles: with one more
  // ptx::uniform() in the loop, some take a sixth longer.
  template <class WaitEmpty, class Begin>
  ETC_DEVICE bool next_in_laps(u32 bytes, u32 count, WaitEmpty wait_empty, Begin begin) {
    u32 n = ptx::uniform(n_), head = ptx::uniform(head_), oldest = ptx::uniform(oldest_);
    const u32 full = ptx::uniform(full_), end = n + count;
#pragma unroll 1
    for (; n != end; ++n) {
      const u32 at = Ring::place(head, bytes);
      if (n - oldest == full && !wait_empty(oldest++)) return false;
      begins_.put(n, at);
      if constexpr (kDrawsTickets<Program>) n_ = n + 1, oldest_ = oldest;  // for outstanding()
      begin(n, at);
      head = at + bytes;
    }
    n_ = n, head_ = head, oldest_ = oldest;
    return true;
  }

  // Calls wait_empty(n) for the outstanding stages up to `last`, in order. False if one returns
  // false.
  template <class WaitEmpty>
  ETC_DEVICE bool pass(u32 last, WaitEmpty wait_empty) {
    while (oldest_ != n_ && i32(last - oldest_) >= 0) {
      if (!wait_empty(oldest_)) return false;
      if (++oldest_ != n_ && Ring::kUniform == 0) tail_ = begins_.get(oldest_);
    }
    return true;
  }

  // Whether a next stage would leave stage n, and all after it, in place.
  ETC_DEVICE bool has_room_after(u32 n, u32 bytes) const {
    if (n == n_) return true;
    if constexpr (Ring::kUniform > 0) return n_ - n < Ring::kCount;
    return n_ - n < Ring::kSlots && fits(Ring::place(head_, bytes), bytes, begins_.get(n));
  }

  // Passes over stages that other threads fill.
  ETC_DEVICE void skip(RingStages stages) {
    if constexpr (Ring::kUniform > 0) {
      n_ += stages.count;
      if (n_ - oldest_ > Ring::kCount) oldest_ = n_ - Ring::kCount;
      return;
    }
    if (stages.count > Ring::kSlots) {  // only the last kSlots can be outstanding
      const u32 count = stages.count - Ring::kSlots;
      bytes_ = full_ = 0;
      head_ = head_after(count, stages.bytes);
      oldest_ = n_ += count;
      stages.count = Ring::kSlots;
    }
    u32 at;
    const auto is_empty = [](u32) { return true; };
    for (u32 i = 0; i < stages.count; ++i) next(stages.bytes, at, is_empty);
  }

 private:
  ETC_DEVICE void start_laps(u32 bytes) {
    if (full_ > 0) tail_ = begins_.get(oldest_);
    bytes_ = bytes, lap_ = 0;
    full_ = n_ > 0 ? 0 : minimum(Ring::kBytes / bytes, Ring::kSlots);
  }
  // Whether a stage at `at` overlaps none of the outstanding ones, of which the oldest begins at
  // `tail` and the newest ends at head_. They lie in [tail, head_), or around the ring's end.
  ETC_DEVICE bool fits(u32 at, u32 bytes, u32 tail) const {
    const bool is_after = at >= head_, is_before = at + bytes <= tail;
    return tail < head_ ? is_after || is_before : is_after && is_before;
  }
  ETC_DEVICE u32 head_after(u32 count, u32 bytes) const {
    const u32 here = (Ring::kBytes - head_) / bytes;  // before the ring's end
    if (count <= here) return head_ + count * bytes;
    return ((count - here - 1) % (Ring::kBytes / bytes) + 1) * bytes;
  }

  u32 n_ = 0, head_ = 0;     // stages so far, and where the last one ends
  u32 oldest_ = 0, tail_ = 0;  // the oldest outstanding stage, and where it begins
  // Stages of `bytes_` follow each other. lap_: how many since the last one at the ring's first
  // byte, or 0. full_: 0 until all outstanding stages have that size, then how many the ring holds:
  // a new stage waits only for the one `full_` before it. tail_ and lap_ are not updated meanwhile.
  u32 bytes_ = 0, lap_ = 0, full_ = 0;
  Begins begins_;
};

// The loading thread's view of the ring.
template <class Program>
class StageLoader {
  using Ring = StageRing<Program>;
  struct Begins {
    u32 base;
    ETC_DEVICE u32 word(u32 n) const {
      return base + Shared::kBeginOffset + 8 * (n % Ring::kSlots);
    }
    ETC_DEVICE void put(u32 n, u32 at) const { ptx::store_shared8(word(n), at, 0); }
    ETC_DEVICE u32 get(u32 n) const { return ptx::load_shared(word(n)); }
  };

 public:
  ETC_DEVICE explicit StageLoader(u32 base) : base_(base), placer_(Begins{base}) {}

  // The worker's shared memory.
  ETC_DEVICE u32 base() const { return base_; }

  // Begins the next stage of `bytes` once there is room: bulk copies will write `expected` bytes.
  // Unless is_gathered, no gathering warps write to it. False if the program was aborted.
  ETC_DEVICE bool begin(
      const Run<Program>& run, u32 bytes, u32 expected, bool is_gathered, Stage& stage) {
    const u32 n = placer_.cursor().n;
    u32 at;
    if (!placer_.next(bytes, at, wait_empty(run))) return false;
    stage = start(n, at, expected, is_gathered);
    return true;
  }

  static constexpr bool kHasLaps = StagePlacer<Program, Begins>::kHasLaps;
  ETC_DEVICE bool is_in_laps(u32 bytes) const { return placer_.is_in_laps(bytes); }
  // If is_in_laps(bytes): begin() for `count` stages that are not gathered. Calls f(stage, i) for
  // the i-th one once it has begun. False if the program was aborted.
  template <class F>
  ETC_DEVICE bool begin_in_laps(
      const Run<Program>& run, u32 bytes, u32 expected, u32 count, F f) {
    u32 i = 0;
    return placer_.next_in_laps(bytes, count, wait_empty(run), [&](u32 n, u32 at) ETC_INLINE {
      f(start(n, at, expected, false), i++);
    });
  }

  // For load_first(): begin() of the ring's next stage, of which none is to be emptied before.
  // NOTE: with as few instructions before the first loads as possible.
  ETC_DEVICE Stage begin_first(u32 bytes, u32 expected) {
    const u32 n = first_++;
    return start(n, n * bytes, expected, false);
  }
  // For load(): the number of the task's stages that load_first() has begun.
  ETC_DEVICE u32 take_first(u32 bytes) {
    const u32 count = first_;
    if (count > 0) placer_.first(bytes, count);
    first_ = 0;
    return count;
  }

  // Stages that load_ahead() begins, of one task.
  ETC_DEVICE void start_ahead() { begun_ = placer_.cursor(); }
  ETC_DEVICE void add_ahead() { ++ahead_; }
  ETC_DEVICE bool has_room_ahead(u32 bytes) const {
    return placer_.has_room_after(begun_.n, bytes);
  }
  // For load(): whether load_ahead() has begun the next stage, and if so, that stage.
  ETC_DEVICE bool is_begun() const { return ahead_ > 0; }
  ETC_DEVICE Stage next_begun(u32 bytes) {
    --ahead_;
    const u32 n = begun_.n;
    return Ring::stage(base_, n, begun_.next(bytes));
  }

  // Stages that have been begun and may not be empty.
  ETC_DEVICE u32 outstanding() const { return placer_.outstanding(); }
  // Waits until there are fewer than `count` of them. False if the program was aborted.
  ETC_DEVICE bool wait_outstanding(const Run<Program>& run, u32 count) {
    if (outstanding() < count) return true;
    return placer_.pass(placer_.cursor().n - count, wait_empty(run));
  }

 private:
  // Stage n, at `at`, which is empty: bulk copies will write `expected` bytes.
  ETC_DEVICE Stage start(u32 n, u32 at, u32 expected, bool is_gathered) const {
    const Stage stage = Ring::stage(base_, n, at);
    ptx::mbarrier_arrive_expect(stage.full, expected);
    if (Ring::kGatherers > 0 && !is_gathered) {
      ptx::mbarrier_arrive_many(stage.full, Ring::kGatherers);
    }
    return stage;
  }
  ETC_DEVICE auto wait_empty(const Run<Program>& run) const {
    return [&run, base = base_](u32 n) ETC_INLINE {
      return wait_mbarrier(run, Ring::empty(base, n), Ring::parity(n));
    };
  }

  u32 base_;
  StagePlacer<Program, Begins> placer_;
  u32 ahead_ = 0;               // stages that load_ahead() has begun and load() has not seen
  StageCursor<Program> begun_;  // the position of the first of them
  u32 first_ = 0;               // stages that load_first() has begun and load() has not seen
};

// A gathering warp's view of the ring.
template <class Program>
class StageGatherer {
  using Ring = StageRing<Program>;
  struct Begins {  // each lane has one
    u32 at = 0;
    ETC_DEVICE void put(u32 n, u32 begin) {
      if (threadIdx.x % 32 == n % Ring::kSlots) at = begin;
    }
    ETC_DEVICE u32 get(u32 n) const { return __shfl_sync(~0u, at, n % Ring::kSlots); }
  };

 public:
  ETC_DEVICE explicit StageGatherer(u32 base) : base_(base), placer_(Begins{}) {}

  // The next stage, once there is room. False if the program was aborted.
  // NOTE: the loader has placed all stages of earlier tasks before it publishes this one: so the
  // parity of an outstanding stage is that of its last use.
  ETC_DEVICE bool begin(const Run<Program>& run, u32 bytes, Stage& stage) {
    const u32 n = placer_.cursor().n;
    u32 at;
    const bool has_room = placer_.next(bytes, at, [&](u32 oldest) {
      return __all_sync(
                 ~0u, wait_mbarrier(run, Ring::empty(base_, oldest), Ring::parity(oldest))) != 0;
    });
    if (has_room) stage = Ring::stage(base_, n, at);
    return has_room;
  }

  // Passes over the stages of a task that the loader fills alone.
  ETC_DEVICE void skip(RingStages stages) { placer_.skip(stages); }

 private:
  u32 base_;
  StagePlacer<Program, Begins> placer_;
};

// A compute warp's view of the ring.
template <class Program>
class StageReader {
  using Ring = StageRing<Program>;

 public:
  explicit ETC_DEVICE StageReader(u32 base) : base_(base) {}

  // The ring's first byte in matrix descriptors, in units of 16 bytes.
  // NOTE: these have 14 bits for it.
  ETC_DEVICE u32 descriptor_base() const {
    return ((base_ + SharedOf<Program>::kStageOffset) & 0x3ffffu) >> 4;
  }

  // The shared address of a stage that begins `at` bytes after the ring's first one.
  ETC_DEVICE u32 address(u32 at) const { return base_ + SharedOf<Program>::kStageOffset + at; }
  // The mbarrier of the stage that next() returned last.
  ETC_DEVICE u32 full() const { return Ring::full(base_, cursor_.n - 1); }

  // Stages that next() has passed.
  ETC_DEVICE u32 count() const { return cursor_.n; }
  // Where the next stage begins, from the ring's first byte on. It may be read after wait_full().
  ETC_DEVICE u32 next(u32 bytes) { return cursor_.next(bytes); }
  // next() if `is_next`, otherwise `at`; without a branch.
  ETC_DEVICE u32 next_if(bool is_next, u32 bytes, u32 at) {
    StageCursor<Program> cursor = cursor_;
    const u32 next = cursor.next(bytes);
    cursor_.n = is_next ? cursor.n : cursor_.n;
    cursor_.head = is_next ? cursor.head : cursor_.head;
    return is_next ? next : at;
  }
  // Whether the stage that next() will return has arrived; by whole warps.
  ETC_DEVICE bool has_next() const {
    const u32 n = cursor_.n;
    return __all_sync(~0u, ptx::mbarrier_test(Ring::full(base_, n), Ring::parity(n))) != 0;
  }
  // Waits for the stage that next() returned last. False if the program was aborted.
  ETC_DEVICE bool wait_full(const Run<Program>& run) {
    const u64 begin = Program::kTrace ? ptx::global_timer() : 0;
    const bool came = wait_mbarrier(run, full(), Ring::parity(cursor_.n - 1));
    if constexpr (Program::kTrace) empty_ns_ += u32(ptx::global_timer() - begin);
    return came;
  }
  // The nanoseconds in which wait_full() waited since the last call; 0 if not traced.
  ETC_DEVICE u32 take_empty() {
    const u32 taken = empty_ns_;
    empty_ns_ = 0;
    return Program::kTrace ? taken : 0;
  }
  // A whole warp, once, after it has read stage n, counted from 0.
  ETC_DEVICE void release(u32 n) const {
    const u32 lane = threadIdx.x % 32, empty = Ring::empty(base_, n);
    if (lane == 0) ptx::mbarrier_arrive(empty);
  }

 private:
  u32 base_;
  u32 empty_ns_ = 0;
  StageCursor<Program> cursor_;
};

}  // namespace etc
