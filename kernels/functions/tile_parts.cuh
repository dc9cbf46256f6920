// Split-K among tasks: each multiplies a part of k, and stores its fp32 sums in a scratch tensor.
// Further tasks add them in the order of k.
//
// A part is stored in the register layout of wgmma's accumulators: groups of eight of the N, each
// with two times 8 bytes of every compute thread. A task that adds parts then has the accumulators
// of a mainloop in its registers, and uses the same epilogue. It adds a slice: kSliceGroups groups.
// In swapped tiles of up to 64 rows of w, one warpgroup has all sums, and the other's half of a group
// is unused.
#pragma once
#include "functions/tile_shape.cuh"

namespace etc {

// Bits of Work::variant: what a task does, or how its rows come.
enum TileVariant : u32 {
  kGatedTile = 1,
  kPartOfTile = 2,
  kSumOfParts = 4,
  kGatheredTile = 8,
  kBiasedTile = 16,
  kLeftTile = 32  // the compute threads do not meet after it, since another warp notifies
};

constexpr u32 kGroupBytes = 256 * 16;  // 4 * GROUP_WORDS in functions/tile_matmul.py
constexpr u32 kSliceGroups = 8;        // SLICE / 8

// The addresses of the parts of a slice, in words of a work item.
struct TileParts {
  static constexpr u32 kWords = 4;
  u64 first;       // the first group of the first part
  u32 part_bytes;  // from one part to the next
  u32 up_bytes;    // of a gated tile: from a group of gate to that of up

  ETC_DEVICE void write(u32* words) const {
    words[0] = u32(first), words[1] = u32(first >> 32), words[2] = part_bytes;
    words[3] = up_bytes;
  }
  ETC_DEVICE static TileParts read(u32 shared) {
    const u32 low = ptx::load_shared(shared), high = ptx::load_shared(shared + 4);
    return {u64(low) | u64(high) << 32, ptx::load_shared(shared + 8),
            ptx::load_shared(shared + 12)};
  }
};

// The address of a part that a task stores, in the first words of its work item.
ETC_DEVICE u64 part_address(u32 words) {
  const uint2 halves = ptx::load_shared8(words);
  return u64(halves.x) | u64(halves.y) << 32;
}

// A thread stores its sums of the first num_groups groups of a part, at the address `part`.
// NOTE: two at a time. For four, the compiler would move the sums to other registers, and spill.
template <u32 kCount>
ETC_DEVICE void store_part(u64 part, const float (&d)[kCount], u32 num_groups) {
  part += ptx::thread() * 8;
#pragma unroll
  for (u32 j = 0; j < kCount / 4; ++j) {
    if (j >= num_groups) break;
    const u64 address = part + j * kGroupBytes;
    ptx::store8(address, __float_as_uint(d[4 * j]), __float_as_uint(d[4 * j + 1]));
    ptx::store8(
        address + kGroupBytes / 2, __float_as_uint(d[4 * j + 2]), __float_as_uint(d[4 * j + 3]));
  }
}

// A thread adds its sums of `count` parts, of the first num_groups groups of a slice, to its
// accumulators of the groups from kFirst on.
// NOTE: loads of several groups and parts are in flight together, as many as registers allow. Parts
// beyond the last one add 0, which changes nothing.
template <u32 kFirst, u32 kCount>
ETC_DEVICE void add_parts(
    float (&d)[kCount], u64 source, u32 part_bytes, u32 count, u32 num_groups) {
  constexpr u32 kGroups = kCount / 4 - kFirst < kSliceGroups ? kCount / 4 - kFirst : kSliceGroups;
  constexpr u32 kTogether = kGroups < 4 ? kGroups : 4;  // groups whose loads are in flight together
  constexpr u32 kPairs = 2 * kTogether, kParts = kCount <= 32 ? 8 / kTogether : 1;  // and parts
  source += ptx::thread() * 8;
#pragma unroll 1
  for (u32 part = 0; part < count; part += kParts, source += kParts * part_bytes) {
#pragma unroll
    for (u32 first = 0; first < kGroups; first += kTogether) {
      uint2 pairs[kParts][kPairs];
#pragma unroll
      for (u32 i = 0; i < kParts * kPairs; ++i) {
        const u32 next = i / kPairs, j = i % kPairs, group = first + j / 2;
        pairs[next][j] = ptx::load8_l2_if(
            group < num_groups && part + next < count,
            source + next * part_bytes + group * kGroupBytes + j % 2 * (kGroupBytes / 2));
      }
#pragma unroll
      for (u32 i = 0; i < kParts * kPairs; ++i) {
        const u32 j = i % kPairs;
        if (first + j / 2 >= kGroups) continue;
        const uint2 pair = pairs[i / kPairs][j];
        float* sums = d + 4 * (kFirst + first) + 2 * j;
        sums[0] += __uint_as_float(pair.x), sums[1] += __uint_as_float(pair.y);
      }
    }
  }
}

}  // namespace etc
