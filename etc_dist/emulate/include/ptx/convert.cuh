#pragma once
#include "common/integers.cuh"

namespace etc::ptx {

inline u16 to_bf16(float v) {
  const u32 bits = same_bits<u32>(v);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return u16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
// NOTE: casts of _Float16 call the compiler's own library, which zig would build first, in 5 s.
inline u16 to_f16(float v) {
  const u32 bits = same_bits<u32>(v), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffffu;
  if (size > 0x7f800000u) return 0x7fff;
  if (size >= 0x477ff000u) return u16(sign | 0x7c00);  // 65520 and more
  if (size < 0x38800000u) {                            // below 2^-14: multiples of 2^-24
    return u16(sign | (same_bits<u32>(same_bits<float>(size) + 0.5f) - same_bits<u32>(0.5f)));
  }
  return u16(sign | ((size - (112u << 23) + 0xfff + (size >> 13 & 1)) >> 13));
}
inline float from_f16(u16 bits) {
  const u32 size = u32(bits & 0x7fff) << 13, sign = u32(bits & 0x8000) << 16;
  if (size >= 0x7c00u << 13) return same_bits<float>(sign | 0x7f800000u | size);
  return same_bits<float>(sign | same_bits<u32>(same_bits<float>(size) * 0x1p112f));
}
inline u32 to_bf16x2(float low, float high) { return to_bf16(low) | u32(to_bf16(high)) << 16; }
inline u32 to_f16x2(float low, float high) { return to_f16(low) | u32(to_f16(high)) << 16; }
inline u8 to_e4m3(float v) {
  const u32 bits = same_bits<u32>(v), sign = bits >> 24 & 0x80, size = bits & 0x7fffffffu;
  if (size > 0x7f800000u) return 0x7f;
  if (size >= 0x43e00000u) return u8(sign | 0x7e);  // 448 and more
  if (size < 0x3c800000u) {                         // below 2^-6: multiples of 2^-9
    const float shifted = same_bits<float>(size) * 512 + 8388608.0f;
    return u8(sign | (same_bits<u32>(shifted) & 0xf));
  }
  const u32 rounded = size + 0x7ffff + (size >> 20 & 1);
  return u8(sign | ((rounded >> 20) - (120 << 3)));
}
inline u16 to_e4m3x2(float low, float high) { return u16(to_e4m3(low) | to_e4m3(high) << 8); }
inline float from_e4m3(u8 bits) {
  if ((bits & 0x7f) == 0x7f) return NAN;
  const float size = same_bits<float>(u32(bits & 0x7f) << 20) * 0x1p120f;
  return bits & 0x80 ? -size : size;
}
inline u32 upper_halves(float low, float high) {
  return same_bits<u32>(low) >> 16 | (same_bits<u32>(high) & 0xffff0000u);
}
inline u32 e4m3x2_to_f16x2(u16 codes) {
  return to_f16x2(from_e4m3(u8(codes & 0xff)), from_e4m3(u8(codes >> 8)));
}
inline uint2 e4m3x4_to_f16x4(u32 codes) {
  return {e4m3x2_to_f16x2(u16(codes)), e4m3x2_to_f16x2(u16(codes >> 16))};
}
inline u32 add_halves(u32 a, u32 b) {
  return ((a + b) & 0xffffu) | ((a & 0xffff0000u) + (b & 0xffff0000u));
}
inline u32 min_halves(u32 a, u32 b) {
  const u32 low = (a & 0xffffu) < (b & 0xffffu) ? a : b, high = a < b ? a : b;
  return (low & 0xffffu) | (high & 0xffff0000u);
}
inline u32 max_halves(u32 a, u32 b) { return ~min_halves(~a, ~b); }
inline float exp2(float v) { return exp2f(v); }
inline float tanh(float v) { return tanhf(v); }

// One of two elements in a word.
template <bool kIsHalf>
float element(u32 word, u32 n) {
  const u16 bits = u16(n == 0 ? word : word >> 16);
  return kIsHalf ? from_f16(bits) : same_bits<float>(u32(bits) << 16);
}

}  // namespace etc::ptx
