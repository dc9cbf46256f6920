// Warpgroup matrix multiply: 64 x 256 x 16, fp32 accumulators, operands in shared memory.
#pragma once
#include "common/types.cuh"

namespace etc::ptx {

ETC_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
ETC_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
ETC_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from reading `v` before the code above.
ETC_DEVICE void keep_order(float& v) { asm volatile("" : "+f"(v)::"memory"); }
// Shared-memory matrix descriptor, 128-byte swizzle. `low` holds address / 16 in bits
// 0..13 and the leading offset / 16 in bits 16..29; the matrix is every
// kStride-th group of eight 128-byte rows.
template <u32 kStride = 1>
ETC_DEVICE u64 matrix_descriptor(u32 low) {
  return u64(low) | (u64(64 * kStride) << 32) | (1ull << 62);
}

ETC_DEVICE void store_matrix4(u32 shared, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(shared),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

ETC_DEVICE void store_matrix2(u32 shared, u32 a, u32 b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1,%2};" ::"r"(shared), "r"(a),
               "r"(b)
               : "memory");
}

// The same with each 8 x 8 matrix transposed.
ETC_DEVICE void store_matrix4_transposed(u32 shared, u32 a, u32 b, u32 c, u32 d) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(shared), "r"(a),
      "r"(b), "r"(c), "r"(d)
      : "memory");
}

ETC_DEVICE void store_matrix2_transposed(u32 shared, u32 a, u32 b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1,%2};" ::"r"(shared),
               "r"(a), "r"(b)
               : "memory");
}

#define ETC_F8(i)                                                                      \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]),          \
      "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define ETC_WGMMA(TYPE)                                                                \
  asm volatile(                                                                        \
      "{.reg .pred p;\n"                                                               \
      "setp.ne.b32 p, %130, 0;\n"                                                      \
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE " {"                \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127" \
      "}, %128, %129, p, 1, 1, 0, %131;}\n"                                            \
      : \
      ETC_F8(0), ETC_F8(8), \
      ETC_F8(16), ETC_F8(24), \
      ETC_F8(32), ETC_F8(40), \
      ETC_F8(48), ETC_F8(56), \
      ETC_F8(64), ETC_F8(72), \
      ETC_F8(80), ETC_F8(88), \
      ETC_F8(96), ETC_F8(104), \
      ETC_F8(112), ETC_F8(120) \
      : "l"(a), "l"(b), "r"(accumulate), "n"(kTransposeB))

// d = a * b, added to d if `accumulate`. a is k-major; b is k-major or, if kTransposeB,
// n-major.
template <bool kIsHalf, int kTransposeB>
ETC_DEVICE void wgmma_64x256x16(float (&d)[128], u64 a, u64 b, i32 accumulate) {
  if constexpr (kIsHalf) {
    ETC_WGMMA("f16");
  } else {
    ETC_WGMMA("bf16");
  }
}
#undef ETC_WGMMA
#undef ETC_F8

}  // namespace etc::ptx
