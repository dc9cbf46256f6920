// Warpgroup matrix multiply: 64 x kColumns x 64 for a number of columns known at compile time; fp32
// accumulators, operands in shared memory.
#pragma once
#include "common/types.cuh"

namespace etc::ptx {

// ETC_Ln, ETC_Pn: the registers of 8 n columns, in the instruction and as operands.
#define ETC_F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define ETC_L1 "%0, %1, %2, %3"
#define ETC_L2 ETC_L1 ", %4, %5, %6, %7"
#define ETC_L3 ETC_L2 ", %8, %9, %10, %11"
#define ETC_L4 ETC_L3 ", %12, %13, %14, %15"
#define ETC_L5 ETC_L4 ", %16, %17, %18, %19"
#define ETC_L6 ETC_L5 ", %20, %21, %22, %23"
#define ETC_L7 ETC_L6 ", %24, %25, %26, %27"
#define ETC_L8 ETC_L7 ", %28, %29, %30, %31"
#define ETC_L9 ETC_L8 ", %32, %33, %34, %35"
#define ETC_L10 ETC_L9 ", %36, %37, %38, %39"
#define ETC_L11 ETC_L10 ", %40, %41, %42, %43"
#define ETC_L12 ETC_L11 ", %44, %45, %46, %47"
#define ETC_L13 ETC_L12 ", %48, %49, %50, %51"
#define ETC_L14 ETC_L13 ", %52, %53, %54, %55"
#define ETC_L15 ETC_L14 ", %56, %57, %58, %59"
#define ETC_L16 ETC_L15 ", %60, %61, %62, %63"
#define ETC_L17 ETC_L16 ", %64, %65, %66, %67"
#define ETC_L18 ETC_L17 ", %68, %69, %70, %71"
#define ETC_L19 ETC_L18 ", %72, %73, %74, %75"
#define ETC_L20 ETC_L19 ", %76, %77, %78, %79"
#define ETC_L21 ETC_L20 ", %80, %81, %82, %83"
#define ETC_L22 ETC_L21 ", %84, %85, %86, %87"
#define ETC_L23 ETC_L22 ", %88, %89, %90, %91"
#define ETC_L24 ETC_L23 ", %92, %93, %94, %95"
#define ETC_L25 ETC_L24 ", %96, %97, %98, %99"
#define ETC_L26 ETC_L25 ", %100, %101, %102, %103"
#define ETC_L27 ETC_L26 ", %104, %105, %106, %107"
#define ETC_L28 ETC_L27 ", %108, %109, %110, %111"
#define ETC_L29 ETC_L28 ", %112, %113, %114, %115"
#define ETC_L30 ETC_L29 ", %116, %117, %118, %119"
#define ETC_L31 ETC_L30 ", %120, %121, %122, %123"
#define ETC_L32 ETC_L31 ", %124, %125, %126, %127"
#define ETC_P1 ETC_F4(0)
#define ETC_P2 ETC_P1, ETC_F4(4)
#define ETC_P3 ETC_P2, ETC_F4(8)
#define ETC_P4 ETC_P3, ETC_F4(12)
#define ETC_P5 ETC_P4, ETC_F4(16)
#define ETC_P6 ETC_P5, ETC_F4(20)
#define ETC_P7 ETC_P6, ETC_F4(24)
#define ETC_P8 ETC_P7, ETC_F4(28)
#define ETC_P9 ETC_P8, ETC_F4(32)
#define ETC_P10 ETC_P9, ETC_F4(36)
#define ETC_P11 ETC_P10, ETC_F4(40)
#define ETC_P12 ETC_P11, ETC_F4(44)
#define ETC_P13 ETC_P12, ETC_F4(48)
#define ETC_P14 ETC_P13, ETC_F4(52)
#define ETC_P15 ETC_P14, ETC_F4(56)
#define ETC_P16 ETC_P15, ETC_F4(60)
#define ETC_P17 ETC_P16, ETC_F4(64)
#define ETC_P18 ETC_P17, ETC_F4(68)
#define ETC_P19 ETC_P18, ETC_F4(72)
#define ETC_P20 ETC_P19, ETC_F4(76)
#define ETC_P21 ETC_P20, ETC_F4(80)
#define ETC_P22 ETC_P21, ETC_F4(84)
#define ETC_P23 ETC_P22, ETC_F4(88)
#define ETC_P24 ETC_P23, ETC_F4(92)
#define ETC_P25 ETC_P24, ETC_F4(96)
#define ETC_P26 ETC_P25, ETC_F4(100)
#define ETC_P27 ETC_P26, ETC_F4(104)
#define ETC_P28 ETC_P27, ETC_F4(108)
#define ETC_P29 ETC_P28, ETC_F4(112)
#define ETC_P30 ETC_P29, ETC_F4(116)
#define ETC_P31 ETC_P30, ETC_F4(120)
#define ETC_P32 ETC_P31, ETC_F4(124)
#define ETC_STEP(COLUMNS, TYPE, LIST, A, B, P, TA, TB)                                    \
  "wgmma.mma_async.sync.aligned.m64n" COLUMNS "k16.f32." TYPE "." TYPE " {" LIST "}, " A  \
  ", " B ", " P ", 1, 1, " TA ", " TB ";\n"
#define ETC_NEXT(COLUMNS, TYPE, LIST, TA, SA, TB, SB)                                     \
  "add.s64 a, a, " SA ";\n"                                                               \
  "add.s64 b, b, " SB ";\n" ETC_STEP(COLUMNS, TYPE, LIST, "a", "b", "1", TA, TB)
#define ETC_WGMMA(COLUMNS, TYPE, LIST, A, B, P, TA, SA, TB, SB, ...)                      \
  asm volatile(                                                                           \
      "{.reg .pred p;\n"                                                                  \
      ".reg .b64 a, b;\n"                                                                 \
      "setp.ne.b32 p, " P ", 0;\n"                                                        \
      "mov.b64 a, " A ";\n"                                                               \
      "mov.b64 b, " B ";\n" ETC_STEP(COLUMNS, TYPE, LIST, "a", "b", "p", TA, TB)          \
          ETC_NEXT(COLUMNS, TYPE, LIST, TA, SA, TB, SB)                                   \
              ETC_NEXT(COLUMNS, TYPE, LIST, TA, SA, TB, SB)                               \
                  ETC_NEXT(COLUMNS, TYPE, LIST, TA, SA, TB, SB) "}\n"                     \
      : __VA_ARGS__                                                                       \
      : "l"(a), "l"(b), "r"(accumulate), "n"(int(kTransposeA)), "n"(kStepOf<kTransposeA>), \
        "n"(int(kTransposeB)), "n"(kStepOf<kTransposeB>))
#define ETC_COLUMNS(N, COLUMNS, LIST, A, B, P, TA, SA, TB, SB, ...)                       \
  if constexpr (kColumns == N) {                                                          \
    if constexpr (kIsHalf) {                                                              \
      ETC_WGMMA(COLUMNS, "f16", LIST, A, B, P, TA, SA, TB, SB, __VA_ARGS__);              \
    } else {                                                                              \
      ETC_WGMMA(COLUMNS, "bf16", LIST, A, B, P, TA, SA, TB, SB, __VA_ARGS__);             \
    }                                                                                     \
  }
// 16 k further in an operand, in units of 16 bytes.
template <bool kIsTransposed>
constexpr u32 kStepOf = kIsTransposed ? 128 : 2;

// Multiplies a box of a stage, four steps of 16 k: d = a * b, or d += a * b if `accumulate`, in the
// first kColumns / 2 elements of d. a and b are K-major, or MN-major if kTransposeA or kTransposeB:
// then a row of 64 elements runs along m or n.
// rows: the caller uses only the results of the first `rows` rows of a; the others may be anything.
// NOTE: the four steps in one statement: each moves all registers of d in the compiler's code.
template <
    bool kIsHalf, int kColumns, bool kTransposeA = false, bool kTransposeB = false, u32 kSums>
ETC_DEVICE void wgmma_box(
    float (&d)[kSums], u64 a, u64 b, i32 accumulate, [[maybe_unused]] u32 rows = 64) {
  static_assert(kColumns % 8 == 0 && 8 <= kColumns && kColumns <= 256 && kColumns <= 2 * kSums);
  ETC_COLUMNS(8, "8", ETC_L1, "%4", "%5", "%6", "%7", "%8", "%9", "%10", ETC_P1)
  ETC_COLUMNS(16, "16", ETC_L2, "%8", "%9", "%10", "%11", "%12", "%13", "%14", ETC_P2)
  ETC_COLUMNS(24, "24", ETC_L3, "%12", "%13", "%14", "%15", "%16", "%17", "%18", ETC_P3)
  ETC_COLUMNS(32, "32", ETC_L4, "%16", "%17", "%18", "%19", "%20", "%21", "%22", ETC_P4)
  ETC_COLUMNS(40, "40", ETC_L5, "%20", "%21", "%22", "%23", "%24", "%25", "%26", ETC_P5)
  ETC_COLUMNS(48, "48", ETC_L6, "%24", "%25", "%26", "%27", "%28", "%29", "%30", ETC_P6)
  ETC_COLUMNS(56, "56", ETC_L7, "%28", "%29", "%30", "%31", "%32", "%33", "%34", ETC_P7)
  ETC_COLUMNS(64, "64", ETC_L8, "%32", "%33", "%34", "%35", "%36", "%37", "%38", ETC_P8)
  ETC_COLUMNS(72, "72", ETC_L9, "%36", "%37", "%38", "%39", "%40", "%41", "%42", ETC_P9)
  ETC_COLUMNS(80, "80", ETC_L10, "%40", "%41", "%42", "%43", "%44", "%45", "%46", ETC_P10)
  ETC_COLUMNS(88, "88", ETC_L11, "%44", "%45", "%46", "%47", "%48", "%49", "%50", ETC_P11)
  ETC_COLUMNS(96, "96", ETC_L12, "%48", "%49", "%50", "%51", "%52", "%53", "%54", ETC_P12)
  ETC_COLUMNS(104, "104", ETC_L13, "%52", "%53", "%54", "%55", "%56", "%57", "%58", ETC_P13)
  ETC_COLUMNS(112, "112", ETC_L14, "%56", "%57", "%58", "%59", "%60", "%61", "%62", ETC_P14)
  ETC_COLUMNS(120, "120", ETC_L15, "%60", "%61", "%62", "%63", "%64", "%65", "%66", ETC_P15)
  ETC_COLUMNS(128, "128", ETC_L16, "%64", "%65", "%66", "%67", "%68", "%69", "%70", ETC_P16)
  ETC_COLUMNS(136, "136", ETC_L17, "%68", "%69", "%70", "%71", "%72", "%73", "%74", ETC_P17)
  ETC_COLUMNS(144, "144", ETC_L18, "%72", "%73", "%74", "%75", "%76", "%77", "%78", ETC_P18)
  ETC_COLUMNS(152, "152", ETC_L19, "%76", "%77", "%78", "%79", "%80", "%81", "%82", ETC_P19)
  ETC_COLUMNS(160, "160", ETC_L20, "%80", "%81", "%82", "%83", "%84", "%85", "%86", ETC_P20)
  ETC_COLUMNS(168, "168", ETC_L21, "%84", "%85", "%86", "%87", "%88", "%89", "%90", ETC_P21)
  ETC_COLUMNS(176, "176", ETC_L22, "%88", "%89", "%90", "%91", "%92", "%93", "%94", ETC_P22)
  ETC_COLUMNS(184, "184", ETC_L23, "%92", "%93", "%94", "%95", "%96", "%97", "%98", ETC_P23)
  ETC_COLUMNS(192, "192", ETC_L24, "%96", "%97", "%98", "%99", "%100", "%101", "%102", ETC_P24)
  ETC_COLUMNS(200, "200", ETC_L25, "%100", "%101", "%102", "%103", "%104", "%105", "%106", ETC_P25)
  ETC_COLUMNS(208, "208", ETC_L26, "%104", "%105", "%106", "%107", "%108", "%109", "%110", ETC_P26)
  ETC_COLUMNS(216, "216", ETC_L27, "%108", "%109", "%110", "%111", "%112", "%113", "%114", ETC_P27)
  ETC_COLUMNS(224, "224", ETC_L28, "%112", "%113", "%114", "%115", "%116", "%117", "%118", ETC_P28)
  ETC_COLUMNS(232, "232", ETC_L29, "%116", "%117", "%118", "%119", "%120", "%121", "%122", ETC_P29)
  ETC_COLUMNS(240, "240", ETC_L30, "%120", "%121", "%122", "%123", "%124", "%125", "%126", ETC_P30)
  ETC_COLUMNS(248, "248", ETC_L31, "%124", "%125", "%126", "%127", "%128", "%129", "%130", ETC_P31)
  ETC_COLUMNS(256, "256", ETC_L32, "%128", "%129", "%130", "%131", "%132", "%133", "%134", ETC_P32)
}
#undef ETC_STEP
#undef ETC_NEXT
#undef ETC_WGMMA
#undef ETC_COLUMNS

}  // namespace etc::ptx
