// The ring through which a worker's producer thread publishes tasks to the other warps.
#pragma once
#include "worker/computes.cuh"

namespace etc {

// A task of the tensor lane: its number in its call, -1 after the last one; the `size` of the
// function's roles; and the position of the call in the lane. For some functions an item carries
// words for the compute threads.
// NOTE: the warps would otherwise search for the call of a unit, twice for each task.
struct WorkItem {
  i32 task;
  u32 size, call;
};
template <class Program, class Call>
ETC_DEVICE WorkItem work_item(i32 task, u32 size = 0) {
  return {task, size, u32(Program::TensorCalls::template index<Call>())};
}

// Every consumer reads every item, also after an abort: so all warps of a worker process the same
// tasks and leave together.
class WorkRing {
  static constexpr u32 kEntries = Shared::kWorkItems;

 public:
  static constexpr u32 kBytes = kEntries * 32 + 8;
  static_assert(kBytes <= Shared::kWorkBytes);

  ETC_DEVICE explicit WorkRing(u32 base) : base_(base + Shared::kWorkOffset) {}

  // Of items first, first + kParts and so on. `consumers`: the number of warps that consume.
  template <u32 kParts>
  ETC_DEVICE void init(u32 first, u32 consumers) const {
#pragma unroll
    for (u32 n = 0; n < kEntries; n += kParts) {
      if (n + first >= kEntries) break;
      ptx::mbarrier_init(full(n + first), 1);
      ptx::mbarrier_init(empty(n + first), consumers);
    }
  }

  // One thread; `n` counts items.
  ETC_DEVICE void publish(u32& n, WorkItem a) const {
    wait_empty(n);
    ptx::store_shared16(entry(n), {u32(a.task), a.size, a.call, 0});
    ptx::mbarrier_arrive(full(n));
    ++n;
  }

  // The words of item n; before it is published.
  template <class Program, u32 kWords>
  ETC_DEVICE void write_data(u32 n, const u32 (&words)[kWords]) const {
    wait_empty(n);
#pragma unroll
    for (u32 i = 0; i < kWords; i += 2) {
      ptx::store_shared8(data<Program>(n) + 4 * i, words[i], i + 1 < kWords ? words[i + 1] : 0);
    }
  }
  // Their shared address.
  template <class Program>
  ETC_DEVICE u32 data(u32 n) const {
    using Offsets = SharedOf<Program>;
    const u32 offset = Offsets::kDataOffset - Shared::kWorkOffset;
    return base_ + offset + 4 * Offsets::kDataWords * (n % kEntries);
  }

  // For a producer that must not run ahead; `consumers`: the warps that call begin().
  ETC_DEVICE void init_begun(u32 consumers) const { ptx::mbarrier_init(begun(), consumers); }
  // A whole warp, when it begins the task that it has consumed.
  ETC_DEVICE void begin() const {
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(begun());
  }
  // The producer, before it publishes item n: waits until all have begun the one before.
  ETC_DEVICE void wait_begun(u32 n) const {
    while (n > 0 && !ptx::mbarrier_try_wait(begun(), (n - 1) & 1)) {
    }
  }

  ETC_DEVICE bool is_full(u32 n) const {
    return ptx::mbarrier_try_wait(full(n), n / kEntries & 1);
  }
  // A whole warp, once entry n is full.
  ETC_DEVICE WorkItem next(u32 n) const {
    const uint4 words = ptx::load_shared16(entry(n));
    return WorkItem{i32(words.x), words.y, words.z};
  }
  // A whole warp.
  ETC_DEVICE WorkItem consume(u32& n) const {
    while (!is_full(n)) {
    }
    const WorkItem item = next(n);
    release(n);
    ++n;
    return item;
  }
  // The same without the release, which follows once the warp has read the item's words.
  ETC_DEVICE WorkItem read(u32& n) const {
    while (!is_full(n)) {
    }
    return next(n++);
  }
  ETC_DEVICE void release(u32 n) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(empty(n));
  }

 private:
  ETC_DEVICE void wait_empty(u32 n) const {
    while (!ptx::mbarrier_try_wait(empty(n), (n / kEntries & 1) ^ 1)) {
    }
  }
  ETC_DEVICE u32 full(u32 n) const { return base_ + 8 * (n % kEntries); }
  ETC_DEVICE u32 empty(u32 n) const { return base_ + 8 * (kEntries + n % kEntries); }
  ETC_DEVICE u32 entry(u32 n) const { return base_ + 16 * (kEntries + n % kEntries); }
  ETC_DEVICE u32 begun() const { return base_ + 16 * (2 * kEntries); }

  u32 base_;
};

}  // namespace etc
