// Turns of the two compute warpgroups at the tensor cores.
#pragma once
#include "ptx/barrier.cuh"

namespace etc {

// The named barrier for the turn of the first warpgroup; the next one is that of the second.
constexpr u32 kTurnBarrier = 6;

// Both warpgroups call begin(), then wait() and pass() for each turn, equally often.
// NOTE: the tensor cores divide their time among warpgroups that multiply at once: both would end,
// and then add their sums, at the same time. So one begins when the other has multiplied half of its
// part, and adds while the other multiplies.
struct WgmmaTurns {
  u32 wg;

  // Before the first turn of a task, which is that of the first warpgroup.
  ETC_DEVICE void begin() const {
    if (wg == 1) ptx::named_barrier_arrive<256>(kTurnBarrier);
  }
  // Before the first wgmma of a turn.
  ETC_DEVICE void wait() const { ptx::named_barrier<256>(kTurnBarrier + wg); }
  // The second warpgroup has the last turn of a task.
  ETC_DEVICE void pass(bool is_last) const {
    if (!is_last || wg == 0) ptx::named_barrier_arrive<256>(kTurnBarrier + (wg ^ 1));
  }
};

}  // namespace etc
