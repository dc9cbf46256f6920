// Warpgroup matrix multiply: fences, groups, descriptors of operands, and stores of results.
#pragma once
#include "common/types.cuh"

namespace etc::ptx {

ETC_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
ETC_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
ETC_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from reading `value` before the code above.
ETC_DEVICE void keep_order(float& value) { asm volatile("" : "+f"(value)::"memory"); }
ETC_DEVICE void keep_order(u32& value) { asm volatile("" : "+r"(value)::"memory"); }
// Shared-memory matrix descriptor, 128-byte swizzle. `low` holds address / 16 in bits
// 0..13 and the leading offset / 16 in bits 16..29; groups of eight 128-byte rows are adjacent.
ETC_DEVICE u64 matrix_descriptor(u32 low) {
  return u64(low) | (u64(64) << 32) | (1ull << 62);
}

ETC_DEVICE void store_matrix2(u32 shared, u32 a, u32 b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1,%2};" ::"r"(shared), "r"(a),
               "r"(b)
               : "memory");
}

// The same with each 8 x 8 matrix transposed.
ETC_DEVICE void store_matrix2_transposed(u32 shared, u32 a, u32 b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1,%2};" ::"r"(shared),
               "r"(a), "r"(b)
               : "memory");
}

}  // namespace etc::ptx
