// Shares of the register file.
#pragma once
#include "common/types.cuh"

namespace etc::ptx {

// threadIdx.x, read anew each time: what is made of it takes no register across a loop.
ETC_DEVICE u32 thread_index() {
  u32 t;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(t));
  return t;
}
template <int kRegisters>
ETC_DEVICE void registers_grow() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
ETC_DEVICE void registers_shrink() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace etc::ptx
