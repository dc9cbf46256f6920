#pragma once
#include "ptx/wgmma_columns.cuh"

namespace etc::ptx {

template <int kColumns>
void wgmma_half_codes(float (&d)[kColumns / 2], u64 a, u64 b, i32 accumulate) {
  for (u32 q = 0; q < 2; ++q) {
    emulation::WgmmaOp p{d, a + 2 * q, b + 2 * q, kColumns, 64, q > 0 || accumulate != 0};
    p.are_codes = true;
    add_wgmma(p);
  }
}

}  // namespace etc::ptx
