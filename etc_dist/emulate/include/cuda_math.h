// Vector types, and functions of CUDA C++ that compute on numbers in registers. Approximate
// functions are computed as exactly as the host's library does.
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

// A copy of a vector is one load and one store of all its bytes.
// NOTE: the compiler copies plain structs by memcpy, whose accesses are not checked.
#define COPIED_AT_ONCE(type, scalar, count)                                                  \
  typedef scalar All __attribute__((vector_size(count * sizeof(scalar)), may_alias));        \
  type() = default;                                                                          \
  type(const type& v) { *reinterpret_cast<All*>(this) = reinterpret_cast<const All&>(v); }   \
  type& operator=(const type& v) {                                                           \
    *reinterpret_cast<All*>(this) = reinterpret_cast<const All&>(v);                         \
    return *this;                                                                            \
  }
#define VECTORS(type, scalar)                                                                \
  struct alignas(2 * sizeof(scalar)) type##2 {                                               \
    scalar x, y;                                                                             \
    COPIED_AT_ONCE(type##2, scalar, 2)                                                       \
    constexpr type##2(scalar x, scalar y = {}) : x(x), y(y) {}                               \
  };                                                                                         \
  struct type##3 {                                                                           \
    scalar x, y, z;                                                                          \
    type##3() = default;                                                                     \
    type##3(const type##3& v) : x(v.x), y(v.y), z(v.z) {}                                    \
    type##3& operator=(const type##3& v) {                                                   \
      x = v.x, y = v.y, z = v.z;                                                             \
      return *this;                                                                          \
    }                                                                                        \
    constexpr type##3(scalar x, scalar y = {}, scalar z = {}) : x(x), y(y), z(z) {}          \
  };                                                                                         \
  struct alignas(4 * sizeof(scalar) < 16 ? 4 * sizeof(scalar) : 16) type##4 {                \
    scalar x, y, z, w;                                                                       \
    COPIED_AT_ONCE(type##4, scalar, 4)                                                       \
    constexpr type##4(scalar x, scalar y = {}, scalar z = {}, scalar w = {})                 \
        : x(x), y(y), z(z), w(w) {}                                                          \
  };                                                                                         \
  inline type##2 make_##type##2(scalar x, scalar y) { return {x, y}; }                       \
  inline type##3 make_##type##3(scalar x, scalar y, scalar z) { return {x, y, z}; }          \
  inline type##4 make_##type##4(scalar x, scalar y, scalar z, scalar w) { return {x, y, z, w}; }
VECTORS(char, signed char)
VECTORS(uchar, unsigned char)
VECTORS(short, short)
VECTORS(ushort, unsigned short)
VECTORS(int, int)
VECTORS(uint, unsigned)
VECTORS(float, float)
#undef VECTORS
#undef COPIED_AT_ONCE

