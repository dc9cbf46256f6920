// Warpgroup matrix multiply: 64 x kColumns x 64 of e4m3, with operands in shared memory.
#pragma once
#include "ptx/wgmma_columns.cuh"

namespace etc::ptx {

#define ETC_STEP(COLUMNS, LIST, P)                                                               \
  "wgmma.mma_async.sync.aligned.m64n" COLUMNS "k32.f32.e4m3.e4m3 {" LIST "}, a, b, " P ", 1, 1;\n"
#define ETC_COLUMNS(N, COLUMNS, LIST, A, B, D, ...)                                              \
  if constexpr (kColumns == N) {                                                                 \
    asm volatile("{.reg .pred p;\n"                                                              \
                 ".reg .b64 a, b;\n"                                                             \
                 "setp.ne.b32 p, " D ", 0;\n"                                                    \
                 "mov.b64 a, " A ";\n"                                                           \
                 "mov.b64 b, " B ";\n" ETC_STEP(COLUMNS, LIST, "p") "add.s64 a, a, 2;\n"         \
                 "add.s64 b, b, 2;\n" ETC_STEP(COLUMNS, LIST, "1") "}\n"                         \
                 : __VA_ARGS__                                                                   \
                 : "l"(a), "l"(b), "r"(accumulate));                                             \
  }

// Multiplies half of a box of a stage, two steps of 32 k: d = a * b, or d += a * b if `accumulate`.
// Both are K-major. The sums have about 14 significant bits of the largest product.
template <int kColumns>
ETC_DEVICE void wgmma_half_codes(float (&d)[kColumns / 2], u64 a, u64 b, i32 accumulate) {
  constexpr bool kIsKnown = kColumns == 72 || kColumns == 80 || kColumns == 96 ||
                            kColumns == 112 || kColumns == 128;
  static_assert(kIsKnown);
  ETC_COLUMNS(72, "72", ETC_L9, "%36", "%37", "%38", ETC_P9)
  ETC_COLUMNS(80, "80", ETC_L10, "%40", "%41", "%42", ETC_P10)
  ETC_COLUMNS(96, "96", ETC_L12, "%48", "%49", "%50", ETC_P12)
  ETC_COLUMNS(112, "112", ETC_L14, "%56", "%57", "%58", ETC_P14)
  ETC_COLUMNS(128, "128", ETC_L16, "%64", "%65", "%66", ETC_P16)
}
#undef ETC_STEP
#undef ETC_COLUMNS

}  // namespace etc::ptx
