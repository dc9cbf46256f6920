// Tiles with 128 rows of x.
#pragma once
#include "functions/scaled_operands.cuh"
#include "functions/tile_biases.cuh"
#include "functions/tile_epilogue.cuh"
#include "functions/tile_parts.cuh"

namespace etc {

// 128 rows of x, the M of wgmma, 64 for each warpgroup; any multiple of 8 rows of w, its N. Each
// number of rows of w, and of boxes in a stage, has its own mainloop; all else is shared.
template <bool kIsHalf, class Weights, class Epilogue, class Tiles>
struct RowsTiles {
  static constexpr bool kIsKN = Weights::kIsKN;
  static_assert(!Weights::kIsScaled);
  static_assert(Tiles::kFirst.rows == 128);
  // The columns of accumulators: of the widest tile, or of a slice of gate and one of up.
  static constexpr u32 kMost = maximum(i32(Tiles::most_columns()), 2 * 8 * i32(kSliceGroups));
  u32 buffer;

  template <u32 kVariants, class Program>
  ETC_DEVICE bool compute(
      const Run<Program>& run, StageReader<Program>& stages, u32 count, u32 at_shape, u32 words,
      u32 variant) const {
    constexpr bool kMayBeGated = (kVariants & kGatedTile) != 0;
    const bool is_gated = (variant & kGatedTile) != 0;
    const u32 wg = __shfl_sync(~0u, ptx::thread() >> 7, 0);
    // NOTE: this clears all of them, though a tile may have fewer columns: undefined registers
    // would be live throughout the lane's loop.
    float d[kMost / 2];
    clear(d);
    constexpr bool kMayBeBiased = (kVariants & kBiasedTile) != 0;
    const bool is_biased = kMayBeBiased && (variant & kBiasedTile) != 0;
    ColumnBiases<kIsHalf, kMost> biases;
    if constexpr (kMayBeBiased) {
      if (is_biased) read_biases(biases, words, at_shape, is_gated);
    }
    bool is_lost = false;
    const bool is_sum = (kVariants & variant & kSumOfParts) != 0;
    if (is_sum) {
      if constexpr ((kVariants & kSumOfParts) != 0) {
        const auto parts = TileParts::read(at_shape + 4);
        const u32 num_groups = (u32(Epilogue::Place::read(words).columns) + 7) / 8;
        add_parts<0>(d, parts.first, parts.part_bytes, count, num_groups);
        if constexpr (kMayBeGated) {
          if (is_gated) {
            const u64 up = parts.first + parts.up_bytes;
            add_parts<kSliceGroups>(d, up, parts.part_bytes, count, num_groups);
            combine<2 * 8 * kSliceGroups>(d);
          }
        }
      }
    } else {
      Tiles::with(ptx::load_shared(at_shape) & 255, [&](auto tile) ETC_INLINE {
        is_lost = multiply<decltype(tile)::value, kMayBeGated>(
            run, stages, count, at_shape, wg, is_gated, d);
      });
    }
    if constexpr ((kVariants & kPartOfTile) != 0) {
      // NOTE: every mainloop ends with its sums in the same registers. Without this, the compiler
      // spills some of them.
#pragma unroll
      for (float& sum : d) ptx::keep_order(sum);
    }
    if constexpr (kMayBeBiased) {
      if (is_biased) biases.add_to(d);
    }
    const bool is_part = (kVariants & variant & kPartOfTile) != 0;
    if constexpr (kMayBeGated) {
      if (is_gated && !is_part && !is_sum) {
        Tiles::with(ptx::load_shared(at_shape) & 255, [&](auto tile) ETC_INLINE {
          combine<TileShape::of(decltype(tile)::value).columns>(d);
        });
      }
    }
    if (is_part && !is_lost) {
      store_part(part_address(words), d, read_shape(at_shape).columns / 8);
    }
    is_lost = ptx::named_barrier_any<128>(2 + wg, is_lost);
    if (!is_lost && !is_part) {
      if constexpr (Epilogue::kOnlyRounds) {
        store(run, words, d, wg);
      } else {
        apply(run, words, read_shape(at_shape).columns, d, wg);
      }
    }
    return !is_lost;
  }

 private:
  template <u32 kPacked, bool kMayBeGated, class Program>
  ETC_DEVICE bool multiply(
      const Run<Program>& run, StageReader<Program>& stages, u32 count, u32 at_shape, u32 wg,
      bool is_gated, float (&d)[kMost / 2]) const {
    constexpr TileShape kShape = TileShape::of(kPacked);
    const u32 begin = stages.descriptor_base();
    const u32 w = begin | kLeadingOfW<kIsKN>, x = begin | 0x10000u;
    const u32 first_x = kShape.depth * kShape.box_w() + wg * 64 * 128;
    Boxes boxes{0, 0, kShape.box_w(), kShape.box_x(), kShape.bytes(), 64};
    boxes.w = __shfl_sync(~0u, w, 0), boxes.x = __shfl_sync(~0u, x + first_x / 16, 0);
    if constexpr (!Weights::kAreCodes) {
      return multiply_boxes<kIsHalf, kIsKN, false, kShape.depth, kShape.columns>(
          run, stages, count, boxes, d);
    } else {
      static_assert(kShape.depth == 1);
      const auto scales = OperandScales::read(at_shape + 4);
      return multiply_codes<Weights, kShape.columns, kMayBeGated>(
          run, stages, count, boxes, scales, wg, is_gated, d);
    }
  }

