// Swapped tiles: rows of w are the M of wgmma, rows of x its N.
#pragma once
#include "functions/scaled_weights.cuh"
#include "functions/tile_epilogue.cuh"
#include "functions/tile_parts.cuh"
#include "functions/tile_sums.cuh"

namespace etc {

// Up to 64 rows of x and up to 128 rows of w; or tall ones, of up to 256 rows of x and 128 of w.
// With at most 64 rows of w, the warpgroups multiply alternate boxes along k; with more, each has
// half of these rows. wgmma always multiplies 64 rows: if there are fewer, it reads the memory that
// follows, and these sums are not used. Tiles with equally many rows of x share their code.
template <bool kIsHalf, class Weights, class Epilogue, class Tiles>
struct SwappedTiles {
  static constexpr bool kIsKN = Weights::kIsKN;
  static constexpr u32 kRows = Tiles::kFirst.rows, kEights = kRows / 8;
  // The kinds of tiles among `Tiles`.
  static constexpr bool kTurns = Tiles::any([](TileShape s) { return s.halves() == 0; });
  static constexpr bool kHalves = Tiles::any([](TileShape s) { return s.halves() == 1; });
  // Whether a warpgroup multiplies so many boxes of a stage of any: 1 and 2, or 2 and 4.
  template <u32 kBoxes>
  static constexpr bool kHas =
      Tiles::any([](TileShape s) { return s.warpgroup_boxes() == kBoxes; });

  static_assert(!(kHas<1> && kHas<4>));

  u32 buffer;

  // Called by the 256 compute threads. `at_shape`: the shared address of the packed shape.
  // In a gated tile, the first half of the rows of w are those of gate.
  template <u32 kVariants, class Program>
  ETC_DEVICE bool compute(
      const Run<Program>& run, StageReader<Program>& stages, u32 count, u32 at_shape, u32 words,
      u32 variant) const {
    constexpr bool kMayBeGated = (kVariants & kGatedTile) != 0;
    const bool is_gated = (variant & kGatedTile) != 0;
    const u32 wg = __shfl_sync(~0u, ptx::thread() >> 7, 0);
    float d[kRows / 2];
    clear(d);
    const bool is_sum = (kVariants & variant & kSumOfParts) != 0;
    const bool is_part = (kVariants & variant & kPartOfTile) != 0;
    bool lost = false;
    if (is_sum) {
      if constexpr ((kVariants & kSumOfParts) != 0) {
        const auto parts = TileParts::read(at_shape + 4);
        const u32 rows = u32(Epilogue::Place::read(words).rows);
        add_parts<0>(d, parts.first, parts.part_bytes, count, (rows + 7) / 8);
      }
    } else {
      if constexpr (Weights::kIsScaled) {
        lost = multiply_codes(run, stages, count, at_shape, wg, is_gated, d);
      } else {
        lost = multiply(run, stages, count, read_shape(at_shape), wg, d);
      }
    }
    const TileShape shape = read_shape(at_shape);
    bool finishes = true;
    if (kTurns && (!kHalves || shape.halves() == 0)) {
      if constexpr (kTurns) {
        if (!is_sum) {  // parts have the sums of both warpgroups
          lost = combine(d, wg, lost, [](float& sum, float other) { sum += other; });
        }
        finishes = wg == 0;
        if constexpr (kMayBeGated) {
          if (finishes && !is_part && is_gated) gate_warps(d);
        }
      }
    } else if (kMayBeGated && is_gated && !is_part) {
      if constexpr (kMayBeGated) {
        lost = combine(d, wg, lost, [](float& sum, float up) { gate(sum, up); });
        finishes = wg == 0;
      }
    } else {
      lost = ptx::named_barrier_any<128>(2 + wg, lost);
    }
    if constexpr ((kVariants & kPartOfTile) != 0) {
      if (is_part && finishes && !lost) {
        store_part(part_address(words), d, shape.loaded / 8);
        finishes = false;
      }
    }
    if (finishes && !lost) finish(run, words, shape, d, wg);
    return !lost;
  }

 private:
  static constexpr i32 kNoColumn = 0x7fffffff;

  // The mainloop.
  template <class Program>
  ETC_DEVICE bool multiply(
      const Run<Program>& run, StageReader<Program>& stages, u32 count, const TileShape& shape,
      u32 wg, float (&d)[kRows / 2]) const {
    const u32 begin = stages.descriptor_base(), turns = 1 - shape.halves();
    const u32 w = begin | kLeadingOfW<kIsKN>, x = begin | 0x10000u;
    const u32 apart = shape.box_w() >> shape.halves();  // bytes between the warpgroups' boxes
    const u32 first_x = shape.depth * shape.box_w() + wg * turns * shape.box_x();
    const Boxes boxes{
        __shfl_sync(~0u, w + wg * apart / 16, 0), __shfl_sync(~0u, x + first_x / 16, 0),
        shape.box_w() << turns, shape.box_x() << turns, shape.bytes(), shape.warpgroup_columns()};
    bool lost = false;
    const auto multiply_by = [&](auto number) ETC_INLINE {
      lost = multiply_boxes<kIsHalf, kIsKN, true, decltype(number)::value, kRows>(
          run, stages, count, boxes, d);
    };
    if constexpr (kHas<1> && kHas<2>) {
      if (shape.warpgroup_boxes() == 2) {
        multiply_by(Number<2u>{});
      } else {
        multiply_by(Number<1u>{});
      }
    } else if constexpr (kHas<1>) {
      multiply_by(Number<1u>{});
    } else if (kHas<4> && shape.warpgroup_boxes() == 4) {
      if constexpr (kHas<4>) multiply_by(Number<4u>{});
    } else {
      multiply_by(Number<2u>{});
    }
    return lost;
  }

