// Grouped matrix multiplication: tiles of up to 144 rows of x, all of one group, by 256 rows of that
// group's weight.
//
// The number of rows of x in a tile is known only at run time. So rows of the weight are the M of
// wgmma, 64 at a time, and rows of x its N, any multiple of 16. Each of two warpgroups multiplies
// 2 x 64 rows of the weight. In two kinds of tiles it is 64 rows, and stages have twice the depth, to
// keep equally many bytes in flight:
//   narrow  at most 16 rows of x and 128 of the weight;
//   thin    at most 64 rows of x and 128 of the weight.
//
// The rows of the weight are in two blocks of 64, which alternate in groups of eight, so that a
// warp has 32 adjacent rows. A gated tile needs the same rows of two weights, gate and up, which
// alternate in groups of eight in the stages. So a thread has both factors of each result.
//
// The warpgroups transpose a finished tile in the buffer and store it from registers: bulk stores
// would delay the next use of the buffer. The store warp computes the address of the tile, and
// notifies once all of it is stored.
#pragma once
#include "ptx/warp.cuh"
#include "ptx/wgmma_columns.cuh"
#include "functions/activation.cuh"
#include "functions/mainloop.cuh"

namespace etc {

struct GroupedTile {
  static constexpr u32 kPiece = 16;     // rows of x in a small box
  static constexpr u32 kLarge = 64;     // rows of x in a large box
  static constexpr u32 kMaxRows = 144;  // of x in a tile
  static constexpr u32 kRowBytes = kStageDepth * 2;
  static constexpr u32 kBoxRows = 128, kBoxBytes = kBoxRows * kRowBytes;  // of the weight
  static constexpr u32 kBytesX = kMaxRows * kRowBytes, kBytesW = 2 * kBoxBytes;
  static constexpr u32 kStageBytes = kBytesX + kBytesW;
  static constexpr u32 kOutBytes = 96 * 128;  // of a warpgroup's part of the buffer
  static constexpr u32 kFew = 8;  // gathered rows of x that bulk copies load, one by one
  static constexpr u32 kThinRows = kLarge;  // rows of x in a thin tile
  enum Variant : u32 { kGated = 1, kThin = 2, kGathered = 4, kBiased = 8 };

  // The size of a task; rows is 0 if the tile has no rows or columns.
  struct Size {
    u32 steps, rows;
    bool is_narrow;  // or thin
    u32 boxes;       // of the weight in a stage
    u32 few;         // gathered rows that are loaded one by one; 0 if there are more than kFew

    ETC_DEVICE u32 packed() const {
      return steps | rows << 16 | u32(is_narrow) << 24 | boxes << 25 | few << 27;
    }
    ETC_DEVICE static Size of(u32 v) {
      return {v & 0xffffu, v >> 16 & 0xffu, (v >> 24 & 1) != 0, v >> 25 & 3, v >> 27};
    }
    ETC_DEVICE u32 depth() const { return is_narrow ? 2 : 1; }  // of a stage, in kStageDepth
  };

  template <u32 n, class F>
  ETC_DEVICE static void with_columns(u32 rows, F f) {
    if constexpr (n == kMaxRows) {
      f(Number<n>{});
    } else if (rows == n) {
      f(Number<n>{});
    } else {
      with_columns<n + kPiece>(rows, f);
    }
  }
};

// The result of a thin tile is in fp32.
template <bool kIsHalf, class Gate>
struct GroupedMatmul : GroupedTile {
  u32 control, buffer;
  static constexpr u32 kControlBytes = 56;
  // round: the number of tiles.
  struct Counters {
    u32 round;
  };

  // mbarriers. `placed`: the store warp has written the place of a tile. `stored`: a warpgroup has
  // stored its part. The place follows them, then the addresses of the biases, of gate and up or
  // twice of the same.
  ETC_DEVICE u32 placed() const { return control; }
  ETC_DEVICE u32 stored(u32 wg) const { return control + 8 + 8 * wg; }
  ETC_DEVICE u32 place() const { return control + 24; }
  template <class Program>
  ETC_DEVICE u32 out(u32 wg) const {
    static_assert(2 * kOutBytes <= Program::kBufferBytes);
    return buffer + wg * (Program::kBufferBytes / 2);
  }

