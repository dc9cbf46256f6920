// Copies a row of a tensor, by one warp.
#pragma once
#include "ptx/memory.cuh"

namespace etc {

// Copies `bytes` with kUnroll 16-byte accesses in flight per thread.
template <int kUnroll>
ETC_DEVICE void copy_row(i32 thread, u64 to, u64 from, u32 bytes) {
#pragma unroll 1
  for (u32 begin = thread * 16; begin < bytes; begin += kUnroll * 512) {
    uint4 v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const u64 place = from + begin + u * 512;
      v[u] = begin + u * 512 < bytes ? ptx::load16_l2(place) : uint4{};
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (begin + u * 512 < bytes) ptx::store16(to + begin + u * 512, v[u]);
    }
  }
}

}  // namespace etc
