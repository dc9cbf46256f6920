// Warpgroup matrix multiply: 64 x kColumns x 16 for a number of columns known at
// compile time; fp32 accumulators, both operands k-major in shared memory.
#pragma once
#include "common/types.cuh"

namespace etc::ptx {

#define ETC_R0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define ETC_R1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define ETC_R2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define ETC_R3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define ETC_R4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define ETC_R5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define ETC_R6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define ETC_R7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define ETC_R8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define ETC_F8(i)                                                                      \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]),          \
      "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define ETC_WGMMA(COLUMNS, TYPE, LIST, A, B, P, ...)                                   \
  asm volatile(                                                                        \
      "{.reg .pred p;\n"                                                               \
      "setp.ne.b32 p, " P ", 0;\n"                                                     \
      "wgmma.mma_async.sync.aligned.m64n" COLUMNS "k16.f32." TYPE "." TYPE " {" LIST   \
      "}, " A ", " B ", p, 1, 1, 0, 0;}\n"                                             \
      : __VA_ARGS__                                                                    \
      : "l"(a), "l"(b), "r"(accumulate))
#define ETC_COLUMNS(N, COLUMNS, LIST, A, B, P, ...)                                    \
  if constexpr (kColumns == N) {                                                       \
    if constexpr (kIsHalf) {                                                           \
      ETC_WGMMA(COLUMNS, "f16", LIST, A, B, P, __VA_ARGS__);                           \
    } else {                                                                           \
      ETC_WGMMA(COLUMNS, "bf16", LIST, A, B, P, __VA_ARGS__);                          \
    }                                                                                  \
  }

// d = a * b, added to d if `accumulate`.
template <bool kIsHalf, int kColumns>
ETC_DEVICE void wgmma_columns(float (&d)[kColumns / 2], u64 a, u64 b, i32 accumulate) {
  ETC_COLUMNS(16, "16", ETC_R0,
      "%8", "%9", "%10", ETC_F8(0))
  ETC_COLUMNS(32, "32", ETC_R0 ", " ETC_R1,
      "%16", "%17", "%18", ETC_F8(0), ETC_F8(8))
  ETC_COLUMNS(48, "48", ETC_R0 ", " ETC_R1 ", " ETC_R2,
      "%24", "%25", "%26", ETC_F8(0), ETC_F8(8), ETC_F8(16))
  ETC_COLUMNS(64, "64", ETC_R0 ", " ETC_R1 ", " ETC_R2 ", " ETC_R3,
      "%32", "%33", "%34", ETC_F8(0), ETC_F8(8), ETC_F8(16), ETC_F8(24))
  ETC_COLUMNS(80, "80", ETC_R0 ", " ETC_R1 ", " ETC_R2 ", " ETC_R3 ", " ETC_R4,
      "%40", "%41", "%42", ETC_F8(0), ETC_F8(8), ETC_F8(16), ETC_F8(24), ETC_F8(32))
  ETC_COLUMNS(96, "96", ETC_R0 ", " ETC_R1 ", " ETC_R2 ", " ETC_R3 ", " ETC_R4 ", " ETC_R5,
      "%48", "%49", "%50", ETC_F8(0), ETC_F8(8), ETC_F8(16), ETC_F8(24), ETC_F8(32), ETC_F8(40))
  ETC_COLUMNS(112, "112", ETC_R0 ", " ETC_R1 ", " ETC_R2 ", " ETC_R3 ", " ETC_R4 ", " ETC_R5 ", " ETC_R6,
      "%56", "%57", "%58", ETC_F8(0), ETC_F8(8), ETC_F8(16), ETC_F8(24), ETC_F8(32), ETC_F8(40), ETC_F8(48))
  ETC_COLUMNS(128, "128", ETC_R0 ", " ETC_R1 ", " ETC_R2 ", " ETC_R3 ", " ETC_R4 ", " ETC_R5 ", " ETC_R6 ", " ETC_R7,
      "%64", "%65", "%66", ETC_F8(0), ETC_F8(8), ETC_F8(16), ETC_F8(24), ETC_F8(32), ETC_F8(40), ETC_F8(48), ETC_F8(56))
  ETC_COLUMNS(144, "144", ETC_R0 ", " ETC_R1 ", " ETC_R2 ", " ETC_R3 ", " ETC_R4 ", " ETC_R5 ", " ETC_R6 ", " ETC_R7 ", " ETC_R8,
      "%72", "%73", "%74", ETC_F8(0), ETC_F8(8), ETC_F8(16), ETC_F8(24), ETC_F8(32), ETC_F8(40), ETC_F8(48), ETC_F8(56), ETC_F8(64))
}
#undef ETC_R0
#undef ETC_R1
#undef ETC_R2
#undef ETC_R3
#undef ETC_R4
#undef ETC_R5
#undef ETC_R6
#undef ETC_R7
#undef ETC_R8
#undef ETC_F8
#undef ETC_WGMMA
#undef ETC_COLUMNS

}  // namespace etc::ptx
