// Whether the tasks of a run are to run: what the producer thread waits for after its first loads.
#pragma once
#include "worker/ticket_channel.cuh"

namespace etc {

class Admission {
  static constexpr u32 kOffset = Shared::kWorkOffset + WorkRing::kBytes + TicketChannel::kBytes;
  static_assert(kOffset + 16 <= Shared::kWorkOffset + Shared::kWorkBytes);

 public:
  ETC_DEVICE explicit Admission(u32 base) : barrier_(base + kOffset) {}

  ETC_DEVICE void init() const { ptx::mbarrier_init(barrier_, 1); }
  // One thread.
  ETC_DEVICE void publish(bool runs) const {
    ptx::store_shared8(barrier_ + 8, runs, 0);
    ptx::mbarrier_arrive(barrier_);
  }
  ETC_DEVICE bool wait() const {
    while (!ptx::mbarrier_try_wait(barrier_, 0)) {
    }
    return ptx::load_shared(barrier_ + 8) != 0;
  }

 private:
  u32 barrier_;
};

}  // namespace etc
