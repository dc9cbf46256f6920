// Bulk copies, and the mbarriers that count them. Part of run.cpp.
#pragma once
#include "memory.h"

BEGIN_UNTRACKED

namespace emulation {

static List<AsyncOp> in_flight;

static Barrier& barrier(const Worker& worker, uint32_t address) {
  return *reinterpret_cast<Barrier*>(at(worker, address, sizeof(Barrier), sizeof(Barrier)));
}
static uint8_t& number(Worker& worker, uint32_t address) {
  const uint32_t place = address / sizeof(Barrier);
  if (place >= sizeof worker.number) {
    fail("an mbarrier outside of the first 1024 bytes of shared memory");
  }
  return worker.number[place];
}
// The phase of an mbarrier whose initialization is in the view `known`.
static Phase& phase(Worker& worker, uint32_t address, const AgentView& known) {
  if (worker.left == 0) fail("an access to the shared memory of a worker that has ended");
  const uint8_t n = number(worker, address);
  if (n == 0) fail("an mbarrier that is not initialized");
  Phase& found = worker.phases[n - 1];
  if (!known.covers(found.init.agent, found.init.clock, kSeen)) {
    fail("a data race: an mbarrier is used and initialized in no order");
  }
  return found;
}
static void settle(Barrier& barrier, Phase& phase) {
  if (barrier.pending < 0) fail("more arrivals at an mbarrier than it expects");
  if (barrier.pending > 0 || barrier.bytes_and_phase >> 1 > 0) return;
  if (barrier.bytes_and_phase >> 1 < 0) fail("more bytes at an mbarrier than it expects");
  barrier.pending = int16_t(barrier.expected);
  barrier.bytes_and_phase ^= 1;
  View* const all = phase.sum.take();
  raise(all->clock[phase.agent], phase.clock++);
  put(phase.known, all);
}
void init_barrier(uint32_t address, uint32_t count) {
  Worker& worker = *own->worker;
  barrier(worker, address) = {int16_t(count), uint16_t(count), 0};
  if (worker.barriers == kBarriers) fail("more than 96 mbarriers");
  number(worker, address) = uint8_t(worker.barriers + 1);
  Phase& made = worker.phases[worker.barriers];
  made.init = own->known, made.init.view = nullptr;
  if (made.clock == 0) made.clock = 1;
  made.agent = uint32_t(&worker - workers) * kAgents + kFirstBarrier + worker.barriers++;
}
void arrive(Worker& worker, uint32_t address, uint32_t count) {
  Barrier& at = barrier(worker, address);
  Phase& now = phase(worker, address, own->known);
  note_progress();
  now.sum.add(own->known);
  at.pending = int16_t(at.pending - int(count));
  settle(at, now);
}
void expect(uint32_t address, uint32_t bytes) {
  barrier(*own->worker, address).bytes_and_phase += int32_t(bytes) * 2;
}
// is_once: without waiting.
bool try_wait(uint32_t address, uint32_t parity, bool is_once) {
  Worker& worker = *own->worker;
  const Barrier& at = barrier(worker, address);
  const Phase& now = phase(worker, address, own->known);
  const auto is_over = [&] { return uint32_t(at.bytes_and_phase & 1) != parity; };
  is_once || is_over() ? may_yield() : poll(&now.clock);
  if (!is_over()) return false;
  own->known.acquire(now.known);
  return true;
}
// Completes `bytes` of an operation issued with `known`, or an arrival if `bytes` is 0.
static void complete(Worker& worker, uint32_t address, uint32_t bytes, const AgentView& known) {
  Barrier& at = barrier(worker, address);
  Phase& now = phase(worker, address, known);
  at.bytes_and_phase -= int32_t(bytes) * 2;
  if (bytes == 0) --at.pending;
  settle(at, now);
}
// An access that completes with an mbarrier's phase.
static Access counted(
    Worker& worker, uint32_t address, const AgentView& known, Kind kind, bool writes) {
  const Phase& now = phase(worker, address, known);
  worker.last_access[now.agent] = now.clock;
  return {&known, now.agent, now.clock, kind, writes};
}

// Most asynchronous operations take a few turns, some take many.
static uint64_t due_turn() { return turns + draw(draw(4) == 0 ? 100 : 4); }
void issue_async(AsyncOp what) {
  what.due = due_turn(), what.known = own->known.issue();
  in_flight.add(what);
  note_progress();
}

static uint32_t box_rows(const AsyncOp& box) {
  uint32_t rows = 1;
  for (uint32_t i = 1; i < box.map->axes; ++i) rows *= box.map->side[i];
  return rows;
}
// Calls row(r, inside, global, first, count) for each row of a box, of 128 bytes: whether it is
// inside of the tensor, and then its `count` elements from `first` on.
template <class Row>
static void each_row(const AsyncOp& box, Row row) {
  const Map& map = *box.map;
  const uint32_t item = map.itemsize;
  if (map.side[0] * item != 128) fail("a bulk copy of a box whose rows are not 128 bytes");
  for (uint32_t r = 0; r < box_rows(box); ++r) {
    bool is_inside = true;
    uint64_t at = map.pointer;
    for (uint32_t i = 1, rest = r; i < map.axes; rest /= map.side[i], ++i) {
      const int64_t k = box.first[i] + int64_t(rest % map.side[i]);
      is_inside = is_inside && k >= 0 && k < map.extent[i];
      at += uint64_t(k) * map.pitch[i];
    }
    const int64_t x = box.first[0], least = x < 0 ? -x : 0;
    const int64_t most = map.extent[0] - x < map.side[0] ? map.extent[0] - x : map.side[0];
    const bool is_there = is_inside && least < most;
    uint8_t* from = nullptr;
    if (is_there) from = global(at + uint64_t(x + least) * item, uint64_t(most - least) * item, 1);
    row(r, is_there, from, uint32_t(least), uint32_t(most - least));
  }
}
static void load_box(const AsyncOp& box) {
  const uint32_t item = box.map->itemsize;
  Worker& worker = *box.worker;
  at(worker, box.shared, box_rows(box) * 128, 128);
  const Access reads = counted(worker, box.barrier, box.known, kAsync, false);
  const Access writes = counted(worker, box.barrier, box.known, kAsync, true);
  access_shared(worker, box.shared, box_rows(box) * 128, writes);
  each_row(box, [&](uint32_t r, bool is_there, uint8_t* from, uint32_t first, uint32_t count) {
    uint8_t row[128] = {};
    if (is_there) access_global(from, count * item, reads);
    if (is_there) memcpy(row + first * item, from, count * item);
    for (uint32_t i = 0; i < 128; i += 16) {
      memcpy(worker.shared + swizzled(box.shared + r * 128 + i), row + i, 16);
    }
  });
}
static void load_bytes(const AsyncOp& what) {
  Worker& worker = *what.worker;
  uint8_t* const from = global(what.global, what.count, 16);
  uint8_t* const to = at(worker, what.shared, what.count, 16);
  access_global(from, what.count, counted(worker, what.barrier, what.known, kAsync, false));
  access_shared(
      worker, what.shared, what.count, counted(worker, what.barrier, what.known, kAsync, true));
  memcpy(to, from, what.count);
}

static void complete_op(const AsyncOp& what) {
  if (what.kind == AsyncOp::kLoad) {
    load_box(what);
    complete(*what.worker, what.barrier, box_rows(what) * 128, what.known);
  } else if (what.kind == AsyncOp::kBytes) {
    load_bytes(what);
    complete(*what.worker, what.barrier, what.count, what.known);
  } else {
    for (uint32_t i = 0; i < what.count; ++i) {
      const Copy& c = what.copies[i];
      const Access reads = counted(*what.worker, what.barrier, c.known, kPlain, false);
      const Access writes = counted(*what.worker, what.barrier, c.known, kPlain, true);
      if (c.bytes > 0) access_global(c.from, c.bytes, reads);
      access_shared(*what.worker, c.shared, 16, writes);
      memset(c.to, 0, 16);
      memcpy(c.to, c.from, c.bytes);
      drop(c.known.view);
    }
    complete(*what.worker, what.barrier, 0, what.known);
    free(what.copies);
  }
  drop(what.known.view);
}
// Completes the operations that are due.
static void complete_due() {
  for (uint32_t i = 0; i < in_flight.count;) {
    if (in_flight.items[i].due <= turns) {
      const AsyncOp what = in_flight.items[i];
      in_flight.remove(i);
      complete_op(what);
    } else {
      ++i;
    }
  }
}

}  // namespace emulation

END_UNTRACKED
