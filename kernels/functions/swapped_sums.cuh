// The sums of a warpgroup whose rows of w are the M of wgmma: where they begin, and how they are stored.
#pragma once
#include "functions/tile_biases.cuh"
#include "functions/tile_epilogue.cuh"
#include "functions/tile_parts.cuh"
#include "functions/tile_sums.cuh"

namespace etc {

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
