// Where clusters draw tickets: the channel in shared memory through which the producer thread of a
// cluster's first worker sends each ticket to that of the second, one at a time.
#pragma once
#include "worker/work_ring.cuh"

namespace etc {

// Whether clusters draw tickets for their units of the tensor lane.
template <class Program>
constexpr bool kDrawsTickets = Program::kDynamic || Program::kTensorTickets;

class TicketChannel {
  static constexpr u32 kOffset = Shared::kWorkOffset + WorkRing::kBytes;
 public:
  static constexpr u32 kBytes = 24;

  ETC_DEVICE explicit TicketChannel(u32 base) : base_(base + kOffset) {}

  ETC_DEVICE void init() const {
    ptx::mbarrier_init(full(), 1);
    ptx::mbarrier_init(empty(), 1);
  }

  // The n-th ticket; false if the program was aborted.
  template <class Program>
  ETC_DEVICE bool send(const Run<Program>& run, u32 n, u32 ticket) const {
    if (!wait_received(run, n)) return false;
    write(n, ticket);
    return true;
  }
  // Waits until the second worker has received the first n tickets.
  template <class Program>
  ETC_DEVICE bool wait_received(const Run<Program>& run, u32 n) const {
    return wait(run, empty(), (n & 1) ^ 1);
  }
  // The same without waiting; false if the previous ticket has not been received. It has been once
  // its unit is running.
  ETC_DEVICE bool try_send(u32 n, u32 ticket) const {
    const bool is_empty = ptx::mbarrier_try_wait(empty(), (n & 1) ^ 1);
    if (is_empty) write(n, ticket);
    return is_empty;
  }
  // NOTE: only the ticket is sent. Both producer threads acquire the unit themselves.
  template <class Program>
  ETC_DEVICE bool receive(const Run<Program>& run, u32 n, u32& ticket) const {
    ptx::mbarrier_arrive_expect(full(), 4);
    if (!wait(run, full(), n & 1)) return false;
    ticket = ptx::load_shared(word(n));
    ptx::mbarrier_arrive_cluster(empty(), 0);
    return true;
  }

 private:
  template <class Program>
  ETC_DEVICE static bool wait(const Run<Program>& run, u32 barrier, u32 parity) {
    const bool arrived = wait_mbarrier(run, barrier, parity);
    if (!arrived) report(run, kInWorker);
    return arrived;
  }
  ETC_DEVICE void write(u32 n, u32 ticket) const {
    ptx::store_async_cluster(word(n), ticket, full(), 1);
  }
  // `full` and `word` are in the second worker's memory, `empty` in the first one's.
  // NOTE: two words alternate. The arrival at `empty` and the next ticket may overtake the load of
  // a ticket; the ticket after next cannot, since it is sent only after this one was used.
  ETC_DEVICE u32 full() const { return base_; }
  ETC_DEVICE u32 empty() const { return base_ + 8; }
  ETC_DEVICE u32 word(u32 n) const { return base_ + 16 + 4 * (n & 1); }

  u32 base_;
};

}  // namespace etc