  // The same of scaled weights.
  template <class Program>
  ETC_DEVICE bool multiply_codes(
      const Run<Program>& run, StageReader<Program>& stages, u32 count, u32 at_shape, u32 wg,
      bool is_gated, float (&d)[kRows / 2]) const {
    const TileShape shape = read_shape(at_shape);
    const ScaledRows<Weights> w(ScalePlace::read(at_shape + 4), shape, wg, is_gated);
    return multiply_scaled<kIsHalf, Weights, kRows>(run, stages, count, shape, w, wg, d);
  }

  ETC_DEVICE static void gate(float& sum, float up) { sum = Epilogue::combine(sum, up); }

  // Combines the first warpgroup's sums with the second one's, four groups of rows at a time.
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
    if (wg == 0) ptx::named_barrier<128>(2);
    return lost;
  }

  // In the first warpgroup, warps 0 and 1 have gate's sums, 2 and 3 up's of the same columns; of
  // scaled weights, each thread has both.
  ETC_DEVICE void gate_warps(float (&d)[kRows / 2]) const {
    if constexpr (Weights::kIsScaled) {
#pragma unroll
      for (u32 i = 0; i < kRows / 2; ++i) {
        if (i % 4 < 2) gate(d[i], d[i + 2]);
      }
    } else {
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
  }

  // Applies the epilogue to a warpgroup's columns of y.
  template <class Program>
  ETC_DEVICE void finish(
      const Run<Program>& run, u32 words, const TileShape& shape, const float (&d)[kRows / 2],
      u32 wg) const {
    if constexpr (Epilogue::kOnlyRounds) {
      store(run, words, shape, d, wg);
    } else {
      apply(run, words, shape, d, wg);
    }
  }

  // The epilogue, for 32 rows at a time.
  template <class Program>
  ETC_DEVICE void apply(
      const Run<Program>& run, u32 words, const TileShape& shape, const float (&d)[kRows / 2],
      u32 wg) const {
    constexpr u32 kTogether = 4;  // groups of rows
    const u32 columns = shape.warpgroup_columns();
    const i32 strip = Epilogue::kIsGated && shape.halves() == 0 ? 32 : i32(columns);
    const u32 thread = ptx::thread() & 127, lane = thread & 31, warp = thread >> 5;
    const u32 rows = buffer + wg * kHalfBuffer, row = lane % 4 * 2, in_eight = lane / 4;
    const u32 of_unit = thread % 8 * 8;
    const i32 column = of_unit < columns ? i32(wg * columns + of_unit) : kNoColumn;
    const auto row_of = [&](u32 n) { return i32(n * 16 + thread / 8); };
    TileEights<Program, typename Epilogue::Call, (kRows + 15) / 16> eights(
        run, words);
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
                (j - f) * 8 + row + i % 2, Weights::eight(warp, i / 2), in_eight / 4);
            ptx::store_shared(rows + at + in_eight % 4 * 4, __float_as_uint(d[4 * j + i]));
          }
        }
        ptx::named_barrier<128>(2 + wg);  // the rows are complete
#pragma unroll
        for (u32 n = f / 2; n < (f + kTogether) / 2 && n * 16 < kRows; ++n) {
          eights.take(pass, n, row_of(n), column, rows, u32(row_of(n)) - f * 8);
        }
      }
      eights.end(pass, column, strip, row_of);
    }
  }

  // Stores a warpgroup's columns of y, transposed in shared memory into rows of 128 bytes.
  template <class Program>
  ETC_DEVICE void store(
      const Run<Program>& run, u32 place, const TileShape& shape, const float (&d)[kRows / 2],
      u32 wg) const {
    const u32 thread = ptx::thread() & 127, lane = thread & 31, warp = thread >> 5;
    const u32 out = buffer + wg * kHalfBuffer;
    const u32 matrix = Weights::eight(warp, lane >> 3 & 1), in_row = lane & 7;
    const u32 in = out + in_row * 128 + ((matrix ^ in_row) << 4);
    const auto whole = Epilogue::Place::read(place);
    const u32 columns = shape.warpgroup_columns();
    const u32 unit = thread % 8, column = wg * columns + unit * 8;
    constexpr u32 kTogether = 8;  // groups of rows that the buffer holds
#pragma unroll
    for (u32 f = 0; f < kEights; f += kTogether) {
      if (f > 0 && f * 8 >= u32(whole.rows)) break;
      if (f > 0) ptx::named_barrier<128>(2 + wg);  // the rows have been read
#pragma unroll
      for (u32 j = f; j < f + kTogether && j < kEights; ++j) {
        ptx::store_matrix2_transposed(
            in + (j - f) * 1024, pack<kIsHalf>(d[4 * j], d[4 * j + 1]),
            pack<kIsHalf>(d[4 * j + 2], d[4 * j + 3]));
      }
      ptx::named_barrier<128>(2 + wg);
      whole.each_rank(run, place, [&](const auto& to) {
#pragma unroll
        for (u32 i = 0; i < kTogether / 2 && i * 16 < kRows; ++i) {
          const u32 in_rows = i * 16 + thread / 8, row = f * 8 + in_rows;
          if (row < u32(to.rows) && unit * 8 < columns && column < u32(to.columns)) {
            ptx::store16(
                to.at + u64(row) * to.row_bytes + column * 2,
                ptx::load_shared16(out + in_rows * 128 + ((unit ^ (row & 7)) << 4)));
          }
        }
      });
    }
  }
};

}  // namespace etc
