// A tile whose rows of w are the rows of the tensor cores' tile.
#pragma once
#include "functions/tile_epilogue.cuh"
#include "functions/tile_sums.cuh"

namespace etc {

// Up to 64 rows of x; up to 128 rows of w. Of at most 64, the warpgroups take turns along k; of
// more, each has half. Where these are fewer than 64, the tensor cores multiply what follows them,
// too.
template <bool kIsHalf, u32 kPacked, class Epilogue>
struct SwappedTile {
  static constexpr TileShape kShape = TileShape::of(kPacked);
  static constexpr u32 kRows = kShape.rows, kDepth = kShape.depth, kEights = kRows / 8;
  static constexpr u32 kBoxX = kShape.box_x(), kBoxW = kShape.box_w();
  static constexpr bool kTakesTurns = kShape.columns <= 64;
  static constexpr bool kExchanges = kShape.split == kSplitK;
  // Of a warpgroup.
  static constexpr u32 kColumns = kTakesTurns ? kShape.columns : kShape.columns / 2;
  static constexpr bool kGates = !kTakesTurns || kColumns == 64;
  static_assert(kColumns <= 64 && kColumns % 8 == 0);
  using Pair = PairExchange<kEights, !kTakesTurns>;

  u32 control, buffer;

  // The 256 compute threads; `exchanged` counts tiles of which the pair split k. Of a gated tile,
  // the first half of the weights' rows are those of gate.
  template <bool kMayBeGated, class Program>
  ETC_DEVICE bool compute(
      const Run<Program>& run, StageReader<Program>& stages, u32 count, u32 words, bool is_gated,
      u32& exchanged) const {
    const u32 wg = __shfl_sync(~0u, ptx::thread() >> 7, 0);
    const Pair pair{{control}};
    if constexpr (kExchanges) {
      if (ptx::thread() == 0) pair.begin();
    }
    // NOTE: kept warp-uniform, so that descriptors stay in uniform registers.
    const u32 base = stages.descriptor_base() | 0x10000u;
    const u32 w0 = __shfl_sync(~0u, base + wg * (kTakesTurns ? kBoxW : kColumns * 128) / 16, 0);
    const u32 first_x = kDepth * kBoxW + (kTakesTurns ? wg * kBoxX : 0);
    const u32 x0 = __shfl_sync(~0u, base + first_x / 16, 0);
    float d[kRows / 2];
    constexpr u32 kStep = kTakesTurns ? 2 : 1;
    bool lost = multiply_boxes<kIsHalf, kPacked, kStep, kColumns>(run, stages, count, w0, x0, d);
    if constexpr (kTakesTurns) {
      lost = combine(d, wg, lost, [](float& sum, float other) { sum += other; });
      if (wg == 0) {
        u32 first = 0, end = kEights;
        if constexpr (kExchanges) {
          lost = pair.add(run, d, wg, buffer + kHalfBuffer, exchanged, lost);
          first = pair.first(wg), end = pair.end(wg);
        }
        if (kMayBeGated && kGates && is_gated) gate_warps(d);
        if (!lost) finish(run, words, d, 0, first, end);
      }
    } else if constexpr (kExchanges) {
      lost = pair.add(run, d, wg, buffer, exchanged, lost);
      // Each worker finishes the columns of one warpgroup.
      if (!lost && wg == (ptx::worker() & 1)) finish(run, words, d, wg, 0, kEights);
    } else if (kMayBeGated && is_gated) {
      lost = combine(d, wg, lost, [](float& sum, float up) { gate(sum, up); });
      if (wg == 0 && !lost) finish(run, words, d, 0, 0, kEights);
    } else {
      lost = ptx::named_barrier_any<128>(2 + wg, lost);
      if (!lost) finish(run, words, d, wg, 0, kEights);
    }
    if constexpr (kExchanges) ++exchanged;
    return !lost;
  }

 private:
  static constexpr i32 kNoColumn = 0x7fffffff;

  // Whether eight columns, number `unit`, are the warpgroup's.
  ETC_DEVICE static bool has_unit(u32 unit) { return kColumns == 64 || unit * 8 < kColumns; }
  ETC_DEVICE static void gate(float& sum, float up) { sum = Epilogue::combine(sum, up); }

  // Combines the first warpgroup's sums with the second one's, four eights of rows at a time.
  template <class F>
  ETC_DEVICE bool combine(float (&d)[kRows / 2], u32 wg, bool lost, F f) const {
    const u32 sums = buffer + (ptx::thread() & 127) * 16;
#pragma unroll
    for (u32 first = 0; first < kEights; first += 4) {
      if (first > 0) ptx::named_barrier<256>(1);
      if (wg == 1) {
#pragma unroll
        for (u32 j = first; j < first + 4 && j < kEights; ++j) {
          store_four(d, j, sums + j % 4 * 2048);
        }
      }
      lost = ptx::named_barrier_any<256>(1, lost);
      if (wg == 0) {
#pragma unroll
        for (u32 j = first; j < first + 4 && j < kEights; ++j) {
          combine_four(d, j, sums + j % 4 * 2048, f);
        }
      }
    }
    // The sums have been read: the tile is stored in their place.
    if (wg == 0 && !kExchanges) ptx::named_barrier<128>(2);
    return lost;
  }

