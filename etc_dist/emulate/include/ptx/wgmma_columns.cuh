#pragma once
#include "ptx/wgmma.cuh"

namespace etc::ptx {

template <bool kIsHalf, int kColumns, bool kTransposeB = false, int kRows = 64>
void wgmma_columns(float (&d)[kColumns / 2], u64 a, u64 b, i32 accumulate) {
  add_wgmma({d, a, b, kColumns, kRows, accumulate != 0, kIsHalf, kTransposeB});
}

}  // namespace etc::ptx
