// Swapped tiles: rows of w are the M of wgmma, rows of x its N.
#pragma once
#include "functions/scaled_weights.cuh"
#include "functions/swapped_sums.cuh"
#include "functions/tile_epilogue.cuh"
#include "functions/tile_parts.cuh"

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
  static constexpr bool kTurns = Tiles::any([](TileShape shape) { return shape.halves() == 0; });
  static constexpr bool kHalves = Tiles::any([](TileShape shape) { return shape.halves() == 1; });
  // Whether a warpgroup multiplies so many boxes of a stage of any: 1 and 2, or 2 and 4.
  template <u32 kBoxes>
  static constexpr bool kHas =
      Tiles::any([](TileShape shape) { return shape.warpgroup_boxes() == kBoxes; });

  static_assert(!(kHas<1> && kHas<4>));

  u32 buffer;

  // Called by the 256 compute threads. `at_shape`: the shared address of the packed shape.
  // In a gated tile, the first half of the rows of w are those of gate.
  template <u32 kVariants, class Program>
  ETC_DEVICE bool compute(
      const Run<Program>& run, StageReader<Program>& stages, u32 count, u32 at_shape, u32 words,
      u32 variant) const {
    constexpr bool kMayBeGated = (kVariants & kGatedTile) != 0;
    constexpr bool kMayBeLeft = (kVariants & kLeftTile) != 0;
    const bool is_gated = (variant & kGatedTile) != 0;
    const u32 wg = __shfl_sync(~0u, ptx::thread() >> 7, 0);
    float d[kRows / 2];
    clear(d);
    constexpr bool kMayBeBiased = (kVariants & kBiasedTile) != 0;
    const bool is_biased = kMayBeBiased && (variant & kBiasedTile) != 0;
    RowBiases<kIsHalf, Weights> biases;
    if constexpr (kMayBeBiased) {
      if (is_biased) read_biases(biases, words, at_shape, wg, is_gated);
    }
    const bool is_sum = (kVariants & variant & kSumOfParts) != 0;
    const bool is_part = (kVariants & variant & kPartOfTile) != 0;
    bool is_lost = false;
    if (is_sum) {
      if constexpr ((kVariants & kSumOfParts) != 0) {
        const auto parts = TileParts::read(at_shape + 4);
        const u32 rows = u32(Epilogue::Place::read(words).rows);
        add_parts<0>(d, parts.first, parts.part_bytes, count, (rows + 7) / 8);
      }
    } else {
      constexpr bool kMayBeGathered = (kVariants & kGatheredTile) != 0;
      const bool is_gathered = kMayBeGathered && (variant & kGatheredTile) != 0;
      if constexpr (Weights::kIsScaled) {
        is_lost = multiply_codes(run, stages, count, at_shape, wg, is_gated, is_gathered, d);
      } else {
        is_lost = multiply(run, stages, count, read_shape(at_shape), wg, is_gathered, d);
      }
    }
    if constexpr (kMayBeBiased) {
      if (is_biased) biases.add_to(d);
    }
    const TileShape shape = read_shape(at_shape);
    bool is_finishing = true;
    if (kTurns && (!kHalves || shape.halves() == 0)) {
      if constexpr (kTurns) {
        if (!is_sum) {  // parts have the sums of both warpgroups
          is_lost = combine<kMayBeLeft>(
              d, wg, is_lost, [](float& sum, float other_sum) { sum += other_sum; });
        }
        is_finishing = wg == 0;
        if constexpr (kMayBeGated) {
          if (is_finishing && !is_part && is_gated) gate_warps(d);
        }
      }
    } else if (kMayBeGated && is_gated && !is_part) {
      if constexpr (kMayBeGated) {
        is_lost = combine<kMayBeLeft>(d, wg, is_lost, [](float& sum, float up) { gate(sum, up); });
        is_finishing = wg == 0;
      }
    } else {
      is_lost = ptx::named_barrier_any<128>(2 + wg, is_lost);
    }
    if constexpr ((kVariants & kPartOfTile) != 0) {
      if (is_part && is_finishing && !is_lost) {
        store_part(part_address(words), d, shape.num_loaded / 8);
        is_finishing = false;
      }
    }
    if (is_finishing && !is_lost) finish(run, words, shape, d, wg);
    return !is_lost;
  }

 private:
  static constexpr i32 kNoColumn = 0x7fffffff;

  // The mainloop.
  template <class Program>
  ETC_DEVICE bool multiply(
      const Run<Program>& run, StageReader<Program>& stages, u32 count, const TileShape& shape,
      u32 wg, bool is_gathered, float (&d)[kRows / 2]) const {
    const u32 begin = stages.descriptor_base(), turn_bit = 1 - shape.halves();
    const u32 w = begin | kLeadingOfW<kIsKN>, x = begin | 0x10000u;
    const u32 apart = shape.box_w() >> shape.halves();  // bytes between the warpgroups' boxes
    const u32 first_x = shape.depth * shape.box_w() + wg * turn_bit * shape.box_x();
    const Boxes boxes{
        __shfl_sync(~0u, w + wg * apart / 16, 0), __shfl_sync(~0u, x + first_x / 16, 0),
        shape.box_w() << turn_bit, shape.box_x() << turn_bit, shape.bytes(),
        shape.warpgroup_columns()};
    bool is_lost = false;
    const auto multiply_by = [&](auto number) ETC_INLINE {
      if constexpr (Epilogue::kHasTwoSums && !kTurns) {
        is_lost = multiply_twice<decltype(number)::value>(run, stages, count, boxes, d);
        return;
      }
      is_lost = multiply_boxes<kIsHalf, kIsKN, true, decltype(number)::value, kRows>(
          run, stages, count, boxes, d, is_gathered);
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
    return is_lost;
  }

  // The mainloop of boxes with even numbers and of those with odd ones, whose sums are added then.
  template <u32 kBoxes, class Program>
  ETC_DEVICE static bool multiply_twice(
      const Run<Program>& run, StageReader<Program>& stages, u32 count, const Boxes& boxes,
      float (&d)[kRows / 2]) {
    float sums[2][kRows / 2];
#pragma unroll
    for (auto& row_sums : sums) clear(row_sums);
    const auto multiply = [&](u32 begin, u32) {
#pragma unroll
      for (u32 box = 0; box < kBoxes; ++box) {
        const u32 w = boxes.w + (begin + box * boxes.next_w) / 16;
        const u32 x = boxes.x + (begin + box * boxes.next_x) / 16;
        ptx::wgmma_box<kIsHalf, kRows, kIsKN>(
            sums[box % 2], ptx::matrix_descriptor(w), ptx::matrix_descriptor(x), 1, boxes.rows);
      }
    };
    const bool is_lost = multiply_stages(run, stages, count, boxes.bytes, false, multiply);
#pragma unroll
    for (u32 i = 0; i < kRows / 2; ++i) {
      ptx::keep_order(sums[0][i]), ptx::keep_order(sums[1][i]);
      d[i] += sums[0][i] + sums[1][i];
    }
    return is_lost;
  }

  // The same of scaled weights.
  template <class Program>
  ETC_DEVICE bool multiply_codes(
      const Run<Program>& run, StageReader<Program>& stages, u32 count, u32 at_shape, u32 wg,
      bool is_gated, bool is_gathered, float (&d)[kRows / 2]) const {
    const TileShape shape = read_shape(at_shape);
    const ScaledRows<Weights> w(ScalePlace::read(at_shape + 4), shape, wg, is_gated);
    return multiply_scaled<kIsHalf, Weights, kRows>(
        run, stages, count, shape, w, wg, is_gathered, d);
  }

  // Of a gated tile, each warpgroup has the sums of gate or of up, or both have those of 32 rows of
  // gate and of 32 of up. Where the sums of both are added, the second one has no biases.
  ETC_DEVICE static void read_biases(
      RowBiases<kIsHalf, Weights>& biases, u32 words, u32 at_shape, u32 wg, bool is_gated) {
    static_assert(Epilogue::kOnlyRounds);
    const TileShape shape = read_shape(at_shape);
    const u32 end = u32(Epilogue::Place::read(words).columns);
    const BiasPlace place = BiasPlace::read(at_shape + 4 + 4 * Weights::kWords);
    const bool is_added = kTurns && (!kHalves || shape.halves() == 0);
    const u32 first = is_gated ? 0 : wg * shape.warpgroup_columns();
    if (is_added && wg > 0) return;
    biases.read([&](u32 row) {
      const bool is_up = is_gated && (is_added ? row >= 32 : wg > 0);
      const u32 column = is_gated && is_added ? row % 32 : first + row;
      return column < end ? (is_up ? place.up : place.gate) + column * 2 : 0;
    });
  }

  ETC_DEVICE static void gate(float& sum, float up) { sum = Epilogue::combine(sum, up); }

  // Combines the first warpgroup's sums with the second one's, four groups of rows at a time.
  // kMayBeLeft: the first one may still store the tile before from there.
  template <bool kMayBeLeft, class F>
  ETC_DEVICE bool combine(float (&d)[kRows / 2], u32 wg, bool is_lost, F f) const {
    const u32 address = buffer + (ptx::thread() & 127) * 16;
#pragma unroll
    for (u32 first = 0; first < kEights; first += 4) {
      if (kMayBeLeft || first > 0) ptx::named_barrier<256>(1);
      if (wg == 1) {
#pragma unroll
        for (u32 j = first; j < first + 4 && j < kEights; ++j) {
          store_four(d, j, address + j % 4 * 2048);
        }
      }
      is_lost = ptx::named_barrier_any<256>(1, is_lost);
      if (wg == 0) {
#pragma unroll
        for (u32 j = first; j < first + 4 && j < kEights; ++j) {
          combine_four(d, j, address + j % 4 * 2048, f);
        }
      }
    }
    // The sums have been read: the tile is stored in their place.
    if (wg == 0) ptx::named_barrier<128>(2);
    return is_lost;
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
          combine_four(
              d, j, up + j * 1024, [](float& sum, float up_sum) { gate(sum, up_sum); });
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
      const u32 columns = shape.warpgroup_columns();
      const auto sums = [&](u32 j, u32 n) ETC_INLINE {
        return pack<kIsHalf>(d[4 * j + 2 * n], d[4 * j + 2 * n + 1]);
      };
      store_sums<Weights, Epilogue, kEights, false>(
          run, words, sums, buffer, wg, wg * columns, columns);
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
            const u32 place = place_of_sums(
                (j - f) * 8 + row + i % 2, Weights::eight(warp, i / 2), in_eight / 4);
            ptx::store_shared(rows + place + in_eight % 4 * 4, __float_as_uint(d[4 * j + i]));
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
};

}  // namespace etc
