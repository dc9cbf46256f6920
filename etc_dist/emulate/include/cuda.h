// What the kernels use of CUDA C++, for a host compiler: vector types, built-in variables, and
// functions of a warp. PTX is in ptx/, whose files stand in for those of kernels/ptx.
#pragma once
#include <math.h>

#include "fibers.h"

#define ETC_EMULATED

#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __align__(bytes) alignas(bytes)
#define __cluster_dims__(...)
#define __launch_bounds__(...)

struct uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

struct Dim {
  unsigned x;
};
#define threadIdx (Dim{emulation::own->id})
#define blockIdx (Dim{emulation::own->worker->index})
#define gridDim (Dim{emulation::own->worker->count})

template <class To, class From>
To same_bits(From from) {
  static_assert(sizeof(To) >= sizeof(From) || sizeof(From) == 8);
  To to{};
  memcpy(&to, &from, sizeof(To) < sizeof(From) ? sizeof(To) : sizeof(From));
  return to;
}
inline float __uint_as_float(unsigned v) { return same_bits<float>(v); }
inline unsigned __float_as_uint(float v) { return same_bits<unsigned>(v); }
inline float __expf(float v) { return expf(v); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline int __ffs(unsigned v) { return __builtin_ffs(int(v)); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }

BEGIN_UNSEEN

// NOTE: the kernels call these by whole warps only.
template <class T>
T __shfl_sync(unsigned, T v, int lane) {
  const emulation::Words* all = emulation::exchange("a shuffle", {same_bits<uint64_t>(v)});
  return same_bits<T>(all[lane & 31].word[0]);
}
template <class T>
T __shfl_up_sync(unsigned mask, T v, unsigned step) {
  const unsigned lane = threadIdx.x % 32;
  return __shfl_sync(mask, v, int(lane >= step ? lane - step : lane));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T v, int other) {
  return __shfl_sync(mask, v, int(threadIdx.x % 32) ^ other);
}
inline unsigned __ballot_sync(unsigned, bool v) {
  const emulation::Words* all = emulation::exchange("a ballot", {v});
  unsigned bits = 0;
  for (int lane = 0; lane < 32; ++lane) bits |= unsigned(all[lane].word[0]) << lane;
  return bits;
}
inline int __any_sync(unsigned mask, bool v) { return __ballot_sync(mask, v) != 0; }
inline int __all_sync(unsigned mask, bool v) { return __ballot_sync(mask, v) == ~0u; }
inline void __syncwarp() { emulation::exchange("__syncwarp", {}, true); }
inline void __syncthreads() { emulation::own->worker->named[0].meet(emulation::kThreads, false); }

template <class T>
UNSEEN T atomicAdd(T* at, T v) {
  emulation::access_atomic(at, sizeof v);
  const T before = *at;
  *at += v;
  return before;
}
template <class T>
UNSEEN T atomicOr(T* at, T v) {
  emulation::access_atomic(at, sizeof v);
  const T before = *at;
  *at |= v;
  return before;
}
template <class T>
UNSEEN T atomicMax(T* at, T v) {
  emulation::access_atomic(at, sizeof v);
  const T before = *at;
  if (v > before) *at = v;
  return before;
}

END_UNSEEN
