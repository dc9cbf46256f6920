#pragma once
#include "common/operand.cuh"

BEGIN_UNTRACKED_CALLS

namespace etc::ptx {

inline emulation::AsyncOp box_copy(u32 shared, const Box& box, u32 barrier, u32 mask, bool halves) {
  emulation::AsyncOp what{emulation::AsyncOp::kLoad, emulation::own->worker};
  what.shared = shared & ((1u << emulation::kPlace) - 1), what.mask = mask;
  what.barrier = barrier & ((1u << emulation::kPlace) - 1);
  what.map = reinterpret_cast<const emulation::Map*>(box.map);
  const i32 plain[5] = {box.x, box.y, box.z}, of_halves[5] = {box.x, 0, 0, box.y / 8, box.z};
  __builtin_memcpy(what.first, halves ? of_halves : plain, sizeof plain);
  if (what.map->axes != (halves ? 5 : 3)) {
    emulation::fail("a tensor map whose number of axes differs from that of the copy");
  }
  return what;
}
inline u32 own_place() { return 1u << emulation::own->worker->place; }

inline void load_box_multicast(u32 shared, const Box& box, u32 barrier, u16 mask) {
  emulation::issue_async(box_copy(shared, box, barrier, mask, false));
}
inline void load_box_of_halves_multicast(u32 shared, const Box& box, u32 barrier, u16 mask) {
  emulation::issue_async(box_copy(shared, box, barrier, mask, true));
}
inline void prefetch_map(const Box&) {}
inline void load_box(u32 shared, const Box& box, u32 barrier) {
  load_box_multicast(shared, box, barrier, u16(own_place()));
}
inline void load_box(u32 shared, const Box& box, u32 barrier, CachePolicy) {
  load_box(shared, box, barrier);
}
inline void load_box_of_halves(u32 shared, const Box& box, u32 barrier) {
  load_box_of_halves_multicast(shared, box, barrier, u16(own_place()));
}
inline void load_bytes(u32 shared, u64 global, u32 bytes, u32 barrier, CachePolicy) {
  if (bytes == 0 || bytes % 16 != 0) {
    emulation::fail("a bulk copy whose size is not a multiple of 16 bytes");
  }
  emulation::AsyncOp what{emulation::AsyncOp::kBytes, emulation::own->worker};
  what.shared = shared & ((1u << emulation::kPlace) - 1), what.count = bytes;
  what.barrier = barrier & ((1u << emulation::kPlace) - 1), what.global = global;
  emulation::issue_async(what);
}

}  // namespace etc::ptx

END_UNTRACKED_CALLS
