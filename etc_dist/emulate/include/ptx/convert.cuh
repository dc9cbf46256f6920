#pragma once
#include "common/integers.cuh"

namespace etc::ptx {

inline u16 to_bf16(float v) {
  const u32 bits = same_bits<u32>(v);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return u16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline u16 to_f16(float v) { return same_bits<u16>(static_cast<_Float16>(v)); }
inline float from_f16(u16 bits) { return static_cast<float>(same_bits<_Float16>(bits)); }
inline u32 to_bf16x2(float low, float high) { return to_bf16(low) | u32(to_bf16(high)) << 16; }
inline u32 to_f16x2(float low, float high) { return to_f16(low) | u32(to_f16(high)) << 16; }
inline float exp2(float v) { return exp2f(v); }

// One of two elements in a word.
template <bool kIsHalf>
float element(u32 word, u32 n) {
  const u16 bits = u16(n == 0 ? word : word >> 16);
  return kIsHalf ? from_f16(bits) : same_bits<float>(u32(bits) << 16);
}

}  // namespace etc::ptx
