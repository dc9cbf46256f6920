// Conversions between element types, rounded to nearest, and 2^x: one instruction each.
#pragma once
#include "common/integers.cuh"

namespace etc::ptx {

ETC_DEVICE u16 to_bf16(float v) {
  u16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(v));
  return bits;
}
ETC_DEVICE u16 to_f16(float v) {
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(v));
  return bits;
}
ETC_DEVICE float from_f16(u16 bits) {
  float v;
  asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(bits));
  return v;
}
// Two elements in a word.
ETC_DEVICE u32 to_bf16x2(float low, float high) {
  u32 word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}
ETC_DEVICE u32 to_f16x2(float low, float high) {
  u32 word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}
// Numbers too large become the largest ones, of 448.
ETC_DEVICE u16 to_e4m3x2(float low, float high) {
  u16 bits;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(high), "f"(low));
  return bits;
}
ETC_DEVICE float exp2(float v) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(v));
  return power;
}

}  // namespace etc::ptx
