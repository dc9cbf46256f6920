#pragma once
#include "ptx/wgmma.cuh"

namespace etc::ptx {

template <bool kIsHalf, int kColumns, bool kTransposeB = false>
void wgmma_columns(float (&d)[kColumns / 2], u64 a, u64 b, i32 accumulate, u32 rows = 64) {
  add_wgmma({d, a, b, kColumns, i32(rows), accumulate != 0, kIsHalf, kTransposeB});
}

}  // namespace etc::ptx
