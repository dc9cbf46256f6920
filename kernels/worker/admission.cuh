// Two waits of the producer thread: until all mbarriers are initialized, and until it is known
// whether the tasks of the run are to run, and its epoch.
#pragma once
#include "worker/work_ring.cuh"

namespace etc {

// Whether workers draw tickets for their units of the tensor lane.
template <class Program>
constexpr bool kDrawsTickets = Program::kDynamic || Program::kTensorTickets;

class Admission {
  static constexpr u32 kOffset = Shared::kWorkOffset + WorkRing::kBytes;
  static_assert(kOffset + 28 <= Shared::kWorkOffset + Shared::kWorkBytes);

 public:
  ETC_DEVICE explicit Admission(u32 base) : barrier_(base + kOffset) {}

  // The producer thread.
  ETC_DEVICE void init() const {
    ptx::mbarrier_init(barrier_, 1);
    ptx::mbarrier_init(initialized(), 1);
  }
  // One thread, once all mbarriers are initialized.
  ETC_DEVICE void publish_initialized() const { ptx::mbarrier_arrive(initialized()); }
  ETC_DEVICE void wait_initialized() const {
    while (!ptx::mbarrier_try_wait(initialized(), 0)) {
    }
  }
  // One thread of another warp.
  ETC_DEVICE void publish(bool is_running, u32 epoch) const {
    ptx::store_shared8(barrier_ + 8, is_running, epoch);
    ptx::mbarrier_arrive(barrier_);
  }
  ETC_DEVICE bool wait() const {
    while (!ptx::mbarrier_try_wait(barrier_, 0)) {
    }
    return ptx::load_shared(barrier_ + 8) != 0;
  }
  // One thread of another warp, before all of these meet: when this worker began, the low word of the
  // clock in ns. NOTE: a register that keeps it while tiles are computed makes some programs spill.
  ETC_DEVICE void store_start() const {
    ptx::store_shared(barrier_ + 24, u32(ptx::global_timer()));
  }
  ETC_DEVICE u32 start() const { return ptx::load_shared(barrier_ + 24); }
  // After wait(): the epoch of publish().
  ETC_DEVICE u32 epoch() const { return ptx::load_shared(barrier_ + 12); }

 private:
  ETC_DEVICE u32 initialized() const { return barrier_ + 16; }

  u32 barrier_;
};

}  // namespace etc