  // The first warpgroup: warps 0 and 1 have gate's sums, 2 and 3 up's of the same columns.
  ETC_DEVICE void gate_warps(float (&d)[kRows / 2]) const {
    const u32 thread = ptx::thread() & 127, up = buffer + kHalfBuffer + thread % 64 * 16;
#pragma unroll
    for (u32 j = 0; j < kEights; ++j) {
      if (thread >= 64) store_four(d, j, up + j * 1024);
    }
    ptx::named_barrier<128>(2);  // up's sums are in the buffer
#pragma unroll
    for (u32 j = 0; j < kEights; ++j) {
      if (thread < 64) {
        combine_four(d, j, up + j * 1024, [](float& sum, float other) { gate(sum, other); });
      }
    }
  }

  // A warpgroup's columns of y and eights of rows [first, end).
  template <class Program>
  ETC_DEVICE void finish(
      const Run<Program>& run, u32 words, const float (&d)[kRows / 2], u32 wg, u32 first,
      u32 end) const {
    if constexpr (Epilogue::kOnlyRounds) {
      store(run, words, d, wg, first, end);
    } else {
      apply(run, words, d, wg, first, end);
    }
  }

  // The epilogue, for 32 rows at a time.
  template <class Program>
  ETC_DEVICE void apply(
      const Run<Program>& run, u32 words, const float (&d)[kRows / 2], u32 wg, u32 first,
      u32 end) const {
    constexpr u32 kTogether = 4;  // eights of rows
    constexpr i32 kStrip = Epilogue::kIsGated && kTakesTurns ? 32 : kColumns;
    const u32 thread = ptx::thread() & 127, lane = thread & 31, warp = thread >> 5;
    const u32 rows = buffer + wg * kHalfBuffer, row = lane % 4 * 2, in_eight = lane / 4;
    const i32 column = has_unit(thread % 8) ? i32(wg * kColumns + thread % 8 * 8) : kNoColumn;
    const auto row_of = [&](u32 n) { return i32(n * 16 + thread / 8); };
    TileEights<Program, typename Epilogue::Call, (kRows + 15) / 16> eights(
        run, words, first * 8, end * 8);
#pragma unroll 1
    for (u32 pass = 0; pass < eights.kPasses; ++pass) {
#pragma unroll
      for (u32 f = 0; f < kEights; f += kTogether) {
        if (pass > 0 || f > 0) ptx::named_barrier<128>(2 + wg);  // the rows have been read
#pragma unroll
        for (u32 j = f; j < f + kTogether && j < kEights; ++j) {
#pragma unroll
          for (u32 i = 0; i < 4; ++i) {
            const u32 at = place_of_sums(
                (j - f) * 8 + row + i % 2, warp * 2 + i / 2, in_eight / 4);
            ptx::store_shared(rows + at + in_eight % 4 * 4, __float_as_uint(d[4 * j + i]));
          }
        }
        ptx::named_barrier<128>(2 + wg);  // the rows are complete
#pragma unroll
        for (u32 n = f / 2; n < (f + kTogether) / 2 && n * 16 < kRows; ++n) {
          eights.take(pass, n, row_of(n), column, rows, u32(row_of(n)) - f * 8);
        }
      }
      eights.end(pass, column, kStrip, row_of);
    }
  }

  // A warpgroup's columns of y and eights of rows [first, end), transposed in shared memory into
  // rows of 128 bytes.
  template <class Program>
  ETC_DEVICE void store(
      const Run<Program>& run, u32 place, const float (&d)[kRows / 2], u32 wg, u32 first,
      u32 end) const {
    const u32 thread = ptx::thread() & 127, lane = thread & 31, warp = thread >> 5;
    const u32 out = buffer + wg * kHalfBuffer;
    const u32 matrix = warp * 2 + (lane >> 3 & 1), in_row = lane & 7;
    const u32 in = out + in_row * 128 + ((matrix ^ in_row) << 4);
#pragma unroll
    for (u32 j = 0; j < kEights; ++j) {
      ptx::store_matrix2_transposed(
          in + j * 1024, pack<kIsHalf>(d[4 * j], d[4 * j + 1]),
          pack<kIsHalf>(d[4 * j + 2], d[4 * j + 3]));
    }
    ptx::named_barrier<128>(2 + wg);
    const auto whole = Epilogue::Place::read(place);
    const u32 unit = thread % 8, column = wg * kColumns + unit * 8;
    whole.each_rank(run, place, [&](const auto& to) {
#pragma unroll
      for (u32 i = 0; i < (kRows + 15) / 16; ++i) {
        const u32 row = i * 16 + thread / 8;
        const bool is_row = row >= first * 8 && row < minimum(end * 8, u32(to.rows));
        if (is_row && has_unit(unit) && column < u32(to.columns)) {
          ptx::store16(
              to.at + u64(row) * to.row_bytes + column * 2,
              ptx::load_shared16(out + row * 128 + ((unit ^ (row & 7)) << 4)));
        }
      }
    });
  }
};

}  // namespace etc
