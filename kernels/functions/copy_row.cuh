// Copies bytes that are contiguous on both sides, such as a row of a tensor.
#pragma once
#include "ptx/memory.cuh"

namespace etc {

// kThreads threads copy `bytes`, with kUnroll 16-byte accesses in flight per thread. Both addresses
// and `bytes` are multiples of 16.
template <int kUnroll, u32 kThreads = 32, class Bytes>
ETC_DEVICE void copy_row(i32 thread, u64 target, u64 source, Bytes bytes) {
  constexpr Bytes kStep = kThreads * 16;
#pragma unroll 1
  for (Bytes begin = thread * 16; begin < bytes; begin += kUnroll * kStep) {
    uint4 vectors[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      vectors[u] = ptx::load16_l2_if(begin + u * kStep < bytes, source + begin + u * kStep);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (begin + u * kStep < bytes) ptx::store16(target + begin + u * kStep, vectors[u]);
    }
  }
}

}  // namespace etc