  ETC_DEVICE void init() const {
    ptx::mbarrier_init(placed(), 1);
    for (u32 wg = 0; wg < 2; ++wg) ptx::mbarrier_init(stored(wg), 128);
  }

  // A compute warpgroup multiplies its part of a tile and stores it.
  template <u32 kVariants, class Program>
  ETC_DEVICE bool compute(
      const Run<Program>& run, StageReader<Program>& stages, const Work& work,
      Counters& counters) const {
    const Size size = Size::of(work.size);
    constexpr bool kMayBeThin = (kVariants & kThin) != 0;
    bool going = true;
    const auto multiply_by = [&](auto columns, auto blocks, auto thin) {
      going = multiply<kVariants, decltype(blocks)::value, decltype(columns)::value,
                       decltype(thin)::value>(run, stages, size, work.variant, counters.round);
    };
    if (!size.is_narrow) {
      multiply_by(Number<kMaxRows>{}, Number<2>{}, Number<0>{});
    } else if (kMayBeThin && size.rows == kThinRows) {
      if constexpr (kMayBeThin) {
        multiply_by(Number<kThinRows>{}, Number<1>{}, Number<1>{});
      }
    } else {
      multiply_by(Number<kPiece>{}, Number<1>{}, Number<0>{});
    }
    if (going) ptx::mbarrier_arrive(stored(ptx::thread() >> 7));
    ++counters.round;
    return going;
  }

 private:
  // A tile of y: the address of its first element, its rows and columns.
  struct Place {
    u64 at;
    u32 row_bytes;
    i32 rows, columns;
  };
  // The place, with at most `rows` rows.
  ETC_DEVICE Place read_place(u32 rows) const {
    const uint2 at = ptx::load_shared8(place()), rest = ptx::load_shared8(place() + 8);
    return {u64(at.y) << 32 | at.x, rest.x, minimum(i32(rest.y & 0xffffu), i32(rows)),
            i32(rest.y >> 16)};
  }

