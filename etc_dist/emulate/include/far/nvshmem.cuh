// The transport to far ranks: they are in this process.
#pragma once
#include "ptx/memory.cuh"

BEGIN_UNTRACKED_CALLS

namespace etc {

inline u64 block_of(i32 rank);  // entry.h

struct Nvshmem {
  static void put(u64 from, u64 to, u64 bytes, u64 word, u64 value, i32 rank) {
    const u64 far = on(to, rank), unit = (from | far | bytes) % 16 == 0 ? 16 : 1;
    for (u64 i = threadIdx.x % 32 * unit; i < bytes; i += 32 * unit) {
      if (unit == 16) {
        ptx::store(far + i, ptx::load<uint4>(from + i));
      } else {
        ptx::store(far + i, ptx::load<u8>(from + i));
      }
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::fence_acq_rel<true>(), add(word, value, rank);
  }
  static void add(u64 word, u64 value, i32 rank) {
    emulation::yield();
    ptx::add_relaxed<true>(on(word, rank), u32(value));
  }
  static void quiet() {}

 private:
  static u64 on(u64 address, i32 rank) {
    return address - block_of(emulation::own->worker->rank) + block_of(rank);
  }
};

}  // namespace etc

END_UNTRACKED_CALLS
