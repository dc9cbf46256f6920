// The sums of a warpgroup whose rows of w are the M of wgmma: where they begin, and how they are stored.
#pragma once
#include "functions/tile_epilogue.cuh"
#include "functions/tile_parts.cuh"
#include "functions/tile_sums.cuh"

namespace etc {

// The addresses of the biases of a task's rows of w, of gate and of up, in words of a work item.
// Without gates, both are equal.
struct BiasPlace {
  static constexpr u32 kWords = 4;
  u64 gate, up;

  ETC_DEVICE void write(u32* words) const {
    words[0] = u32(gate), words[1] = u32(gate >> 32), words[2] = u32(up), words[3] = u32(up >> 32);
  }
  ETC_DEVICE static u64 read(u32 shared, bool is_up) {
    const u32 address = shared + 8 * u32(is_up);
    return u64(ptx::load_shared(address)) | u64(ptx::load_shared(address + 4)) << 32;
  }
};

// Adds the biases of 64 rows of w, from row `first` on of those below `end`, to their sums.
template <bool kIsHalf, class Weights, u32 kCount>
ETC_DEVICE void add_biases(float (&d)[kCount], u64 biases, u32 first, i32 end) {
  const u32 lane = ptx::thread() & 31, warp = ptx::thread() >> 5 & 3;
#pragma unroll
  for (u32 half = 0; half < 2; ++half) {
    const i32 row = i32(first + Weights::eight(warp, half) * 8 + lane / 4);
    if (row >= end) continue;
    const u16 bits = *reinterpret_cast<const u16*>(biases + u64(u32(row)) * 2);
    const float bias = unpack<kIsHalf>(u32(bits)).x;
#pragma unroll
    for (u32 j = 0; j < kCount; j += 4) d[j + 2 * half] += bias, d[j + 2 * half + 1] += bias;
  }
}

// A warpgroup stores `columns` columns of y, up to 64, from column `first` of the tile on: transposed
// in its half of the buffer into rows of 128 bytes. sums(j, n): two rounded elements of a thread, of
// rows 8 j and following, and of the first (n = 0) or second eight rows of w of its warp.
// kSkips: sums of rows after the tile are not computed.
template <class Weights, class Epilogue, u32 kEights, bool kSkips, class Program, class Sums>
ETC_DEVICE void store_sums(
    const Run<Program>& run, u32 place, Sums sums, u32 buffer, u32 wg, u32 first, u32 columns) {
  constexpr u32 kTogether = 8;  // groups of rows that the buffer holds
  const u32 thread = ptx::thread() & 127, lane = thread & 31, warp = thread >> 5;
  const u32 out = buffer + wg * kHalfBuffer;
  const u32 matrix = Weights::eight(warp, lane >> 3 & 1), in_row = lane & 7;
  const u32 source = out + in_row * 128 + ((matrix ^ in_row) << 4);
  const auto whole = Epilogue::Place::read(place);
  const u32 unit = thread % 8, column = first + unit * 8;
#pragma unroll
  for (u32 f = 0; f < kEights; f += kTogether) {
    if (f > 0 && f * 8 >= u32(whole.rows)) break;
    if (f > 0) ptx::named_barrier<128>(2 + wg);  // the rows have been read
#pragma unroll
    for (u32 j = f; j < f + kTogether && j < kEights; ++j) {
      if (kSkips && j > f && j % 2 == 0 && j * 8 >= u32(whole.rows)) break;
      ptx::store_matrix2_transposed(source + (j - f) * 1024, sums(j, 0), sums(j, 1));
    }
    ptx::named_barrier<128>(2 + wg);
    whole.each_rank(run, place, [&](const auto& target) {
#pragma unroll
      for (u32 i = 0; i < kTogether / 2 && i * 2 < kEights; ++i) {
        const u32 in_rows = i * 16 + thread / 8, row = f * 8 + in_rows;
        if (row < u32(target.rows) && unit * 8 < columns && column < u32(target.columns)) {
          ptx::store16(
              target.at + u64(row) * target.row_bytes + column * 2,
              ptx::load_shared16(out + in_rows * 128 + ((unit ^ (row & 7)) << 4)));
        }
      }
    });
  }
}

}  // namespace etc
