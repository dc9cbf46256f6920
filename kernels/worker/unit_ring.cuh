// How the leading thread of a worker tells the other warps which unit comes next.
#pragma once
#include "worker/shared.cuh"

namespace etc {

// A unit of the tensor lane; `size` is what its engine has to know of it. -1: no more. An empty
// unit may come with a run of others, for the storing warp alone: from `run` units on. Of such a
// one, in a dynamic program, that warp hears the ticket.
struct Announcement {
  static constexpr u32 kRun = 1u << 31;
  i32 unit;
  u32 size, ticket = 0;

  ETC_DEVICE u32 run() const { return size & kRun ? size - kRun : 0; }
};

// A ring in shared memory. Every listener hears every announcement, also after an abort:
// so all warps of a worker go through the same units and leave together.
class UnitRing {
  static constexpr u32 kEntries = 8;

 public:
  static constexpr u32 kBytes = kEntries * 32 + 8;
  static_assert(kBytes <= Shared::kRingBytes);

  ETC_DEVICE explicit UnitRing(u32 base) : base_(base + Shared::kRingOffset) {}

  // `listeners` counts the warps that will listen.
  ETC_DEVICE void init(u32 listeners) const {
    for (u32 n = 0; n < kEntries; ++n) {
      ptx::mbarrier_init(told(n), 1);
      ptx::mbarrier_init(heard(n), listeners);
    }
  }

  // One thread; `n` counts announcements.
  ETC_DEVICE void tell(u32& n, Announcement a) const {
    while (!ptx::mbarrier_try_wait(heard(n), (n / kEntries & 1) ^ 1)) {
    }
    ptx::store_shared8(entry(n), u32(a.unit), a.size);
    if (a.run() > 0) ptx::store_shared8(ticket(n), a.ticket, 0);
    ptx::mbarrier_arrive(told(n));
    ++n;
  }

  // For a leader who must not run ahead: of `listeners`, those that begin what they hear.
  ETC_DEVICE void init_begun(u32 listeners) const { ptx::mbarrier_init(begun(), listeners); }
  // A whole warp, once it has heard a unit and begins it.
  ETC_DEVICE void begin() const {
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(begun());
  }
  // The leader, before it tells announcement n: all have begun the one before.
  ETC_DEVICE void wait_begun(u32 n) const {
    while (n > 0 && !ptx::mbarrier_try_wait(begun(), (n - 1) & 1)) {
    }
  }

  ETC_DEVICE bool is_told(u32 n) const {
    return ptx::mbarrier_try_wait(told(n), n / kEntries & 1);
  }
  // A whole warp, once it is told.
  ETC_DEVICE Announcement next(u32 n) const {
    const uint2 words = ptx::load_shared8(entry(n));
    return Announcement{i32(words.x), words.y};
  }
  // A whole warp.
  template <bool kTicket = false>
  ETC_DEVICE Announcement listen(u32& n) const {
    while (!is_told(n)) {
    }
    Announcement heard_now = next(n);
    if (kTicket && heard_now.run() > 0) heard_now.ticket = ptx::load_shared(ticket(n));
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(heard(n));
    ++n;
    return heard_now;
  }

 private:
  ETC_DEVICE u32 told(u32 n) const { return base_ + 8 * (n % kEntries); }
  ETC_DEVICE u32 heard(u32 n) const { return base_ + 8 * (kEntries + n % kEntries); }
  ETC_DEVICE u32 entry(u32 n) const { return base_ + 8 * (2 * kEntries + n % kEntries); }
  ETC_DEVICE u32 ticket(u32 n) const { return base_ + 8 * (3 * kEntries + n % kEntries); }
  ETC_DEVICE u32 begun() const { return base_ + 8 * (4 * kEntries); }

  u32 base_;
};

}  // namespace etc
