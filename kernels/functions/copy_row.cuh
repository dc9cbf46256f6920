// Copies bytes that are contiguous on both sides, such as a row of a tensor.
#pragma once
#include "ptx/memory.cuh"

namespace etc {

// kThreads threads copy `bytes`, with kUnroll 16-byte accesses in flight per thread. Both addresses
// and `bytes` are multiples of 16.
template <int kUnroll, u32 kThreads = 32, class Bytes>
ETC_DEVICE void copy_row(i32 thread, u64 to, u64 from, Bytes bytes) {
  constexpr Bytes kStep = kThreads * 16;
#pragma unroll 1
  for (Bytes begin = thread * 16; begin < bytes; begin += kUnroll * kStep) {
    uint4 v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      v[u] = ptx::load16_l2_if(begin + u * kStep < bytes, from + begin + u * kStep);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (begin + u * kStep < bytes) ptx::store16(to + begin + u * kStep, v[u]);
    }
  }
}

}  // namespace etc
