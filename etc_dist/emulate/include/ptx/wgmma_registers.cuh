#pragma once
#include "ptx/wgmma_columns.cuh"

namespace etc::ptx {

template <bool kIsHalf, int kColumns, u32 kSums>
void wgmma_box_registers(float (&d)[kSums], const u32 (&a)[16], u64 b, i32 accumulate) {
  for (u32 q = 0; q < 4; ++q) {
    const bool adds = accumulate != 0 || q > 0;
    add_wgmma_of_registers({d, 0, b + 2 * q, kColumns, 64, adds, kIsHalf}, a + 4 * q);
  }
}

}  // namespace etc::ptx