  // kBlocks: 1 for narrow and thin tiles, whose wgmmas have kColumns columns and whose stages have
  // twice the depth. 2 for other tiles: each number of columns up to kColumns has its own mainloop,
  // and all share the epilogue.
  // NOTE: a thin tile has two sums, one for each half of a stage: a long chain of additions is less
  // exact, and the result selects experts.
  template <u32 kVariants, int kBlocks, int kColumns, bool kIsThin, class Program>
  ETC_DEVICE bool multiply(
      const Run<Program>& run, StageReader<Program>& stages, const Size& size, u32 variant,
      u32 round) const {
    const u32 thread = ptx::thread();
    const u32 wg = __shfl_sync(~0u, thread >> 7, 0);
    constexpr u32 kBlockBytes = 64 * kRowBytes, kParts = 2 / kBlocks;
    const u32 own = stages.descriptor_base() | 0x10000u;
    const bool is_gated = (kVariants & variant & kGated) != 0;
    const bool is_gathered = (kVariants & variant & kGathered) != 0;
    const u32 x0 = __shfl_sync(~0u, own, 0);
    const u32 w0 = __shfl_sync(~0u, own + (kBytesX + wg * kBlocks * kBlockBytes) / 16, 0);
    // NOTE: initialized, though the first wgmma does not add: otherwise these registers would be
    // live throughout the lane's loop.
    float d[kIsThin ? 2 : kBlocks][kColumns / 2];
#pragma unroll
    for (auto& sums : d) clear(sums);
    bool lost = false;
    const auto multiply_columns = [&](auto columns) ETC_INLINE {
      constexpr int n = decltype(columns)::value;
      const auto multiply = [&](u32 at, u32 k) {
#pragma unroll
        for (u32 part = 0; part < kParts; ++part) {
          const u32 x = x0 + (at + part * n * kRowBytes) / 16;
          const u32 w = w0 + (at + part * kBoxBytes) / 16;
#pragma unroll
          for (u32 b = 0; b < kBlocks; ++b) {
            ptx::wgmma_box<kIsHalf, n>(
                reinterpret_cast<float(&)[n / 2]>(d[kIsThin ? part : b]),
                ptx::matrix_descriptor<kBlocks>(w + b * (8 * kRowBytes / 16)),
                ptx::matrix_descriptor(x), (k | (kIsThin ? 0 : part)) != 0);
          }
        }
      };
      lost = multiply_stages(run, stages, size.steps, kStageBytes, is_gathered, multiply);
    };
    if constexpr (kBlocks == 1) {
      multiply_columns(Number<u32(kColumns)>{});
    } else {
      with_columns<kPiece>(size.rows, multiply_columns);
    }
    if (!lost) lost = !wait_mbarrier(run, placed(), round & 1);
#pragma unroll
    for (auto& sums : d) {
#pragma unroll
      for (float& v : sums) ptx::keep_order(v);  // read after the wait, not before
    }
    // No thread uses the buffer any more, and the place is that of this tile.
    lost = ptx::named_barrier_any<128>(2 + wg, lost);
    if (!lost) {
      if constexpr (kIsThin) {
#pragma unroll
        for (int i = 0; i < kColumns / 2; ++i) d[0][i] += d[1][i];
        put_float<kColumns>(read_place(size.rows), d[0]);
      } else if (is_gated) {
        const Biases<kVariants, kBlocks> gate_bias(*this, variant, 0);
        const Biases<kVariants, kBlocks> up_bias(*this, variant, 1);
        put<Program, kBlocks, kColumns>(size.rows, [&](int i, int n) {
          const float* gate = d[0] + i * 4 + n * 2;
          const float* up = kBlocks == 1 ? gate + 2 : d[kBlocks - 1] + i * 4 + n * 2;
          return pack<kIsHalf>(
              Gate::apply(gate_bias.add(gate[0], n), up_bias.add(up[0], n)),
              Gate::apply(gate_bias.add(gate[1], n), up_bias.add(up[1], n)));
        });
      } else {
        const Biases<kVariants, 2 * kBlocks> bias(*this, variant, 0);
        put<Program, 2 * kBlocks, kColumns>(size.rows, [&](int i, int n) {
          const float* v = d[n % kBlocks] + i * 4 + n / kBlocks * 2;
          return pack<kIsHalf>(bias.add(v[0], n), bias.add(v[1], n));
        });
      }
    }
    return !lost;
  }

  // The biases of a thread's columns, one in each of its kUnits units; 0 if the call has none.
  template <u32 kVariants, int kUnits>
  struct Biases {
    float value[kUnits] = {};

    ETC_DEVICE Biases(const GroupedMatmul& matmul, u32 variant, u32 which) {
      if constexpr ((kVariants & kBiased) != 0) {
        if ((variant & kBiased) == 0) return;
        const uint2 at = ptx::load_shared8(matmul.place() + 16 + 8 * which);
        const i32 columns = matmul.read_place(0).columns;
        const u32 thread = ptx::thread(), wg = thread >> 7, warp = thread >> 5 & 3;
        const i32 first = i32((wg * 4 + warp) * kUnits * 8 + (thread & 31) / 4);
#pragma unroll
        for (int n = 0; n < kUnits; ++n) {
          const i32 column = first + n * 8;
          if (column >= columns) break;
          const u64 from = (u64(at.y) << 32 | at.x) + u64(u32(column)) * 2;
          value[n] = unpack<kIsHalf>(u32(*reinterpret_cast<const u16*>(from))).x;
        }
      }
    }
    ETC_DEVICE float add(float sum, int n) const {
      return (kVariants & kBiased) != 0 ? sum + value[n] : sum;
    }
  };

