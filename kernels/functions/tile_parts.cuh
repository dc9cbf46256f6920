// Tiles whose k is divided among several tasks: each stores its fp32 sums in a scratch tensor, and
// further tasks add them in the order of k.
//
// The sums of a part lie there as the threads hold them: groups of eight rows of the N of wgmma,
// each with two times 8 bytes of every compute thread. So a task that adds has the sums of a tile in its
// registers as if it had multiplied, and stores them by the same code. It adds kSliceGroups groups.
#pragma once
#include "functions/tile_shape.cuh"

namespace etc {

// What a task does, as Work::variant: bits.
enum TileVariant : u32 { kGatedTile = 1, kPartOfTile = 2, kSumOfParts = 4 };

constexpr u32 kGroupBytes = 256 * 16;
constexpr u32 kSliceGroups = 8;

// Where the parts of a slice lie, in words of a work item.
struct TileParts {
  static constexpr u32 kWords = 4;
  u64 at;     // the first group of the first part
  u32 bytes;  // from one part to the next
  u32 up;     // of a gated tile: from a group of gate to that of up

  ETC_DEVICE void write(u32* words) const {
    words[0] = u32(at), words[1] = u32(at >> 32), words[2] = bytes, words[3] = up;
  }
  ETC_DEVICE static TileParts read(u32 shared) {
    const u32 low = ptx::load_shared(shared), high = ptx::load_shared(shared + 4);
    return {u64(low) | u64(high) << 32, ptx::load_shared(shared + 8),
            ptx::load_shared(shared + 12)};
  }
};

// The address at which a part is stored, in the first words of its work item.
ETC_DEVICE u64 part_address(u32 words) {
  const uint2 v = ptx::load_shared8(words);
  return u64(v.x) | u64(v.y) << 32;
}

// A thread stores its sums of the first `groups` groups of a part.
// NOTE: two at a time. For four, the compiler would move the sums to other registers, and spill.
template <u32 kCount>
ETC_DEVICE void store_part(u64 to, const float (&d)[kCount], u32 groups) {
  to += ptx::thread() * 8;
#pragma unroll
  for (u32 j = 0; j < kCount / 4; ++j) {
    if (j >= groups) break;
    const u64 at = to + j * kGroupBytes;
    ptx::store8(at, __float_as_uint(d[4 * j]), __float_as_uint(d[4 * j + 1]));
    ptx::store8(
        at + kGroupBytes / 2, __float_as_uint(d[4 * j + 2]), __float_as_uint(d[4 * j + 3]));
  }
}

// A thread adds `count` parts of its sums to those of group kFirst and the following ones.
template <u32 kFirst, u32 kCount>
ETC_DEVICE void add_parts(float (&d)[kCount], u64 from, u32 bytes, u32 count, u32 groups) {
  constexpr u32 kGroups = kCount / 4 - kFirst < kSliceGroups ? kCount / 4 - kFirst : kSliceGroups;
  constexpr u32 kTogether = kGroups < 4 ? kGroups : 4;  // whose loads are in flight
  from += ptx::thread() * 8;
#pragma unroll 1
  for (u32 part = 0; part < count; ++part, from += bytes) {
#pragma unroll
    for (u32 first = 0; first < kGroups; first += kTogether) {
      uint2 v[2 * kTogether];
#pragma unroll
      for (u32 j = 0; j < 2 * kTogether; ++j) {
        const u32 group = first + j / 2;
        v[j] = ptx::load8_l2_if(
            group < groups, from + group * kGroupBytes + j % 2 * (kGroupBytes / 2));
      }
#pragma unroll
      for (u32 j = 0; j < 2 * kTogether; ++j) {
        if (first + j / 2 >= kGroups) break;
        float* sums = d + 4 * (kFirst + first) + 2 * j;
        sums[0] += __uint_as_float(v[j].x), sums[1] += __uint_as_float(v[j].y);
      }
    }
  }
}

}  // namespace etc
