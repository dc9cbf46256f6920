#pragma once
#include "ptx/wgmma.cuh"

namespace etc::ptx {

template <bool kIsHalf, int kColumns, bool kTransposeB = false, u32 kStepB = 2, u32 kSums>
void wgmma_box(float (&d)[kSums], u64 a, u64 b, i32 accumulate, u32 rows = 64) {
  for (u32 q = 0; q < 4; ++q) {
    const bool adds = accumulate != 0 || q > 0;
    add_wgmma(
        {d, a + 2 * q, b + kStepB * q, kColumns, i32(rows), adds, kIsHalf, kTransposeB});
  }
}

}  // namespace etc::ptx
