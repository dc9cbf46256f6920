// How, where clusters draw tickets, the leading thread of a cluster's first worker tells that of
// the second which ticket the cluster has drawn: one at a time, through shared memory.
#pragma once
#include "worker/unit_ring.cuh"

namespace etc {

class Mailbox {
  static constexpr u32 kOffset = Shared::kRingOffset + UnitRing::kBytes;
  static_assert(UnitRing::kBytes + 24 <= Shared::kRingBytes);

 public:
  ETC_DEVICE explicit Mailbox(u32 base) : base_(base + kOffset) {}

  ETC_DEVICE void init() const {
    ptx::mbarrier_init(given(), 1);
    ptx::mbarrier_init(taken(), 1);
  }

  // The n-th ticket; false if the program was aborted.
  template <class Program>
  ETC_DEVICE bool give(const Run<Program>& run, u32 n, u32 ticket) const {
    if (!wait(run, taken(), (n & 1) ^ 1)) return false;
    pass_on(n, ticket);
    return true;
  }
  // The same, if the one before has been taken, as it has where its unit is under way. Whether
  // it has.
  ETC_DEVICE bool give_now(u32 n, u32 ticket) const {
    const bool is_taken = ptx::mbarrier_try_wait(taken(), (n & 1) ^ 1);
    if (is_taken) pass_on(n, ticket);
    return is_taken;
  }
  // NOTE: nothing but the ticket is passed on. Both leaders acquire the unit by themselves.
  template <class Program>
  ETC_DEVICE bool take(const Run<Program>& run, u32 n, u32& ticket) const {
    ptx::mbarrier_arrive_expect(given(), 4);
    if (!wait(run, given(), n & 1)) return false;
    ticket = ptx::load_shared(word(n));
    ptx::mbarrier_arrive_cluster(taken(), 0);
    return true;
  }

 private:
  template <class Program>
  ETC_DEVICE static bool wait(const Run<Program>& run, u32 barrier, u32 parity) {
    const bool came = wait_mbarrier(run, barrier, parity);
    if (!came) report(run, kInWorker);
    return came;
  }
  ETC_DEVICE void pass_on(u32 n, u32 ticket) const {
    ptx::store_async_cluster(word(n), ticket, given(), 1);
  }
  // `given` and `word` of the second worker are used, `taken` of the first.
  // NOTE: two words in turn. The load of a ticket may be overtaken by the arrival at `taken`
  // and by the next ticket, but not by the one after: for that, this one was needed.
  ETC_DEVICE u32 given() const { return base_; }
  ETC_DEVICE u32 taken() const { return base_ + 8; }
  ETC_DEVICE u32 word(u32 n) const { return base_ + 16 + 4 * (n & 1); }

  u32 base_;
};

}  // namespace etc
