// Element types and the index arithmetic of generated maps.
#pragma once
#include "ptx/convert.cuh"

namespace etc {

// Floor division and its remainder, as in the graph's expressions.
template <class Integer>
ETC_DEVICE Integer floordiv(Integer a, Integer b) {
  const Integer q = a / b;
  return (a % b != 0 && ((a < 0) != (b < 0))) ? q - 1 : q;
}
ETC_DEVICE i32 floormod(i32 a, i32 b) { return a - floordiv(a, b) * b; }
// The same of numbers that are not negative, which takes half of the instructions.
ETC_DEVICE i32 div_natural(i32 a, i32 b) { return i32(u32(a) / u32(b)); }
ETC_DEVICE i32 mod_natural(i32 a, i32 b) { return i32(u32(a) % u32(b)); }
ETC_DEVICE bool fits_i32(i64 v) { return v == i64(i32(v)); }
ETC_DEVICE constexpr i32 minimum(i32 a, i32 b) { return a < b ? a : b; }
ETC_DEVICE constexpr i32 maximum(i32 a, i32 b) { return a > b ? a : b; }

template <class A, class B>
constexpr bool kIsSame = false;
template <class A>
constexpr bool kIsSame<A, A> = true;

// A number as an argument whose type has its value.
template <auto n>
struct Number {
  static constexpr auto value = n;
};

// Calls f(Number<n>{}) for n < kCount, by a search in halves.
// NOTE: a chain of comparisons would fetch the code of each one that it passes.
template <u32 kCount, u32 kFirst = 0, class F>
ETC_DEVICE void with_number(u32 n, F f) {
  constexpr u32 kHalf = kCount / 2;
  if constexpr (kCount == 1) {
    f(Number<kFirst>{});
  } else if (n < kFirst + kHalf) {
    with_number<kHalf, kFirst>(n, f);
  } else {
    with_number<kCount - kHalf, kFirst + kHalf>(n, f);
  }
}

// Storage types of tensors; arithmetic is done in float.
struct bf16 {
  u16 bits;
  ETC_DEVICE operator float() const { return __uint_as_float(u32(bits) << 16); }
  ETC_DEVICE static bf16 from(float v) { return {ptx::to_bf16(v)}; }
};
struct f16 {
  u16 bits;
  ETC_DEVICE operator float() const { return ptx::from_f16(bits); }
  ETC_DEVICE static f16 from(float v) { return {ptx::to_f16(v)}; }
};

struct e4m3 {
  u8 bits;
  ETC_DEVICE static e4m3 from(float v) { return {u8(ptx::to_e4m3x2(v, v) & 0xffu)}; }
};

// Two neighbouring elements as one word: `low` is the first in memory.
template <bool kIsHalf>
ETC_DEVICE u32 pack(float low, float high) {
  return kIsHalf ? ptx::to_f16x2(low, high) : ptx::to_bf16x2(low, high);
}
template <bool kIsHalf>
ETC_DEVICE float2 unpack(u32 word) {
  if constexpr (kIsHalf) {
    return make_float2(f16{u16(word & 0xffffu)}, f16{u16(word >> 16)});
  } else {
    return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
  }
}

ETC_DEVICE float minus_infinity() { return __uint_as_float(0xff800000u); }

ETC_DEVICE float silu(float v) {
  // NOTE: __expf takes three more instructions, and its extra accuracy is lost in adding 1.
  return __fdividef(v, 1.0f + ptx::exp2(v * -1.4426950408889634f));
}

// Eight neighbouring elements, added in float and rounded once.
template <bool kIsHalf>
struct Sum8 {
  float2 pair[4] = {};

  ETC_DEVICE void add(uint4 v) {
    const u32 word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 part = unpack<kIsHalf>(word[i]);
      pair[i].x += part.x;
      pair[i].y += part.y;
    }
  }
  ETC_DEVICE void add(uint4 v, float weight) {
    const u32 word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 part = unpack<kIsHalf>(word[i]);
      pair[i].x = __fmaf_rn(weight, part.x, pair[i].x);
      pair[i].y = __fmaf_rn(weight, part.y, pair[i].y);
    }
  }
  ETC_DEVICE uint4 rounded() const {
    return make_uint4(
        pack<kIsHalf>(pair[0].x, pair[0].y), pack<kIsHalf>(pair[1].x, pair[1].y),
        pack<kIsHalf>(pair[2].x, pair[2].y), pack<kIsHalf>(pair[3].x, pair[3].y));
  }
};

}  // namespace etc
