// Registers of a warpgroup.
#pragma once
#include "common/types.cuh"

namespace etc::ptx {

template <int kRegisters>
ETC_DEVICE void registers_grow() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
ETC_DEVICE void registers_shrink() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace etc::ptx
