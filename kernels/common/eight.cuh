// Eight neighbouring elements of a row, as float.
#pragma once
#include "ptx/memory.cuh"

namespace etc {

// `at` is aligned to eight elements, at most to 16 bytes.
template <class T>
ETC_DEVICE void load_eight(const T* at, float (&v)[8]) {
  if constexpr (sizeof(T) == 4) {
    const float4 low = *reinterpret_cast<const float4*>(at);
    const float4 high = *reinterpret_cast<const float4*>(at + 4);
    v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w;
    v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
  } else {
    static_assert(kIsSame<T, bf16> || kIsSame<T, f16>);
    const uint4 all = *reinterpret_cast<const uint4*>(at);
    const u32 words[4] = {all.x, all.y, all.z, all.w};
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      const float2 pair = unpack<kIsSame<T, f16>>(words[i]);
      v[2 * i] = pair.x, v[2 * i + 1] = pair.y;
    }
  }
}

// Rounds each number once.
template <class T>
ETC_DEVICE void store_eight(T* at, const float (&v)[8]) {
  if constexpr (kIsSame<T, float>) {
    ptx::store16(
        u64(at), {__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]),
                  __float_as_uint(v[3])});
    ptx::store16(
        u64(at + 4), {__float_as_uint(v[4]), __float_as_uint(v[5]), __float_as_uint(v[6]),
                      __float_as_uint(v[7])});
  } else if constexpr (kIsSame<T, e4m3>) {
    ptx::store8(
        u64(at), u32(ptx::to_e4m3x2(v[0], v[1])) | u32(ptx::to_e4m3x2(v[2], v[3])) << 16,
        u32(ptx::to_e4m3x2(v[4], v[5])) | u32(ptx::to_e4m3x2(v[6], v[7])) << 16);
  } else {
    static_assert(kIsSame<T, bf16> || kIsSame<T, f16>);
    constexpr bool kIsHalf = kIsSame<T, f16>;
    ptx::store16(
        u64(at), {pack<kIsHalf>(v[0], v[1]), pack<kIsHalf>(v[2], v[3]),
                  pack<kIsHalf>(v[4], v[5]), pack<kIsHalf>(v[6], v[7])});
  }
}

}  // namespace etc
