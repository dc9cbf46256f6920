// Warpgroup matrix multiply: 64 x kColumns x 64, with a in registers and b in shared memory.
#pragma once
#include "ptx/wgmma_columns.cuh"

namespace etc::ptx {

#define ETC_STEP(COLUMNS, TYPE, LIST, A, P)                                               \
  "wgmma.mma_async.sync.aligned.m64n" COLUMNS "k16.f32." TYPE "." TYPE " {" LIST "}, {" A \
  "}, b, " P ", 1, 1, 0;\n"
#define ETC_NEXT(COLUMNS, TYPE, LIST, A) \
  "add.s64 b, b, 2;\n" ETC_STEP(COLUMNS, TYPE, LIST, A, "1")
#define ETC_WGMMA(COLUMNS, TYPE, LIST, A0, A1, A2, A3, B, P, ...)                           \
  asm volatile(                                                                             \
      "{.reg .pred p;\n"                                                                    \
      ".reg .b64 b;\n"                                                                      \
      "setp.ne.b32 p, " P ", 0;\n"                                                          \
      "mov.b64 b, " B ";\n" ETC_STEP(COLUMNS, TYPE, LIST, A0, "p")                          \
          ETC_NEXT(COLUMNS, TYPE, LIST, A1) ETC_NEXT(COLUMNS, TYPE, LIST, A2)               \
              ETC_NEXT(COLUMNS, TYPE, LIST, A3) "}\n"                                       \
      : __VA_ARGS__                                                                         \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[4]), "r"(a[5]), "r"(a[6]),        \
        "r"(a[7]), "r"(a[8]), "r"(a[9]), "r"(a[10]), "r"(a[11]), "r"(a[12]), "r"(a[13]),    \
        "r"(a[14]), "r"(a[15]), "l"(b), "r"(accumulate))
#define ETC_COLUMNS(N, COLUMNS, LIST, A0, A1, A2, A3, B, P, ...)                            \
  if constexpr (kColumns == N) {                                                            \
    if constexpr (kIsHalf) {                                                                \
      ETC_WGMMA(COLUMNS, "f16", LIST, A0, A1, A2, A3, B, P, __VA_ARGS__);                   \
    } else {                                                                                \
      ETC_WGMMA(COLUMNS, "bf16", LIST, A0, A1, A2, A3, B, P, __VA_ARGS__);                  \
    }                                                                                       \
  }
// Four registers as operands, from number 0, 4 and so on.
#define ETC_G1 "%4, %5, %6, %7"
#define ETC_G2 "%8, %9, %10, %11"
#define ETC_G3 "%12, %13, %14, %15"
#define ETC_G4 "%16, %17, %18, %19"
#define ETC_G5 "%20, %21, %22, %23"
#define ETC_G6 "%24, %25, %26, %27"
#define ETC_G7 "%28, %29, %30, %31"
#define ETC_G8 "%32, %33, %34, %35"
#define ETC_G9 "%36, %37, %38, %39"
#define ETC_G10 "%40, %41, %42, %43"
#define ETC_G11 "%44, %45, %46, %47"
#define ETC_G12 "%48, %49, %50, %51"
#define ETC_G13 "%52, %53, %54, %55"

// Multiplies a box of a stage, four steps of 16 k: d = a * b, or d += a * b if `accumulate`, in the
// first kColumns / 2 elements of d. b is K-major. A thread has the registers of a for one step after
// the other: rows lane / 4 and 8 further of its warp, k lane % 4 * 2 and 8 further, of which a
// register has two. They must keep their values until the wgmma has ended.
template <bool kIsHalf, int kColumns, u32 kSums>
ETC_DEVICE void wgmma_box_registers(
    float (&d)[kSums], const u32 (&a)[16], u64 b, i32 accumulate) {
  constexpr bool kIsKnown = kColumns == 8 || kColumns == 16 || kColumns == 32 || kColumns == 48 ||
                            kColumns == 64 || kColumns == 80;
  static_assert(kIsKnown && kColumns <= 2 * kSums);
  ETC_COLUMNS(8, "8", ETC_L1, ETC_G1, ETC_G2, ETC_G3, ETC_G4, "%20", "%21", ETC_P1)
  ETC_COLUMNS(16, "16", ETC_L2, ETC_G2, ETC_G3, ETC_G4, ETC_G5, "%24", "%25", ETC_P2)
  ETC_COLUMNS(32, "32", ETC_L4, ETC_G4, ETC_G5, ETC_G6, ETC_G7, "%32", "%33", ETC_P4)
  ETC_COLUMNS(48, "48", ETC_L6, ETC_G6, ETC_G7, ETC_G8, ETC_G9, "%40", "%41", ETC_P6)
  ETC_COLUMNS(64, "64", ETC_L8, ETC_G8, ETC_G9, ETC_G10, ETC_G11, "%48", "%49", ETC_P8)
  ETC_COLUMNS(80, "80", ETC_L10, ETC_G10, ETC_G11, ETC_G12, ETC_G13, "%56", "%57", ETC_P10)
}
#undef ETC_STEP
#undef ETC_NEXT
#undef ETC_WGMMA
#undef ETC_COLUMNS

}  // namespace etc::ptx
