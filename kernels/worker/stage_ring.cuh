// The ring of stages: shared memory that a loading thread and, for some tasks, gathering warps
// fill, and that the compute warps empty.
#pragma once
#include "worker/stage_placer.cuh"

namespace etc {

// The loading thread's view of the ring.
template <class Program>
class StageLoader {
  using Ring = StageRing<Program>;
  struct Begins {
    u32 base;
    ETC_DEVICE u32 word(u32 n) const {
      return base + Shared::kBeginOffset + 8 * (n % Ring::kSlots);
    }
    ETC_DEVICE void put(u32 n, u32 place) const { ptx::store_shared8(word(n), place, 0); }
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
    u32 place;
    if (!placer_.next(bytes, place, wait_empty(run))) return false;
    stage = start(n, place, expected, is_gathered);
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
    return placer_.next_in_laps(bytes, count, wait_empty(run), [&](u32 n, u32 place) ETC_INLINE {
      f(start(n, place, expected, false), i++);
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
  ETC_DEVICE void start_ahead() { ahead_cursor_ = placer_.cursor(); }
  ETC_DEVICE void add_ahead() { ++ahead_; }
  ETC_DEVICE bool has_room_ahead(u32 bytes) const {
    return placer_.has_room_after(ahead_cursor_.n, bytes);
  }
  // For load(): whether load_ahead() has begun the next stage, and if so, that stage.
  ETC_DEVICE bool is_begun() const { return ahead_ > 0; }
  ETC_DEVICE Stage next_begun(u32 bytes) {
    --ahead_;
    const u32 n = ahead_cursor_.n;
    return Ring::stage(base_, n, ahead_cursor_.next(bytes));
  }

  // Stages that have been begun and may not be empty.
  ETC_DEVICE u32 outstanding() const { return placer_.outstanding(); }
  // Waits until there are fewer than `count` of them. False if the program was aborted.
  ETC_DEVICE bool wait_outstanding(const Run<Program>& run, u32 count) {
    if (outstanding() < count) return true;
    return placer_.pass(placer_.cursor().n - count, wait_empty(run));
  }

 private:
  // Stage n, at `place`, which is empty: bulk copies will write `expected` bytes.
  ETC_DEVICE Stage start(u32 n, u32 place, u32 expected, bool is_gathered) const {
    const Stage stage = Ring::stage(base_, n, place);
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
  StageCursor<Program> ahead_cursor_;  // the position of the first of them
  u32 first_ = 0;               // stages that load_first() has begun and load() has not seen
};

// A gathering warp's view of the ring.
template <class Program>
class StageGatherer {
  using Ring = StageRing<Program>;
  struct Begins {  // each lane has one
    u32 place = 0;
    ETC_DEVICE void put(u32 n, u32 stage_place) {
      if (threadIdx.x % 32 == n % Ring::kSlots) place = stage_place;
    }
    ETC_DEVICE u32 get(u32 n) const { return __shfl_sync(~0u, place, n % Ring::kSlots); }
  };

 public:
  ETC_DEVICE explicit StageGatherer(u32 base) : base_(base), placer_(Begins{}) {}

  // The next stage, once there is room. False if the program was aborted.
  // NOTE: the loader has placed all stages of earlier tasks before it publishes this one: so the
  // parity of an outstanding stage is that of its last use.
  ETC_DEVICE bool begin(const Run<Program>& run, u32 bytes, Stage& stage) {
    const u32 n = placer_.cursor().n;
    u32 place;
    const bool has_room = placer_.next(bytes, place, [&](u32 oldest) {
      return __all_sync(
                 ~0u, wait_mbarrier(run, Ring::empty(base_, oldest), Ring::parity(oldest))) != 0;
    });
    if (has_room) stage = Ring::stage(base_, n, place);
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

  // The shared address of a stage that begins `place` bytes after the ring's first one.
  ETC_DEVICE u32 address(u32 place) const {
    return base_ + SharedOf<Program>::kStageOffset + place;
  }
  // The mbarrier of the stage that next() returned last.
  ETC_DEVICE u32 full() const { return Ring::full(base_, cursor_.n - 1); }

  // Stages that next() has passed.
  ETC_DEVICE u32 count() const { return cursor_.n; }
  // Where the next stage begins, from the ring's first byte on. It may be read after wait_full().
  ETC_DEVICE u32 next(u32 bytes) { return cursor_.next(bytes); }
  // next() if `is_next`, otherwise `place`; without a branch.
  ETC_DEVICE u32 next_if(bool is_next, u32 bytes, u32 place) {
    StageCursor<Program> cursor = cursor_;
    const u32 next = cursor.next(bytes);
    cursor_.n = is_next ? cursor.n : cursor_.n;
    cursor_.head = is_next ? cursor.head : cursor_.head;
    return is_next ? next : place;
  }
  // Whether the stage that next() will return has arrived; by whole warps.
  ETC_DEVICE bool has_next() const {
    const u32 n = cursor_.n;
    return __all_sync(~0u, ptx::mbarrier_test(Ring::full(base_, n), Ring::parity(n))) != 0;
  }
  // Waits for the stage that next() returned last. False if the program was aborted.
  ETC_DEVICE bool wait_full(const Run<Program>& run) {
    const u64 begin = Program::kTrace ? ptx::global_timer() : 0;
    const bool is_full = wait_mbarrier(run, full(), Ring::parity(cursor_.n - 1));
    if constexpr (Program::kTrace) empty_ns_ += u32(ptx::global_timer() - begin);
    return is_full;
  }
  // The nanoseconds in which wait_full() waited since the last call; 0 if not traced.
  ETC_DEVICE u32 take_empty() {
    const u32 empty_ns = empty_ns_;
    empty_ns_ = 0;
    return Program::kTrace ? empty_ns : 0;
  }
  // A whole warp, once, after it has read stage n, counted from 0.
  ETC_DEVICE void release(u32 n) const { release_if(threadIdx.x % 32 == 0, n); }
  // The same, by the thread with is_needed; without a branch.
  ETC_DEVICE void release_if(bool is_needed, u32 n) const {
    const u32 empty = Ring::empty(base_, n);
    if (is_needed) ptx::mbarrier_arrive(empty);
  }

 private:
  u32 base_;
  u32 empty_ns_ = 0;
  StageCursor<Program> cursor_;
};

}  // namespace etc
