// Random numbers that depend on a key and a counter alone: Philox4x32-10 of Salmon et al.,
// "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
#pragma once
#include "common/types.cuh"

namespace etc {

ETC_DEVICE uint4 philox(uint4 counter, u32 key_low, u32 key_high) {
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const u32 low0 = counter.x * 0xD2511F53u, high0 = __umulhi(counter.x, 0xD2511F53u);
    const u32 low1 = counter.z * 0xCD9E8D57u, high1 = __umulhi(counter.z, 0xCD9E8D57u);
    counter = make_uint4(high1 ^ counter.y ^ key_low, low1, high0 ^ counter.w ^ key_high, low0);
    key_low += 0x9E3779B9u;
    key_high += 0xBB67AE85u;
  }
  return counter;
}

// A number of the standard Gumbel distribution, from 32 random bits.
ETC_DEVICE float gumbel(u32 bits) {
  // NOTE: exact where it is large, that is, where the uniform number is small.
  const float uniform = fminf((float(bits) + 0.5f) * 0x1p-32f, 0x1.fffffep-1f);
  return -logf(-log1pf(-uniform));
}

}  // namespace etc
