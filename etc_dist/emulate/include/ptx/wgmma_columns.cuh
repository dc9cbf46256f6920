#pragma once
#include "ptx/wgmma.cuh"

namespace etc::ptx {

template <
    bool kIsHalf, int kColumns, bool kTransposeA = false, bool kTransposeB = false, u32 kSums>
void wgmma_box(float (&d)[kSums], u64 a, u64 b, i32 accumulate, u32 rows = 64) {
  for (u32 q = 0; q < 4; ++q) {
    const bool adds = accumulate != 0 || q > 0;
    const u64 in_a = a + (kTransposeA ? 128 : 2) * q, in_b = b + (kTransposeB ? 128 : 2) * q;
    add_wgmma(
        {d, in_a, in_b, kColumns, i32(rows), adds, kIsHalf, kTransposeA, kTransposeB});
  }
}

}  // namespace etc::ptx