// Overloads of the C library's functions for float.
#define OF_FLOAT(name) \
  inline float name(float v) { return name##f(v); }
#define OF_FLOATS(name) \
  inline float name(float a, float b) { return name##f(a, b); }
OF_FLOAT(acos)
OF_FLOAT(asin)
OF_FLOAT(atan)
OF_FLOAT(cbrt)
OF_FLOAT(ceil)
OF_FLOAT(cos)
OF_FLOAT(cosh)
OF_FLOAT(erf)
OF_FLOAT(erfc)
OF_FLOAT(exp)
OF_FLOAT(exp2)
OF_FLOAT(expm1)
OF_FLOAT(fabs)
OF_FLOAT(floor)
OF_FLOAT(log)
OF_FLOAT(log10)
OF_FLOAT(log1p)
OF_FLOAT(log2)
OF_FLOAT(rint)
OF_FLOAT(round)
OF_FLOAT(sin)
OF_FLOAT(sinh)
OF_FLOAT(sqrt)
OF_FLOAT(tan)
OF_FLOAT(tanh)
OF_FLOAT(trunc)
OF_FLOATS(atan2)
OF_FLOATS(copysign)
OF_FLOATS(fmax)
OF_FLOATS(fmin)
OF_FLOATS(fmod)
OF_FLOATS(hypot)
OF_FLOATS(pow)
#undef OF_FLOAT
#undef OF_FLOATS
inline float fma(float a, float b, float c) { return fmaf(a, b, c); }
inline float abs(float v) { return fabsf(v); }
inline float rsqrtf(float v) { return 1.0f / sqrtf(v); }
inline float rsqrt(float v) { return rsqrtf(v); }
inline float normcdff(float v) { return 0.5f * erfcf(v * -0.70710678f); }
inline float fdividef(float a, float b) { return a / b; }
inline float __saturatef(float v) { return v > 0.0f ? fminf(v, 1.0f) : 0.0f; }

// The larger and the smaller of two numbers; a NaN loses against a number.
#define LARGER_AND_SMALLER(type)                               \
  inline type max(type a, type b) { return a < b ? b : a; }    \
  inline type min(type a, type b) { return b < a ? b : a; }
LARGER_AND_SMALLER(int)
LARGER_AND_SMALLER(unsigned)
LARGER_AND_SMALLER(long)
LARGER_AND_SMALLER(unsigned long)
LARGER_AND_SMALLER(long long)
LARGER_AND_SMALLER(unsigned long long)
#undef LARGER_AND_SMALLER
inline float max(float a, float b) { return fmaxf(a, b); }
inline float min(float a, float b) { return fminf(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
inline double min(double a, double b) { return fmin(a, b); }

// Intrinsics.
inline float __expf(float v) { return expf(v); }
inline float __exp10f(float v) { return powf(10.0f, v); }
inline float __logf(float v) { return logf(v); }
inline float __log2f(float v) { return log2f(v); }
inline float __log10f(float v) { return log10f(v); }
inline float __powf(float a, float b) { return powf(a, b); }
inline float __sinf(float v) { return sinf(v); }
inline float __cosf(float v) { return cosf(v); }
inline float __tanf(float v) { return tanf(v); }
inline float __tanhf(float v) { return tanhf(v); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __frcp_rn(float v) { return 1.0f / v; }
inline float __fsqrt_rn(float v) { return sqrtf(v); }
inline float __frsqrt_rn(float v) { return rsqrtf(v); }

// The bits of one type as another one; bytes that the source does not have are zero.
template <class To, class From>
To same_bits(From from) {
  static_assert(sizeof(To) >= sizeof(From) || sizeof(From) == 8);
  To to{};
  __builtin_memcpy(&to, &from, sizeof(To) < sizeof(From) ? sizeof(To) : sizeof(From));
  return to;
}
inline float __uint_as_float(unsigned v) { return same_bits<float>(v); }
inline float __int_as_float(int v) { return same_bits<float>(v); }
inline unsigned __float_as_uint(float v) { return same_bits<unsigned>(v); }
inline int __float_as_int(float v) { return same_bits<int>(v); }

// Conversions: to nearest even, to zero, down and up; out of range, to the nearest bound.
inline int float_to_int(float v) {
  if (isnan(v)) return 0;
  return v >= 2147483648.0f ? INT32_MAX : v < -2147483648.0f ? INT32_MIN : int(v);
}
inline unsigned float_to_uint(float v) {
  return !(v > 0.0f) ? 0 : v >= 4294967296.0f ? UINT32_MAX : unsigned(v);
}
#define ROUNDED(mode, function)                                                    \
  inline int __float2int_##mode(float v) { return float_to_int(function(v)); }     \
  inline unsigned __float2uint_##mode(float v) { return float_to_uint(function(v)); }
ROUNDED(rn, rintf)
ROUNDED(rz, truncf)
ROUNDED(rd, floorf)
ROUNDED(ru, ceilf)
#undef ROUNDED
inline float __int2float_rn(int v) { return float(v); }
inline float __uint2float_rn(unsigned v) { return float(v); }

inline int __ffs(unsigned v) { return __builtin_ffs(int(v)); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __clz(int v) { return v == 0 ? 32 : __builtin_clz(unsigned(v)); }
inline unsigned __brev(unsigned v) { return __builtin_bitreverse32(v); }
inline int __mulhi(int a, int b) { return int(int64_t(a) * b >> 32); }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned(uint64_t(a) * b >> 32); }
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const uint64_t bytes = uint64_t(high) << 32 | low;
  unsigned found = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned byte = unsigned(bytes >> (selector >> 4 * i & 7) * 8) & 0xff;
    const bool is_sign = (selector >> 4 * i & 8) != 0;
    found |= (is_sign ? (byte >> 7) * 0xff : byte) << 8 * i;
  }
  return found;
}
