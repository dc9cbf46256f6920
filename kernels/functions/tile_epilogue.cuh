// Applying an epilogue to the tiles of a matrix multiplication: see functions/epilogue.cuh.
#pragma once
#include "epilogues/activated.cuh"
#include "epilogues/swiglu.cuh"
#include "functions/epilogue.cuh"
#include "functions/tile_shape.cuh"

namespace etc {

// For calls whose epilogue only rounds. Those with equal parameters share one Compute. A gated one
// applies Gate.
template <bool kHasPeers, class Gate = SwigluActivation>
struct RoundedTile {
  static constexpr bool kOnlyRounds = true, kIsGated = false, kHasTwoSums = false;
  using Place = TilePlace<kHasPeers>;
  static constexpr u32 kWords = Place::kWords;

  ETC_DEVICE static float combine(float gate, float up) { return Gate::apply(gate, up); }
};

// The epilogue of one call. The words of a work item: the tile's size, then the coordinate.
template <class Call_>
struct AppliedEpilogue {
  using Call = Call_;
  using Coord = typename Call::Coord;
  static constexpr bool kOnlyRounds = false, kIsGated = Call::kGated;
  static constexpr bool kHasTwoSums = Call::template Epilogue<Call>::kHasTwoSums;
  static constexpr u32 kCoordinates = sizeof(Coord) / 4, kWords = 1 + kCoordinates;

  ETC_DEVICE static float combine(float gate, float up) {
    if constexpr (kIsGated) return Call::template Epilogue<Call>::combine(gate, up);
    return gate;
  }
  ETC_DEVICE static void write(const TileSize& size, const Coord& c, u32* words) {
    words[0] = u32(size.rows) | u32(size.columns) << 16;
#pragma unroll
    for (u32 n = 0; n < kCoordinates; ++n) words[1 + n] = reinterpret_cast<const u32*>(&c)[n];
  }
  ETC_DEVICE static TileSize size(u32 words) {
    const u32 word = ptx::load_shared(words);
    return {i32(word & 0xffffu), i32(word >> 16)};
  }
  ETC_DEVICE static Coord coordinate(u32 words) {
    Coord c;
#pragma unroll
    for (u32 n = 0; n < kCoordinates; ++n) {
      reinterpret_cast<u32*>(&c)[n] = ptx::load_shared(words + 4 + 4 * n);
    }
    return c;
  }
};

// Whether the epilogue of a call is one of those that share RoundedTile.
template <class Call>
constexpr bool only_rounds() {
  using Epilogue = typename Call::template Epilogue<Call>;
  constexpr bool kIsKnown =
      kIsSame<Epilogue, swiglu<Call>> || kIsSame<Epilogue, activated<Call>>;
  return Epilogue::kOnlyRounds && (!Call::kGated || kIsKnown);
}
template <class Call, bool kOnlyRounds = only_rounds<Call>()>
struct EpilogueOf {
  using Type = AppliedEpilogue<Call>;
};
template <class Call, bool kHasPeers, bool kIsActivated>
struct RoundedOf {
  using Type = RoundedTile<kHasPeers>;
};
template <class Call, bool kHasPeers>
struct RoundedOf<Call, kHasPeers, true> {
  using Type = RoundedTile<kHasPeers, ActivationOf<Call>>;
};
template <class Call>
struct EpilogueOf<Call, true> {
  static constexpr bool kIsActivated =
      Call::kGated && kIsSame<typename Call::template Epilogue<Call>, activated<Call>>;
  using Type = typename RoundedOf<Call, bool(Call::kHasPeers), kIsActivated>::Type;
};

// The offset in shared memory of half a group of eight columns, in rows of 64 fp32 sums: swizzled
// against bank conflicts.
ETC_DEVICE u32 place_of_sums(u32 row, u32 eight, u32 half) {
  const u32 place = eight ^ (row & 7);
  return row * 256 + place * 32 + (half ^ (place >> 2 & 1)) * 16;
}

// A thread's groups of eight columns, in kRows rows: eight lanes have the 64 columns of a row.
// There is one pass over them, or two if a row's reduction changes its elements: the first reduces.
template <class Program, class Call, u32 kRows>
class TileEights {
  using Applied = AppliedEpilogue<Call>;
  using Task = EpilogueTask<typename Program::Args, Call>;
  using Hook = typename Call::template Epilogue<Task>;
  static constexpr bool kReduces = Call::kReduces;
  static constexpr bool kFinishes =
      requires(const Task& task, float (&values)[8]) { Hook::finish(task, 0, 0, values, 0.0f); };

 public:
  static constexpr u32 kPasses = kReduces && kFinishes ? 2 : 1;

  ETC_DEVICE TileEights(const Run<Program>& run, u32 words)
      : task_(run.g, Applied::coordinate(words)), size_(Applied::size(words)) {
#pragma unroll
    for (float& result : results_) result = Hook::kIdentity;
  }

  ETC_DEVICE i32 columns() const { return size_.columns; }

  // One eight of row n, from row `in_rows` of the rows of 64 columns at `rows`.
  ETC_DEVICE void take(u32 pass, u32 n, i32 row, i32 column, u32 rows, u32 in_rows) {
    if (row >= size_.rows || column >= size_.columns) return;
    const u32 eight = ptx::lane() & 7;
    float values[8];
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
      const uint4 four = ptx::load_shared16(rows + place_of_sums(in_rows, eight, half));
      values[4 * half] = __uint_as_float(four.x), values[4 * half + 1] = __uint_as_float(four.y);
      values[4 * half + 2] = __uint_as_float(four.z),
          values[4 * half + 3] = __uint_as_float(four.w);
    }
    Hook::apply(task_, row, column, values);
    if constexpr (kReduces) {
      if (pass == 0) {
#pragma unroll
        for (float value : values) results_[n] = Hook::reduce(results_[n], Hook::measure(value));
      }
    }
    if (pass + 1 < kPasses) return;
    if constexpr (kPasses > 1) Hook::finish(task_, row, column, values, results_[n]);
    const auto y = last_axes<2>(Call::template operand<Call::kReads>(task_.g, task_.c));
    store_eight(y.at(row, column), values);
  }

  // The end of a pass. row_of(n); `first`: the thread's first column; `width`: that of a strip.
  template <class F>
  ETC_DEVICE void end(u32 pass, i32 first, i32 width, F row_of) {
    if constexpr (kReduces) {
      if (pass > 0) return;
#pragma unroll
      for (u32 n = 0; n < kRows; ++n) {
#pragma unroll
        for (u32 step = 1; step < 8; step *= 2) {
          results_[n] = Hook::reduce(results_[n], __shfl_xor_sync(~0u, results_[n], step));
        }
        const i32 row = row_of(n);
        if (ptx::lane() % 8 == 0 && row < size_.rows && first < size_.columns) {
          Hook::store_row(task_, first / width, row, results_[n]);
        }
      }
    }
  }

 private:
  Task task_;
  TileSize size_;
  float results_[kRows];
};

}  // namespace etc