  // Stores a warpgroup's part of `rows` rows, at most kColumns. Of each row a warp has kUnits units
  // of eight elements. value(i, n): two elements of unit n of rows 8 i and following, in the layout
  // of wgmma's result.
  template <class Program, int kUnits, int kColumns, class Value>
  ETC_DEVICE void put(u32 rows, Value value) const {
    constexpr i32 kRow = 4 * kUnits, kStep = 128 / kRow;  // units of a row; rows of a store
    constexpr i32 kMost = i32(kOutBytes) / (kRow * 16);
    constexpr int kEights = kUnits == 1 ? 2 : 4 / kUnits;  // of rows, in one instruction
    const u32 thread = ptx::thread(), lane = thread & 31, wg = thread >> 7;
    // The units of a row are swizzled, to avoid bank conflicts.
    auto spot = [&](u32 row, u32 unit) {
      const u32 turned = kRow < 8 ? row / 2 % kRow : row % 8;
      return out<Program>(wg) + row * (kRow * 16) + ((unit ^ turned) << 4);
    };
    const u32 warp = thread >> 5 & 3;
    const u32 in = spot(lane / 8 / kUnits * 8 + lane % 8, warp * kUnits + lane / 8 % kUnits);
    const i32 row = i32(thread & 127) / kRow, unit = i32(thread & 127) % kRow;
    i32 left = 0;  // rows from this thread's first one on
    u64 at = 0, step = 0;
#pragma unroll
    for (i32 first = 0; first < kColumns; first += kMost) {
      if (first > 0) {
        if (first >= i32(rows)) break;
        ptx::named_barrier<128>(2 + wg);
      }
#pragma unroll
      for (int i = 0; i < kMost / 8 && first / 8 + i < kColumns / 8; i += kEights) {
        const int n = first / 8 + i;
        if (i > 0 && i % 2 == 0 && n * 8 >= i32(rows)) break;
        if constexpr (kUnits == 1) {
          ptx::store_matrix2_transposed(in + i * 128 * kRow, value(n, 0), value(n + 1, 0));
        } else {
          constexpr int kSecond = kUnits == 4 ? 2 : 0;
          ptx::store_matrix4_transposed(
              in + i * 128 * kRow, value(n, 0), value(n, 1), value(n + kEights - 1, kSecond),
              value(n + kEights - 1, kSecond + 1));
        }
      }
      ptx::named_barrier<128>(2 + wg);
      if (first == 0) {  // NOTE: not earlier: registers are scarce
        const Place to = read_place(rows);
        const i32 column = (i32(wg) * kRow + unit) * 8;
        left = column < to.columns ? to.rows - row : 0;
        at = to.at + u64(row) * to.row_bytes + column * 2;
        step = u64(kStep) * to.row_bytes;
      }
      const u32 from = spot(u32(row), u32(unit));
#pragma unroll
      for (i32 i = 0; i < kMost && first + i < kColumns; i += kStep, at += step) {
        if (first + i < left) {
          ptx::store16(at, ptx::load_shared16(from + i * (kRow * 16)));
        }
      }
    }
  }

  // A thin tile, directly from registers.
  template <int kColumns>
  ETC_DEVICE static void put_float(const Place& to, const float (&d)[kColumns / 2]) {
    const u32 thread = ptx::thread(), lane = thread & 31, warp = thread >> 5;
    const i32 row = i32(lane) % 4 * 2, column = i32(warp) * 16 + i32(lane) / 4;
    const u64 at = to.at + u64(row) * to.row_bytes + column * 4;
#pragma unroll
    for (i32 i = 0; i < kColumns; i += 8) {
      if (i % kPiece == 0 && i >= to.rows) break;
#pragma unroll
      for (i32 n = 0; n < 4; ++n) {
        const i32 r = i + n % 2, c = n / 2 * 8;
        if (row + r < to.rows && column + c < to.columns) {
          ptx::store4(at + u64(r) * to.row_bytes + c * 4, __float_as_uint(d[i / 2 + n]));
        }
      }
    }
  }
};

}  // namespace etc
