// CUDA C++ for a host compiler: keywords, built-in variables, and functions of warps and of memory.
// PTX is in ptx/, whose files replace those of kernels/ptx.
#pragma once
#include "cuda_math.h"
#include "fibers.h"

#define ETC_EMULATED

#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __global__
#define __grid_constant__
#define __align__(bytes) alignas(bytes)
#define __launch_bounds__(...)

struct Dim {
  unsigned x, y = 0, z = 0;
};
#define threadIdx (Dim{emulation::own->id})
#define blockIdx (Dim{emulation::own->worker->index})
#define blockDim (Dim{emulation::kThreads, 1, 1})
#define gridDim (Dim{emulation::own->worker->count, 1, 1})
constexpr int warpSize = 32;

BEGIN_UNTRACKED

// All lanes' values, after all lanes of the warp have called the same function.
inline const emulation::Words* exchange_lanes(unsigned mask, const char* what, uint64_t value) {
  if (mask != ~0u) emulation::fail("a warp function with a mask of fewer than 32 lanes");
  return emulation::exchange(what, {value});
}
// The value of lane `source` of the segments of `width` lanes, or `v` if it is in another one.
template <class T>
T shuffle(unsigned mask, const char* what, T v, int source, int width) {
  static_assert(sizeof(T) <= 8);
  const emulation::Words* all = exchange_lanes(mask, what, same_bits<uint64_t>(v));
  const int lane = int(threadIdx.x % 32);
  const bool is_same = source >= 0 && source / width == lane / width;
  return is_same ? same_bits<T>(all[source].word[0]) : v;
}
template <class T>
T __shfl_sync(unsigned mask, T v, int lane, int width = 32) {
  const int first = int(threadIdx.x % 32) / width * width;
  return shuffle(mask, "__shfl_sync", v, first + (lane & (width - 1)), width);
}
template <class T>
T __shfl_up_sync(unsigned mask, T v, unsigned step, int width = 32) {
  return shuffle(mask, "__shfl_up_sync", v, int(threadIdx.x % 32) - int(step), width);
}
template <class T>
T __shfl_down_sync(unsigned mask, T v, unsigned step, int width = 32) {
  return shuffle(mask, "__shfl_down_sync", v, int(threadIdx.x % 32) + int(step), width);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T v, int lanes, int width = 32) {
  return shuffle(mask, "__shfl_xor_sync", v, int(threadIdx.x % 32) ^ lanes, width);
}
inline unsigned __ballot_sync(unsigned mask, int v) {
  const emulation::Words* all = exchange_lanes(mask, "a vote", v != 0);
  unsigned bits = 0;
  for (int lane = 0; lane < 32; ++lane) bits |= unsigned(all[lane].word[0]) << lane;
  return bits;
}
inline int __any_sync(unsigned mask, int v) { return __ballot_sync(mask, v) != 0; }
inline int __all_sync(unsigned mask, int v) { return __ballot_sync(mask, v) == ~0u; }
template <class T, class Combine>
T reduce_lanes(unsigned mask, T v, Combine combine) {
  const emulation::Words* all = exchange_lanes(mask, "__reduce_sync", same_bits<uint64_t>(v));
  T result = same_bits<T>(all[0].word[0]);
  for (int lane = 1; lane < 32; ++lane) result = combine(result, same_bits<T>(all[lane].word[0]));
  return result;
}
template <class T>
T __reduce_add_sync(unsigned mask, T v) {
  return reduce_lanes(mask, v, [](T a, T b) { return a + b; });
}
template <class T>
T __reduce_max_sync(unsigned mask, T v) {
  return reduce_lanes(mask, v, [](T a, T b) { return max(a, b); });
}
template <class T>
T __reduce_min_sync(unsigned mask, T v) {
  return reduce_lanes(mask, v, [](T a, T b) { return min(a, b); });
}
inline void __syncwarp(unsigned mask = ~0u) {
  if (mask != ~0u) emulation::fail("__syncwarp with a mask of fewer than 32 lanes");
  emulation::exchange("__syncwarp", {}, true);
}
inline void __syncthreads() {
  emulation::own->worker->named[0].arrive_and_wait(emulation::kThreads, false);
}

// An atomic; returns the value before. `T` is deduced from the address alone.
template <class T>
struct Plain {
  using type = T;
};
template <class T, class Change>
UNTRACKED T change_atomically(T* at, Change change) {
  emulation::access_atomic(at, sizeof *at);
  const T before = *at;
  *at = change(before);
  return before;
}
#define ATOMIC(name, result)                                               \
  template <class T>                                                       \
  T atomic##name(T* at, typename Plain<T>::type v) {                       \
    return change_atomically(at, [&](T before) -> T { return result; });   \
  }
ATOMIC(Add, before + v)
ATOMIC(Sub, before - v)
ATOMIC(Max, before < v ? v : before)
ATOMIC(Min, v < before ? v : before)
ATOMIC(And, before & v)
ATOMIC(Or, before | v)
ATOMIC(Xor, before ^ v)
ATOMIC(Exch, v)
#undef ATOMIC
template <class T>
T atomicCAS(T* at, typename Plain<T>::type expected, typename Plain<T>::type v) {
  return change_atomically(at, [&](T before) { return before == expected ? v : before; });
}

// A load that is not coherent with writes of the same program.
template <class T>
UNTRACKED T __ldg(const T* at) {
  const uint8_t* const from = emulation::global(uint64_t(at), sizeof(T), alignof(T));
  if (emulation::is_written(uint64_t(at))) {
    emulation::fail("memory that the program writes is read through the non-coherent cache");
  }
  T v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}

END_UNTRACKED

// Loads and stores with a cache hint, which are plain accesses here.
#define CACHED(hint)                     \
  template <class T>                     \
  T __ld##hint(const T* at) {            \
    return *at;                          \
  }
CACHED(ca)
CACHED(cg)
CACHED(cs)
CACHED(cv)
#undef CACHED
#define CACHED(hint)                                     \
  template <class T>                                     \
  void __st##hint(T* at, typename Plain<T>::type v) {    \
    *at = v;                                             \
  }
CACHED(wb)
CACHED(cg)
CACHED(cs)
CACHED(wt)
#undef CACHED
