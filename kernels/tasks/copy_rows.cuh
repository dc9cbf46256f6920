// Copies rows of tensors, for the tasks of one warp.
#pragma once
#include "ptx/memory.cuh"

namespace etc {

// Copies the first `rows` of kRows rows, of `bytes` each, from where they lie to one place
// after the other. kUnroll 16-byte accesses of each row are in flight a thread.
template <int kRows, int kUnroll>
ETC_DEVICE void copy_rows(
    i32 thread, u64 to, const u64 (&from)[kRows], u32 bytes, i32 rows = kRows) {
#pragma unroll 1
  for (u32 begin = thread * 16; begin < bytes; begin += kUnroll * 512) {
    uint4 v[kRows][kUnroll];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const u64 place = from[r] + begin + u * 512;
        v[r][u] = begin + u * 512 < bytes ? ptx::load16_l2(place) : uint4{};
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r >= rows) break;
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (begin + u * 512 < bytes) ptx::store16(to + r * bytes + begin + u * 512, v[r][u]);
      }
    }
  }
}

}  // namespace etc
