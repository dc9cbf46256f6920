// Eight neighbouring elements of a row, as float.
#pragma once
#include "ptx/memory.cuh"

namespace etc {

// `address` is aligned to eight elements, at most to 16 bytes.
template <class T>
ETC_DEVICE void load_eight(const T* address, float (&values)[8]) {
  if constexpr (sizeof(T) == 4) {
    const float4 low = *reinterpret_cast<const float4*>(address);
    const float4 high = *reinterpret_cast<const float4*>(address + 4);
    values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
    values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
  } else {
    static_assert(kIsSame<T, bf16> || kIsSame<T, f16>);
    const uint4 all = *reinterpret_cast<const uint4*>(address);
    const u32 words[4] = {all.x, all.y, all.z, all.w};
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      const float2 pair = unpack<kIsSame<T, f16>>(words[i]);
      values[2 * i] = pair.x, values[2 * i + 1] = pair.y;
    }
  }
}

// Rounds each number once.
template <class T>
ETC_DEVICE void store_eight(T* address, const float (&values)[8]) {
  if constexpr (kIsSame<T, float>) {
    ptx::store16(
        u64(address),
        {__float_as_uint(values[0]), __float_as_uint(values[1]), __float_as_uint(values[2]),
         __float_as_uint(values[3])});
    ptx::store16(
        u64(address + 4),
        {__float_as_uint(values[4]), __float_as_uint(values[5]), __float_as_uint(values[6]),
         __float_as_uint(values[7])});
  } else if constexpr (kIsSame<T, e4m3>) {
    ptx::store8(
        u64(address),
        u32(ptx::to_e4m3x2(values[0], values[1])) | u32(ptx::to_e4m3x2(values[2], values[3])) << 16,
        u32(ptx::to_e4m3x2(values[4], values[5])) |
            u32(ptx::to_e4m3x2(values[6], values[7])) << 16);
  } else {
    static_assert(kIsSame<T, bf16> || kIsSame<T, f16>);
    constexpr bool kIsHalf = kIsSame<T, f16>;
    ptx::store16(
        u64(address), {pack<kIsHalf>(values[0], values[1]), pack<kIsHalf>(values[2], values[3]),
                       pack<kIsHalf>(values[4], values[5]), pack<kIsHalf>(values[6], values[7])});
  }
}

}  // namespace etc
