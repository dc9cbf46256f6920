#pragma once
#include "common/operand.cuh"

BEGIN_UNTRACKED_CALLS

namespace etc::ptx {

inline void copy_box(u32 shared, const Box& box, u32 barrier, bool halves) {
  emulation::AsyncOp what{emulation::AsyncOp::kLoad, emulation::own->worker};
  what.shared = shared;
  what.barrier = barrier;
  what.map = reinterpret_cast<const emulation::Map*>(box.map);
  const i32 plain[5] = {box.x, box.y, box.z}, of_halves[5] = {box.x, 0, 0, box.y / 8, box.z};
  __builtin_memcpy(what.first, halves ? of_halves : plain, sizeof plain);
  if (what.map->axes != (halves ? 5 : 3)) {
    emulation::fail("a tensor map whose number of axes differs from that of the copy");
  }
  emulation::issue_async(what);
}

inline void prefetch_map(const Box&) {}
inline void load_box(u32 shared, const Box& box, u32 barrier) {
  copy_box(shared, box, barrier, false);
}
inline void load_box(u32 shared, const Box& box, u32 barrier, CachePolicy) {
  load_box(shared, box, barrier);
}
inline void load_box_of_halves(u32 shared, const Box& box, u32 barrier) {
  copy_box(shared, box, barrier, true);
}
inline void load_bytes(u32 shared, u64 global, u32 bytes, u32 barrier, CachePolicy) {
  if (bytes == 0 || bytes % 16 != 0) {
    emulation::fail("a bulk copy whose size is not a multiple of 16 bytes");
  }
  emulation::AsyncOp what{emulation::AsyncOp::kBytes, emulation::own->worker};
  what.shared = shared, what.count = bytes;
  what.barrier = barrier, what.global = global;
  emulation::issue_async(what);
}

}  // namespace etc::ptx

END_UNTRACKED_CALLS
