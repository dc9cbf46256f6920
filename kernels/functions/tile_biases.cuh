// Biases of the columns of a tile: of rows of w.
// NOTE: read before the mainloop and added after it, so that no thread waits for them.
#pragma once
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "worker/task.cuh"

namespace etc {

// The addresses of those of a task's rows of w, of gate and of up, in words of a work item. Without
// gates, both are equal.
struct BiasPlace {
  static constexpr u32 kWords = 4;
  u64 gate, up;

  ETC_DEVICE void write(u32* words) const {
    words[0] = u32(gate), words[1] = u32(gate >> 32), words[2] = u32(up), words[3] = u32(up >> 32);
  }
  ETC_DEVICE static BiasPlace read(u32 shared) {
    const auto address = [&](u32 first) {
      return u64(ptx::load_shared(first)) | u64(ptx::load_shared(first + 4)) << 32;
    };
    return {address(shared), address(shared + 8)};
  }
};

// A thread's two of the 64 rows of w that are the M of wgmma.
template <bool kIsHalf, class Weights>
struct RowBiases {
  float values[2] = {};

  // address_of(row): that of its bias, or 0 for a row without.
  template <class F>
  ETC_DEVICE void read(F address_of) {
    const u32 lane = ptx::thread() & 31, warp = ptx::thread() >> 5 & 3;
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
      const u64 address = address_of(Weights::eight(warp, half) * 8 + lane / 4);
      if (address == 0) continue;
      values[half] = unpack<kIsHalf>(u32(*reinterpret_cast<const u16*>(address))).x;
    }
  }
  template <u32 kCount>
  ETC_DEVICE void add_to(float (&d)[kCount]) const {
#pragma unroll
    for (u32 i = 0; i < kCount; ++i) d[i] += values[i / 2 % 2];
  }
};

// A thread's of kColumns rows of w that are the N of wgmma: two of each eight.
template <bool kIsHalf, u32 kColumns>
struct ColumnBiases {
  u32 pairs[kColumns / 8] = {};

  // address_of(row): that of its bias and the next one's, or 0 for rows without.
  template <class F>
  ETC_DEVICE void read(F address_of) {
#pragma unroll
    for (u32 j = 0; j < kColumns / 8; ++j) {
      const u64 address = address_of(j * 8 + ptx::lane() % 4 * 2);
      if (address != 0) pairs[j] = *reinterpret_cast<const u32*>(address);
    }
  }
  ETC_DEVICE void add_to(float (&d)[kColumns / 2]) const {
#pragma unroll
    for (u32 j = 0; j < kColumns / 8; ++j) {
      const float2 pair = unpack<kIsHalf>(pairs[j]);
#pragma unroll
      for (u32 i = 0; i < 4; ++i) d[4 * j + i] += i % 2 == 0 ? pair.x : pair.y;
    }
  }
};

}  // namespace etc