  // Of a gated tile, the columns of up follow those of gate.
  ETC_DEVICE static void read_biases(
      ColumnBiases<kIsHalf, kMost>& biases, u32 words, u32 at_shape, bool is_gated) {
    static_assert(Epilogue::kOnlyRounds);
    const u32 columns = read_shape(at_shape).columns, half = is_gated ? columns / 2 : columns;
    const u32 end = u32(Epilogue::Place::read(words).columns);
    const BiasPlace place = BiasPlace::read(at_shape + 4 + 4 * Weights::kWords);
    biases.read([&](u32 column) {
      const bool is_up = column >= half;
      const u32 own_column = is_up ? column - half : column;
      const bool has_bias = column < columns && own_column < end;
      return has_bias ? (is_up ? place.up : place.gate) + own_column * 2 : 0;
    });
  }

  // Combines gate's sums with those of up, which follow them.
  template <u32 kColumns>
  ETC_DEVICE static void combine(float (&d)[kMost / 2]) {
    if constexpr (kColumns % 16 == 0) {
#pragma unroll
      for (u32 i = 0; i < kColumns / 4; ++i) d[i] = Epilogue::combine(d[i], d[i + kColumns / 4]);
    }
  }

  // The epilogue of a warp's 16 rows of y: 8 rows of 64 columns at a time, through its own part of
  // the buffer.
  template <class Program>
  ETC_DEVICE void apply(
      const Run<Program>& run, u32 words, u32 columns, const float (&d)[kMost / 2],
      u32 wg) const {
    constexpr u32 kShare = Epilogue::kIsGated ? 2 : 1, kUsed = kMost / 8 / kShare;
    const u32 thread = ptx::thread() & 127, lane = thread & 31, warp = thread >> 5;
    const u32 rows = buffer + wg * kHalfBuffer + warp * 2048, in_eight = lane % 4 * 2;
    const i32 column = i32(lane % 8 * 8);
    const auto row_of = [&](u32 n) { return i32(wg * 64 + warp * 16 + n * 4 + lane / 8); };
    TileEights<Program, typename Epilogue::Call, 4> eights(run, words);
#pragma unroll 1
    for (u32 pass = 0; pass < eights.kPasses; ++pass) {
#pragma unroll
      for (u32 g = 0; g < kUsed; g += 8) {
        if (i32(g * 8) >= eights.columns()) break;
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
#pragma unroll
          for (u32 j = g; j < g + 8 && j < kUsed; ++j) {
            const u32 place = place_of_sums(lane / 4, j - g, in_eight / 4) + in_eight % 4 * 4;
            const u32 sum = 4 * j + 2 * half;
            ptx::store_shared8(
                rows + place, __float_as_uint(d[sum]), __float_as_uint(d[sum + 1]));
          }
          __syncwarp();  // the rows are complete
#pragma unroll
          for (u32 n = 2 * half; n < 2 * half + 2; ++n) {
            const i32 of_eight = i32(g * 8) + column;
            eights.take(pass, n, row_of(n), of_eight, rows, n % 2 * 4 + lane / 8);
          }
          __syncwarp();  // the rows have been read
        }
      }
      eights.end(pass, column, i32(columns / kShare), row_of);
    }
  }

  // Stores a warp's 16 rows of y, 64 columns at a time, through its own part of the buffer.
  template <class Program>
  ETC_DEVICE void store(
      const Run<Program>& run, u32 place, const float (&d)[kMost / 2], u32 wg) const {
    const u32 thread = ptx::thread() & 127, lane = thread & 31, warp = thread >> 5;
    const u32 out = buffer + wg * kHalfBuffer + warp * 2048, in_row = lane & 15;
    const u32 first = wg * 64 + warp * 16, unit = lane % 8;
    const auto whole = Epilogue::Place::read(place);
#pragma unroll
    for (u32 g = 0; g < kMost / 8; g += 8) {
      if (g * 8 >= u32(whole.columns)) break;
#pragma unroll
      for (u32 j = g; j < g + 8 && j < kMost / 8; ++j) {
        ptx::store_matrix2(
            out + in_row * 128 + (((j - g) ^ (in_row & 7)) << 4),
            pack<kIsHalf>(d[4 * j], d[4 * j + 1]), pack<kIsHalf>(d[4 * j + 2], d[4 * j + 3]));
      }
      __syncwarp();
      const u32 column = (g + unit) * 8;
      whole.each_rank(run, place, [&](const auto& target) {
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
          const u32 row = i * 4 + lane / 8;
          if (first + row < u32(target.rows) && column < u32(target.columns)) {
            ptx::store16(
                target.at + u64(first + row) * target.row_bytes + column * 2,
                ptx::load_shared16(out + row * 128 + ((unit ^ (row & 7)) << 4)));
          }
        }
      });
      __syncwarp();
    }
  }
};

}  // namespace etc
