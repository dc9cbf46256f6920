// Vectors of bf16 as numbers of f16 times a power of two.
#pragma once
#include "ptx/warp.cuh"

namespace etc {

// A vector, of which each lane of a warp has kWords pairs of numbers, times 1 / unit. It is exact if
// all numbers but zeros are of the 32 octaves up to the largest one: nearly always.
template <u32 kWords>
struct HalfVector {
  u32 words[kWords];
  float unit;
  bool is_exact;

  // NOTE: the largest number becomes one of 2^15 to 2^16, or infinity. Numbers of f16 down to 2^-17
  // have all 8 significant bits of bf16.
  ETC_DEVICE static HalfVector of(const u32 (&vector)[kWords]) {
    constexpr u32 kSizes = 0x7fff7fffu;  // of both numbers of a word, without signs
    // NOTE: `least` is of numbers less 1 in their last bit, so that zeros become the largest.
    u32 largest = 0, least = ~0u;
#pragma unroll
    for (u32 i = 0; i < kWords; ++i) {
      const u32 size_bits = vector[i] & kSizes;
      largest = ptx::max_halves(largest, size_bits);
      least = ptx::min_halves(least, ptx::add_halves(size_bits, ~0u));
    }
    const u32 octave = ptx::warp_max(maximum_of(largest, largest << 16)) & octave_of(255);
    const u32 lowest = octave > octave_of(32) ? octave - octave_of(32) : 0;
    const u32 scale = minimum_of(octave_of(127 + 15 + 127) - octave, octave_of(253));
    HalfVector result;
    result.unit = __uint_as_float(octave_of(254) - scale);
    result.is_exact = !__any_sync(~0u, minimum_of(least, least << 16) < lowest);
#pragma unroll
    for (u32 i = 0; i < kWords; ++i) {
      const float2 pair = unpack<false>(vector[i]);
      const float factor = __uint_as_float(scale);
      result.words[i] = ptx::to_f16x2(pair.x * factor, pair.y * factor);
    }
    return result;
  }

 private:
  // The upper half of a word is a number of bf16; its exponent, of 127 and more for 1 and more.
  ETC_DEVICE static constexpr u32 octave_of(u32 exponent) { return exponent << 23; }
  ETC_DEVICE static u32 minimum_of(u32 a, u32 b) { return a < b ? a : b; }
  ETC_DEVICE static u32 maximum_of(u32 a, u32 b) { return a > b ? a : b; }
};

}  // namespace etc
