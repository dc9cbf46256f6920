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

  // Of items first, first + kParts and so on. num_consumers: warps that consume.
  template <u32 kParts>
  ETC_DEVICE void init(u32 first, u32 num_consumers) const {
#pragma unroll
    for (u32 n = 0; n < kEntries; n += kParts) {
      if (n + first >= kEntries) break;
      ptx::mbarrier_init(full(n + first), 1);
      ptx::mbarrier_init(empty(n + first), num_consumers);
    }
  }

  // One thread; `item_idx` counts items.
  ETC_DEVICE void publish(u32& item_idx, WorkItem item) const {
    wait_empty(item_idx);
    ptx::store_shared16(entry(item_idx), {u32(item.task), item.size, item.call, 0});
    ptx::mbarrier_arrive(full(item_idx));
    ++item_idx;
  }

  // The words of an item, before it is published.
  template <class Program, u32 kWords>
  ETC_DEVICE void write_data(u32 item_idx, const u32 (&words)[kWords]) const {
    wait_empty(item_idx);
#pragma unroll
    for (u32 i = 0; i < kWords; i += 2) {
      const u32 second = i + 1 < kWords ? words[i + 1] : 0;
      ptx::store_shared8(data<Program>(item_idx) + 4 * i, words[i], second);
    }
  }
  // Their shared address.
  template <class Program>
  ETC_DEVICE u32 data(u32 item_idx) const {
    using Offsets = SharedOf<Program>;
    const u32 offset = Offsets::kDataOffset - Shared::kWorkOffset;
    return base_ + offset + 4 * Offsets::kDataWords * (item_idx % kEntries);
  }

  // For a producer that must not run ahead; num_consumers: the warps that call begin().
  ETC_DEVICE void init_begun(u32 num_consumers) const {
    ptx::mbarrier_init(begun(), num_consumers);
  }
  // A whole warp, when it begins the task that it has consumed.
  ETC_DEVICE void begin() const {
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(begun());
  }
  // The producer, before it publishes an item: waits until all have begun the one before.
  ETC_DEVICE void wait_begun(u32 item_idx) const {
    while (item_idx > 0 && !ptx::mbarrier_try_wait(begun(), (item_idx - 1) & 1)) {
    }
  }

  ETC_DEVICE bool is_full(u32 item_idx) const {
    return ptx::mbarrier_try_wait(full(item_idx), item_idx / kEntries & 1);
  }
  // A whole warp, once entry n is full.
  ETC_DEVICE WorkItem next(u32 item_idx) const {
    const uint4 words = ptx::load_shared16(entry(item_idx));
    return WorkItem{i32(words.x), words.y, words.z};
  }
  // A whole warp.
  ETC_DEVICE WorkItem consume(u32& item_idx) const {
    while (!is_full(item_idx)) {
    }
    const WorkItem item = next(item_idx);
    release(item_idx);
    ++item_idx;
    return item;
  }
  // The same without the release, which follows once the warp has read the item's words.
  ETC_DEVICE WorkItem read(u32& item_idx) const {
    while (!is_full(item_idx)) {
    }
    return next(item_idx++);
  }
  ETC_DEVICE void release(u32 item_idx) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(empty(item_idx));
  }

 private:
  ETC_DEVICE void wait_empty(u32 item_idx) const {
    while (!ptx::mbarrier_try_wait(empty(item_idx), (item_idx / kEntries & 1) ^ 1)) {
    }
  }
  ETC_DEVICE u32 full(u32 item_idx) const { return base_ + 8 * (item_idx % kEntries); }
  ETC_DEVICE u32 empty(u32 item_idx) const { return base_ + 8 * (kEntries + item_idx % kEntries); }
  ETC_DEVICE u32 entry(u32 item_idx) const { return base_ + 16 * (kEntries + item_idx % kEntries); }
  ETC_DEVICE u32 begun() const { return base_ + 16 * (2 * kEntries); }

  u32 base_;
};

}  // namespace etc
