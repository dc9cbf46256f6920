#pragma once
#include "common/operand.cuh"

BEGIN_UNTRACKED_CALLS

namespace etc::ptx {

inline void prefetch_map(const Box&) {}
inline void load_box(u32 shared, const Box& box, u32 barrier) {
  emulation::AsyncOp what{emulation::AsyncOp::kLoad, emulation::own->worker};
  what.shared = shared;
  what.barrier = barrier;
  what.map = reinterpret_cast<const emulation::Map*>(box.map);
  what.first[0] = box.x, what.first[1] = box.y, what.first[2] = box.z;
  if (what.map->axes != 3) {
    emulation::fail("a tensor map whose number of axes differs from that of the copy");
  }
  emulation::issue_async(what);
}
inline void load_box(u32 shared, const Box& box, u32 barrier, CachePolicy) {
  load_box(shared, box, barrier);
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
