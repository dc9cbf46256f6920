// Wide tiles: up to 256 rows of w, the M of wgmma, by as many rows of x as the task has, its N.
#pragma once
#include "functions/scaled_weights.cuh"
#include "functions/swapped_sums.cuh"

namespace etc {

// A warpgroup multiplies 64 of the first 128 rows of w and 64 of the others: in a gated tile the
// same rows of gate and of up, so that a thread has both factors of each result. Each multiple of
// 16 rows of x up to the shape's has its own mainloop; all else is shared.
// NOTE: tiles of 128 rows of w multiply what follows these, and do not use those sums.
template <bool kIsHalf, class Weights, class Epilogue, class Tiles>
struct WideTiles {
  static constexpr u32 kRows = Tiles::kFirst.rows, kStep = 16, kBlock = 64, kHalf = 128;
  static_assert(kRows % kStep == 0 && Tiles::kFirst.depth == 1);
  static_assert(Epilogue::kOnlyRounds && !Weights::kIsKN && !Weights::kIsScaled);
  u32 buffer;

  template <u32 kVariants, class Program>
  ETC_DEVICE bool compute(
      const Run<Program>& run, StageReader<Program>& stages, u32 count, u32 at_shape, u32 words,
      u32 variant) const {
    constexpr bool kMayBeGathered = (kVariants & kGatheredTile) != 0;
    const bool is_gathered = kMayBeGathered && (variant & kGatheredTile) != 0;
    const bool is_gated = (kVariants & variant & kGatedTile) != 0;
    const u32 wg = __shfl_sync(~0u, ptx::thread() >> 7, 0);
    float d[2][kRows / 2];
#pragma unroll
    for (auto& sums : d) clear(sums);
    constexpr bool kMayBeBiased = (kVariants & kBiasedTile) != 0;
    const bool is_biased = kMayBeBiased && (variant & kBiasedTile) != 0;
    RowBiases<kIsHalf, Weights> biases[2];
    if constexpr (kMayBeBiased) {
      if (is_biased) read_biases(biases, words, at_shape, wg, is_gated);
    }
    bool is_lost = false;
    {
      const TileShape shape = read_shape(at_shape);
      const u32 begin = stages.descriptor_base() | 0x10000u;
      const u32 w = __shfl_sync(~0u, begin + wg * kBlock * 128 / 16, 0);
      const u32 x = __shfl_sync(~0u, begin + shape.box_w() / 16, 0);
      with_rows<kStep>(shape.num_loaded, [&](auto rows) ETC_INLINE {
        constexpr int kColumns = decltype(rows)::value;
        const auto multiply = [&](u32 address, u32) {
#pragma unroll
          for (u32 half = 0; half < 2; ++half) {
            ptx::wgmma_box<kIsHalf, kColumns>(
                d[half], ptx::matrix_descriptor(w + (address + half * kHalf * 128) / 16),
                ptx::matrix_descriptor(x + address / 16), 1);
          }
        };
        is_lost = multiply_stages(run, stages, count, shape.bytes(), is_gathered, multiply);
      });
    }
#pragma unroll
    for (auto& sums : d) {
#pragma unroll
      for (float& sum : sums) ptx::keep_order(sum);  // read after the wait, not before
    }
    if constexpr (kMayBeBiased) {
#pragma unroll
      for (u32 half = 0; half < 2 && is_biased; ++half) biases[half].add_to(d[half]);
    }
    is_lost = ptx::named_barrier_any<128>(2 + wg, is_lost);  // no thread uses the buffer any more
    if (is_lost) return false;
    if (is_gated) {
      store(run, words, wg, wg * kBlock, [&](u32 i) ETC_INLINE {
        return Epilogue::combine(d[0][i], d[1][i]);
      });
    } else {
      store(run, words, wg, wg * kBlock, [&](u32 i) ETC_INLINE { return d[0][i]; });
      ptx::named_barrier<128>(2 + wg);  // the rows have been read
      store(run, words, wg, kHalf + wg * kBlock, [&](u32 i) ETC_INLINE { return d[1][i]; });
    }
    return true;
  }

 private:
  ETC_DEVICE static void read_biases(
      RowBiases<kIsHalf, Weights> (&biases)[2], u32 words, u32 at_shape, u32 wg, bool is_gated) {
    const u32 end = u32(Epilogue::Place::read(words).columns);
    const BiasPlace place = BiasPlace::read(at_shape + 4);
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
      const u32 first = wg * kBlock + (is_gated ? 0 : half * kHalf);
      const u64 address = is_gated && half > 0 ? place.up : place.gate;
      biases[half].read([&](u32 row) {
        return first + row < end ? address + (first + row) * 2 : 0;
      });
    }
  }
  template <u32 n, class F>
  ETC_DEVICE static void with_rows(u32 rows, F f) {
    if constexpr (n == kRows) {
      f(Number<n>{});
    } else if (rows == n) {
      f(Number<n>{});
    } else {
      with_rows<n + kStep>(rows, f);
    }
  }
  // value(i): what is stored of a thread's i-th sum.
  template <class Program, class Value>
  ETC_DEVICE void store(
      const Run<Program>& run, u32 words, u32 wg, u32 first, Value value) const {
    const auto sums = [&](u32 j, u32 n) ETC_INLINE {
      return pack<kIsHalf>(value(4 * j + 2 * n), value(4 * j + 2 * n + 1));
    };
    store_sums<Weights, Epilogue, kRows / 8, true>(run, words, sums, buffer, wg, first, kBlock);
  }
};

}  // namespace etc
