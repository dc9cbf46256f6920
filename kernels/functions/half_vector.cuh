// Vectors of bf16 as numbers of f16 times a power of two: exactly.
#pragma once
#include "ptx/warp.cuh"

namespace etc {

// A vector, of which each lane of a warp has four numbers, times 1 / unit.
struct HalfVector {
  uint2 halves;
  float unit;
  bool is_exact;

  ETC_DEVICE static HalfVector of(uint2 vector) {
    const Range range(vector);
    return {range.scaled(vector), range.unit(), range.has_all(vector)};
  }
  // Those of the numbers that are exact as such, which become 0; is_exact: no others are left.
  ETC_DEVICE static HalfVector take(uint2& numbers) {
    const Range range(numbers);
    const uint2 part{range.part(numbers.x), range.part(numbers.y)};
    numbers = {numbers.x ^ part.x, numbers.y ^ part.y};
    return {range.scaled(part), range.unit(), !__any_sync(~0u, (numbers.x | numbers.y) != 0)};
  }

 private:
  // The 32 octaves up to that of a vector's largest number, which becomes one of 2^15 to 2^16, or
  // infinity.
  // NOTE: numbers of f16 down to 2^-17 have all 8 significant bits of bf16.
  struct Range {
    u32 scale, lowest;  // as words; numbers are larger than `lowest`

    ETC_DEVICE explicit Range(uint2 vector) {
      const u32 largest = ptx::max_halves(vector.x & kSizes, vector.y & kSizes);
      const u32 octave = ptx::warp_max(maximum_of(largest, largest << 16)) & octave_of(255);
      scale = minimum_of(octave_of(127 + 15 + 127) - octave, octave_of(253));
      lowest = maximum_of(octave, octave_of(32)) - octave_of(32);
    }
    // Whether all numbers but zeros are in it. NOTE: they are compared less 1 of their last bit, so
    // that zeros become the largest.
    ETC_DEVICE bool has_all(uint2 vector) const {
      const u32 least = ptx::min_halves(
          ptx::add_halves(vector.x & kSizes, ~0u), ptx::add_halves(vector.y & kSizes, ~0u));
      return !__any_sync(~0u, minimum_of(least, least << 16) < lowest);
    }
    // The numbers of a word that are in it; 0 for others.
    ETC_DEVICE u32 part(u32 word) const {
      const u32 low = (word << 16 & 0x7fff0000u) > lowest ? word & 0xffffu : 0;
      return low | ((word & 0x7fff0000u) > lowest ? word & 0xffff0000u : 0);
    }
    ETC_DEVICE uint2 scaled(uint2 vector) const {
      const float factor = __uint_as_float(scale);
      const float2 first = unpack<false>(vector.x), second = unpack<false>(vector.y);
      return {ptx::to_f16x2(first.x * factor, first.y * factor),
              ptx::to_f16x2(second.x * factor, second.y * factor)};
    }
    ETC_DEVICE float unit() const { return __uint_as_float(octave_of(254) - scale); }
  };

  static constexpr u32 kSizes = 0x7fff7fffu;  // of both numbers of a word, without signs
  ETC_DEVICE static constexpr u32 octave_of(u32 exponent) { return exponent << 23; }
  ETC_DEVICE static u32 minimum_of(u32 a, u32 b) { return a < b ? a : b; }
  ETC_DEVICE static u32 maximum_of(u32 a, u32 b) { return a > b ? a : b; }
};

}  // namespace etc
