// Grouped matrix multiplication: tiles of up to 288 rows of x, all of one group, by 512 rows of
// that group's weight, by clusters of two workers.
//
// The number of rows of a tile is known only at run time. So the rows of wgmma's A are rows of the
// weight, 64 at a time, and its N, any multiple of 16, are the rows of x. Two warpgroups multiply
// 2 x 64 rows of the weight each. The kinds of tiles:
//   short   up to 144 rows, bound by the bytes of the weight: each worker of the pair multiplies
//           all rows by half of the weight's rows;
//   long    more rows: each worker multiplies half of the rows by both halves of the weight in
//           turn. The pair shares the weight by multicast;
//   half    at most 256 rows of the weight: shared in the same way, in one turn;
//   narrow  as half, with at most 16 rows of x: stages of twice the depth, for as many bytes in
//           flight;
//   thin    stages as of a narrow tile, a weight of at most 128 rows, which the pair shares, and 64
//           rows of x in each worker.
//
// The rows of the weight are in two blocks of 64, alternating in groups of eight, so that a warp
// has 32 neighbouring ones. A gated tile needs the same rows of two weights, gate and up: these
// alternate in groups of eight, in stages as in memory. So a thread has both factors of each of its
// results.
//
// The warpgroups transpose a finished tile in the buffer and store it from registers: bulk stores
// would delay the next use of the buffer. The store warp computes the place of the tile, and
// notifies once all of it is stored.
#pragma once
#include "ptx/warp.cuh"
#include "ptx/wgmma_columns.cuh"
#include "functions/mainloop.cuh"

namespace etc {

struct GroupedTile {
  static constexpr u32 kPiece = 16;     // rows of x in a small box,
  static constexpr u32 kLarge = 64;     // and in a large one
  static constexpr u32 kMaxRows = 144;  // of a worker
  static constexpr u32 kRowBytes = kStageDepth * 2;
  static constexpr u32 kBoxRows = 128, kBoxBytes = kBoxRows * kRowBytes;  // of the weight
  static constexpr u32 kBytesX = kMaxRows * kRowBytes, kBytesW = 2 * kBoxBytes;
  static constexpr u32 kStageBytes = kBytesX + kBytesW;
  static constexpr u32 kOutBytes = 96 * 128;  // of a warpgroup's part of the buffer
  static constexpr u32 kFew = 8;  // gathered rows of x that bulk copies load, one by one
  static constexpr u32 kThinRows = kLarge;  // of a worker, of a thin tile; else a narrow one's
  enum Kind : u32 { kNarrow, kShort, kHalf, kLong };
  enum Variant : u32 { kGated = 1, kThin = 2, kGathered = 4 };

  // The size of a task: no rows for an empty tile, of no rows or columns.
  struct Size {
    u32 steps, rows;  // of a worker
    Kind kind;
    u32 few;  // gathered rows that are loaded one by one; 0 if there are more than kFew

    ETC_DEVICE u32 packed() const { return steps | rows << 16 | u32(kind) << 24 | few << 26; }
    ETC_DEVICE static Size of(u32 v) {
      return {v & 0xffffu, v >> 16 & 0xffu, static_cast<Kind>(v >> 24 & 3), v >> 26};
    }
    // A long tile takes the halves of the weight in turn. Of a short or narrow one each worker has
    // one half, and the other kinds have only one.
    ETC_DEVICE u32 turns() const { return kind == kLong ? 2 : 1; }
    ETC_DEVICE bool is_shared() const { return kind >= kHalf; }
    ETC_DEVICE u32 depth() const { return kind == kNarrow ? 2 : 1; }  // of a stage, in kStageDepth
    template <bool kIsThin>
    ETC_DEVICE u32 first_weight(u32 turn) const {
      if constexpr (kIsThin) return 0;
      const u32 half = is_shared() ? turn : blockIdx.x & 1;
      return half * (kind == kNarrow ? kBoxRows : 2 * kBoxRows);
    }
    template <bool kIsThin>
    ETC_DEVICE u32 first_row() const {
      return kIsThin || is_shared() ? (blockIdx.x & 1) * rows : 0;
    }
  };

  template <int n>
  struct Number {
    static constexpr int value = n;
  };
  template <u32 n, class F>
  ETC_DEVICE static void with_columns(u32 rows, F f) {
    if (rows == n) {
      f(Number<n>{});
    } else if constexpr (n < kMaxRows) {
      with_columns<n + kPiece>(rows, f);
    }
  }
};

// kIsFloat: the result is in fp32. That of a thin tile always is.
template <bool kIsHalf, bool kIsFloat>
struct GroupedMatmul : GroupedTile {
  u32 control, buffer;
  static constexpr u32 kControlBytes = 40;
  // Tiles.
  struct Counters {
    u32 round;
  };

  // mbarriers. `placed`: the store warp has written the place of a tile; `stored`: a warpgroup has
  // stored its part. Then the place.
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

  // No other warps use the buffer.
  template <class Program>
  ETC_DEVICE bool wait_buffer(const Run<Program>&, const Counters&) const {
    return true;
  }

  // A compute warpgroup multiplies its part of a tile and stores it.
  template <u32 kVariants, class Program>
  ETC_DEVICE bool compute(
      const Run<Program>& run, StageReader<Program>& stages, const Work& work,
      Counters& counters) const {
    const Size size = Size::of(work.size);
    constexpr bool kHasThin = (kVariants & kThin) != 0;
    bool going = true;
    for (u32 turn = 0; turn < size.turns() && going; ++turn) {
      const auto multiply_by = [&](auto columns, auto blocks, auto thin) {
        going = multiply<kVariants, decltype(blocks)::value, decltype(columns)::value,
                         decltype(thin)::value>(
            run, stages, size.steps, work.variant, turn, counters.round);
      };
      if (size.kind != kNarrow) {
        with_columns<kPiece>(size.rows, [&](auto columns) {
          multiply_by(columns, Number<2>{}, Number<0>{});
        });
      } else if (kHasThin && size.rows == kThinRows) {
        if constexpr (kHasThin) {
          multiply_by(Number<kThinRows>{}, Number<1>{}, Number<1>{});
        }
      } else {
        multiply_by(Number<kPiece>{}, Number<1>{}, Number<0>{});
      }
    }
    if (going) ptx::mbarrier_arrive(stored(ptx::thread() >> 7));
    ++counters.round;
    return going;
  }

 private:
  // The place of a worker's part of a tile: its first element, rows and columns.
  struct Place {
    u64 at;
    u32 row_bytes;
    i32 rows, columns;
  };
  // Without the columns of the turn before.
  ETC_DEVICE Place read_place(i32 skipped, u32 item_bytes) const {
    const uint2 at = ptx::load_shared8(place()), rest = ptx::load_shared8(place() + 8);
    return {(u64(at.y) << 32 | at.x) + u32(skipped) * item_bytes, rest.x,
            i32(rest.y & 0xffffu), i32(rest.y >> 16) - skipped};
  }

  // One block of a narrow or thin tile, with stages of twice the depth; otherwise two.
  // NOTE: a thin tile has two sums, one for each half of a stage: a long chain of additions is less
  // exact, and the result selects experts.
  template <u32 kVariants, int kBlocks, int kColumns, bool kIsThin, class Program>
  ETC_DEVICE bool multiply(
      const Run<Program>& run, StageReader<Program>& stages, u32 steps, u32 variant, u32 turn,
      u32 round) const {
    const u32 thread = ptx::thread();
    const u32 wg = __shfl_sync(~0u, thread >> 7, 0);
    constexpr u32 kBlockBytes = 64 * kRowBytes, kParts = 2 / kBlocks;
    const u32 own = stages.descriptor_base() | 0x10000u;
    const bool is_gated = (kVariants & variant & kGated) != 0;
    const bool is_gathered = (kVariants & variant & kGathered) != 0;
    const u32 x0 = __shfl_sync(~0u, own, 0);
    const u32 w0 = __shfl_sync(~0u, own + (kBytesX + wg * kBlocks * kBlockBytes) / 16, 0);
    // NOTE: initialized, though the first wgmma does not add: otherwise the registers of all
    // numbers of columns would be live throughout the lane's loop.
    float d[kIsThin ? 2 : kBlocks][kColumns / 2] = {};
    bool lost = multiply_stages<kStageBytes>(run, stages, steps, is_gathered, [&](u32 at, u32 k) {
#pragma unroll
      for (u32 part = 0; part < kParts; ++part) {
        const u32 x = x0 + (at + part * kColumns * kRowBytes) / 16;
        const u32 w = w0 + (at + part * kBoxBytes) / 16;
#pragma unroll
        for (u32 q = 0; q < 4; ++q) {
#pragma unroll
          for (u32 b = 0; b < kBlocks; ++b) {
            ptx::wgmma_columns<kIsHalf, kColumns>(
                d[kIsThin ? part : b],
                ptx::matrix_descriptor<kBlocks>(w + b * (8 * kRowBytes / 16) + 2 * q),
                ptx::matrix_descriptor(x + 2 * q), (k | (kIsThin ? 0 : part) | q) != 0);
          }
        }
      }
    });
    if (!lost) lost = !wait_mbarrier(run, placed(), round & 1);
#pragma unroll
    for (auto& sums : d) {
#pragma unroll
      for (float& v : sums) ptx::keep_order(v);  // read after the wait, not before
    }
    // All threads have left the buffer, and the place is that of this tile.
    lost = ptx::named_barrier_any<128>(2 + wg, lost);
    if (!lost) {
      const i32 skipped = (i32(turn) * i32(2 * kBoxRows)) >> u32(is_gated);
      if constexpr (kIsThin) {
#pragma unroll
        for (int i = 0; i < kColumns / 2; ++i) d[0][i] += d[1][i];
      }
      if constexpr (kIsThin || kIsFloat) {
        put_float<kBlocks, kColumns>(read_place(skipped, 4), d);
      } else if (is_gated) {
        put<Program, kBlocks, kColumns>(skipped, [&](int i, int n) {
          const float* gate = d[0] + i * 4 + n * 2;
          const float* up = kBlocks == 1 ? gate + 2 : d[kBlocks - 1] + i * 4 + n * 2;
          return pack<kIsHalf>(silu(gate[0]) * up[0], silu(gate[1]) * up[1]);
        });
      } else {
        put<Program, 2 * kBlocks, kColumns>(skipped, [&](int i, int n) {
          const float* v = d[n % kBlocks] + i * 4 + n / kBlocks * 2;
          return pack<kIsHalf>(v[0], v[1]);
        });
      }
    }
    return !lost;
  }

  // Stores a warpgroup's part of kColumns rows, of which a warp has kUnits times eight elements
  // each: value(i, n) are two of unit n of the rows from 8 i on, in the layout of wgmma's result.
  template <class Program, int kUnits, int kColumns, class Value>
  ETC_DEVICE void put(i32 skipped, Value value) const {
    constexpr i32 kRow = 4 * kUnits, kStep = 128 / kRow;  // units of a row; rows of a store
    constexpr i32 kMost = i32(kOutBytes) / (kRow * 16);
    constexpr int kEights = kUnits == 1 ? 2 : 4 / kUnits;  // of rows, in one instruction
    const u32 thread = ptx::thread(), lane = thread & 31, wg = thread >> 7;
    // The order of a row's units differs from that of its neighbours, to avoid bank conflicts.
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
      if (first > 0) ptx::named_barrier<128>(2 + wg);
#pragma unroll
      for (int i = 0; i < kMost / 8 && first / 8 + i < kColumns / 8; i += kEights) {
        const int n = first / 8 + i;
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
        const Place to = read_place(skipped, 2);
        const i32 column = (i32(wg) * kRow + unit) * 8;
        left = column < to.columns ? to.rows - row : 0;
        at = to.at + u64(row) * to.row_bytes + column * 2;
        step = u64(kStep) * to.row_bytes;
      }
      const u32 from = spot(u32(row), u32(unit));
#pragma unroll
      for (i32 i = 0; i < kMost && first + i < kColumns; i += kStep, at += step) {
        if ((kColumns % kStep == 0 || row < kColumns - first - i) && first + i < left) {
          ptx::store16(at, ptx::load_shared16(from + i * (kRow * 16)));
        }
      }
    }
  }

  // The same for fp32.
  template <int kBlocks, int kColumns, int kSums>
  ETC_DEVICE static void put_float(const Place& to, const float (&d)[kSums][kColumns / 2]) {
    const u32 thread = ptx::thread(), lane = thread & 31, warp = thread >> 5;
    const i32 row = i32(lane) % 4 * 2, column = i32(warp) * 16 * kBlocks + i32(lane) / 4;
    const u64 at = to.at + u64(row) * to.row_bytes + column * 4;
#pragma unroll
    for (i32 i = 0; i < kColumns; i += 8) {
#pragma unroll
      for (i32 n = 0; n < 4 * kBlocks; ++n) {
        const i32 r = i + n % 2, c = n / 2 * 8;  // of the warp's columns, eight of either block
        if (row + r < to.rows && column + c < to.columns) {
          const float v = d[n / 2 % kBlocks][i / 2 + n / 2 / kBlocks * 2 + n % 2];
          ptx::store4(at + u64(r) * to.row_bytes + c * 4, __float_as_uint(v));
        }
      }
    }
  }
};

// The roles of all functions but the storing of a tile.
template <class Call>
struct GroupedRoles : Roles, GroupedTile {
  using Compute = GroupedMatmul<Call::kIsHalf, Call::kIsFloat>;
  using Coord = typename Call::Coord;
  static constexpr bool kGathers = has_role<Call>(kGatherRole);
  static constexpr u32 kVariant =
      (Call::kGated ? kGated : 0) | (Call::kIsThin ? kThin : 0) | (kGathers ? kGathered : 0);
  static constexpr bool kMulticast = true;

  template <class Program>
  ETC_DEVICE static u32 size(const Run<Program>& run, const Coord& c) {
    constexpr int kOfRows = kGathers ? Call::kReads - 1 : 0;
    const u32 rows = minimum(Call::template operand<kOfRows>(run.g, c).size[0], 2 * kMaxRows);
    if (rows == 0) return 0;
    if constexpr (Call::kIsThin) {
      return Size{(num_steps<Call>(run, c) + 1) / 2, kThinRows, kNarrow, 0}.packed();
    }
    const auto weight = Call::template operand<1>(run.g, c);
    const u32 wide = u32(weight.size[weight.kRank - 2]) * (1 + Call::kGated);
    if (wide == 0) return 0;  // a tile of columns after the edge
    const bool is_half = wide <= 2 * kBoxRows, is_narrow = is_half && rows <= kPiece;
    const bool is_shared = !is_narrow && (is_half || rows > kMaxRows);
    const u32 share = is_shared ? (rows + 1) / 2 : rows;
    const u32 padded = (share + kPiece - 1) / kPiece * kPiece;
    const Kind kind = is_narrow ? kNarrow : is_half ? kHalf : is_shared ? kLong : kShort;
    const u32 steps = num_steps<Call>(run, c);
    const u32 few = kGathers && rows <= kFew ? rows : 0;
    return Size{is_narrow ? (steps + 1) / 2 : steps, padded, kind, few}.packed();
  }
  ETC_DEVICE static RingStages stages(u32 packed) {
    return {Size::of(packed).steps * Size::of(packed).turns(), kStageBytes};
  }

  // The rows of x end where the tile ends, not where a bulk copy does: rows after them are
  // multiplied too, but not stored.
  template <class Program, class Loaded>
  ETC_DEVICE static bool load(
      const Run<Program>& run, StageLoader<Program>& stages, const Coord& c, u32 packed,
      Loaded loaded) {
    if (packed == 0) return true;
    const Size size = Size::of(packed);
    // NOTE: before the loop: otherwise runtime tensors are loaded for each stage.
    const Box w = Call::template box<1>(run.g, c);
    Box x{}, large_x{};
    if constexpr (!kGathers) {
      x = Call::template box<0>(run.g, c), large_x = Call::template large_box<0>(run.g, c);
    }
    for (u32 turn = 0; turn < size.turns(); ++turn) {
      for (u32 k = 0; k < size.steps; ++k) {
        Stage stage;
        if (Call::kLoadsAhead && stages.is_begun()) {
          stage = stages.next_begun(kStageBytes);
        } else if (!begin_stage(run, stages, size, turn, k, w, stage)) {
          return false;
        } else if constexpr (Call::kLoadsAhead) {
          stages.start_ahead();
        }
        if constexpr (!kGathers) fill_x(size, stage, k, x, large_x);
        loaded(turn * size.steps + k + 1);
      }
    }
    return true;
  }

  // The weight of stage n.
  template <class Program>
  ETC_DEVICE static bool load_ahead(
      const Run<Program>& run, StageLoader<Program>& stages, const Coord& c, u32 packed, u32 n) {
    const Size size = Size::of(packed);
    const u32 turn = n / size.steps;
    const Box w = Call::template box<1>(run.g, c);
    Stage stage;
    return begin_stage(run, stages, size, turn, n - turn * size.steps, w, stage);
  }

  template <class Program>
  ETC_DEVICE static bool gather(
      const Run<Program>& run, StageGatherer<Program>& stages, const Coord& c, u32 packed) {
    if (packed == 0) return true;
    const Size size = Size::of(packed);
    if (size.few > 0) return gather_few(run, stages, c, size);
    bool going = true;
    with_columns<kPiece>(size.rows, [&](auto rows) {
      going = gather_many<decltype(rows)::value / 8>(run, stages, c, size);
    });
    return going;
  }

  // The store warp writes the place of this task's tile, and waits until it is stored.
  template <class Program>
  ETC_DEVICE static bool wait_stored(
      const Run<Program>& run, const Compute& matmul, const Coord& c, const Size& size,
      u32& round) {
    const auto y = Call::template operand<Call::kReads>(run.g, c);
    constexpr int kOfRows = y.kRank - 2, kOfColumns = y.kRank - 1;
    const u32 first_row = size.template first_row<Call::kIsThin>();
    const u32 first = size.template first_weight<Call::kIsThin>(0) / (1 + Call::kGated);
    const i32 rows = minimum(maximum(y.size[kOfRows] - i32(first_row), 0), kMaxRows);
    const i32 columns = minimum(maximum(y.size[kOfColumns] - i32(first), 0), 4 * kBoxRows);
    const u32 row_bytes = u32(y.stride[kOfRows]) * sizeof(*y.base);
    const u64 at = u64(y.at()) + u64(first_row) * row_bytes + first * sizeof(*y.base);
    if (ptx::lane() == 0) {
      ptx::store_shared8(matmul.place(), u32(at), u32(at >> 32));
      ptx::store_shared8(matmul.place() + 8, row_bytes, u32(rows) | u32(columns) << 16);
      ptx::mbarrier_arrive(matmul.placed());
    }
    bool came = wait_mbarrier(run, matmul.stored(0), round & 1);
    came = came && wait_mbarrier(run, matmul.stored(1), round & 1);
    ++round;
    return __all_sync(~0u, came);
  }

 private:
  // One thread: begins a stage and loads its weight.
  template <class Program>
  ETC_DEVICE static bool begin_stage(
      const Run<Program>& run, StageLoader<Program>& stages, const Size& size, u32 turn, u32 k,
      const Box& w, Stage& stage) {
    const u32 rows = kGathers ? size.few : size.rows;
    const u32 expected = size.depth() * rows * kRowBytes + kBytesW;
    if (!stages.begin(run, kStageBytes, expected, rows == 0, stage)) return false;
    fill_w(size, stage, turn, k, w);
    return true;
  }

  // Few rows: a lane of the first warp copies one of them in bulk.
  template <class Program>
  ETC_DEVICE static bool gather_few(
      const Run<Program>& run, StageGatherer<Program>& stages, const Coord& c, const Size& size) {
    if (ptx::thread() / 32 % 2 == 1) {
      stages.skip({size.steps, kStageBytes});
      return true;
    }
    const Box x = Call::template box<0>(run.g, c);
    const auto tokens = Call::template operand<Call::kReads - 1>(run.g, c);
    const u32 lane = ptx::lane();
    const i32 token = lane < size.few ? i32(ptx::load4_l2(u64(tokens.at(lane)))) : 0;
    for (u32 k = 0; k < size.steps; ++k) {
      Stage stage;
      if (!stages.begin(run, kStageBytes, stage)) return false;
      for (u32 part = 0; part < size.depth(); ++part) {
        const i32 column = i32((k * size.depth() + part) * kStageDepth);
        const u32 to = stage.at + (part * kPiece + lane) * kRowBytes;
        if (lane < size.few) ptx::load_box(to, {x.map, column, token, 0}, stage.full);
      }
    }
    return true;
  }

  // More rows: each warp has four of eight neighbours, of which a lane copies 16 bytes each, kEach
  // rows a lane.
  // NOTE: such copies belong to the generic proxy: a fence is needed before wgmma reads them.
  template <u32 kEach, class Program>
  ETC_DEVICE static bool gather_many(
      const Run<Program>& run, StageGatherer<Program>& stages, const Coord& c, const Size& size) {
    const auto x = Call::template operand<0>(run.g, c);
    const auto tokens = Call::template operand<Call::kReads - 1>(run.g, c);
    const u32 thread = ptx::thread(), unit = thread % 8, first = thread / 8 % 8;
    const u32 to = first * kRowBytes + ((unit ^ first) << 4), row_bytes = u32(x.size[1]) * 2;
    u32 offset[kEach];  // from x's first row to this lane's, in units of 16 bytes
#pragma unroll
    for (u32 i = 0; i < kEach; ++i) {
      const i32 row = minimum(i32(size.first_row<false>() + first + i * 8), tokens.size[0] - 1);
      const u32 token = ptx::load4_l2(u64(tokens.at(row)));
      offset[i] = token * (row_bytes / 16) + unit;
    }
    for (u32 turn = 0; turn < size.turns(); ++turn) {
      u32 column = 0;
      for (u32 k = 0; k < size.steps; ++k) {
        Stage stage;
        if (!stages.begin(run, kStageBytes, stage)) return false;
        for (u32 part = 0; part < size.depth(); ++part, column += kRowBytes) {
          const u32 at = stage.at + part * (kPiece * kRowBytes) + to;
          const u32 bytes = column + unit * 16 < row_bytes ? 16 : 0;
          const u64 from = u64(x.at()) + column;
#pragma unroll
          for (u32 i = 0; i < kEach; ++i) {
            ptx::copy16_async(at + i * 8 * kRowBytes, from + u64(offset[i]) * 16, bytes);
          }
        }
        ptx::mbarrier_arrive_copied(stage.full);
      }
    }
    return true;
  }

  // One thread: the bulk copies of a stage.
  ETC_DEVICE static void fill_x(
      const Size& size, const Stage& stage, u32 k, const Box& x, const Box& large) {
    const u32 own = blockIdx.x & 1, to = stage.at;
    auto at = [&](const Box& box, u32 row, u32 step) -> Box {
      return {box.map, box.x + i32(step * kStageDepth), box.y + i32(row), box.z};
    };
    if constexpr (Call::kIsThin) {
      for (u32 part = 0; part < 2; ++part) {
        const Box box = at(large, size.first_row<true>(), 2 * k + part);
        ptx::load_box(to + part * (kThinRows * kRowBytes), box, stage.full);
      }
      return;
    }
    if (size.kind == kNarrow) {
      ptx::load_box_multicast(
          to + own * (kPiece * kRowBytes), at(x, 0, 2 * k + own), stage.full, 3);
      return;
    }
    bool is_own = own == 0;  // of a short tile, one worker loads every other box for both
    for (u32 i = 0; i < size.rows;) {
      const bool is_large = i + kLarge <= size.rows;
      const Box box = at(is_large ? large : x, size.first_row<false>() + i, k);
      if (size.is_shared()) {
        ptx::load_box(to + i * kRowBytes, box, stage.full);
      } else if (is_own) {
        ptx::load_box_multicast(to + i * kRowBytes, box, stage.full, 3);
      }
      is_own = !is_own;
      i += is_large ? kLarge : kPiece;
    }
  }
  ETC_DEVICE static void fill_w(
      const Size& size, const Stage& stage, u32 turn, u32 k, const Box& w) {
    constexpr bool kIsGated = Call::kGated;
    const u32 own = blockIdx.x & 1, first = size.first_weight<Call::kIsThin>(turn);
    const u32 to = stage.at + kBytesX;
    auto at = [&](u32 row, u32 step) -> Box {
      return {w.map, w.x + i32(step * kStageDepth), w.y + i32(row / (1 + kIsGated)), w.z};
    };
    if constexpr (Call::kIsThin) {
      ptx::load_box_multicast(to + own * kBoxBytes, at(first, 2 * k + own), stage.full, 3);
    } else if (size.kind == kNarrow) {
      for (u32 i = 0; i < 2; ++i) {
        load_weight<kIsGated, false>(to + i * kBoxBytes, at(first, 2 * k + i), stage.full);
      }
    } else if (size.kind == kShort) {
      for (u32 i = 0; i < 2; ++i) {
        load_weight<kIsGated, false>(to + i * kBoxBytes, at(first + i * kBoxRows, k), stage.full);
      }
    } else {
      load_weight<kIsGated, true>(to + own * kBoxBytes, at(first + own * kBoxRows, k), stage.full);
    }
  }
  // kIsShared: to both workers.
  template <bool kIsGated, bool kIsShared>
  ETC_DEVICE static void load_weight(u32 shared, const Box& box, u32 barrier) {
    if constexpr (kIsGated && kIsShared) {
      ptx::load_box_of_halves_multicast(shared, box, barrier, 3);
    } else if constexpr (kIsGated) {
      ptx::load_box_of_halves(shared, box, barrier);
    } else if constexpr (kIsShared) {
      ptx::load_box_multicast(shared, box, barrier, 3);
    } else {
      ptx::load_box(shared, box, barrier);
    }
  }
};

// The tile stays on this rank.
template <class Call>
struct grouped_store : GroupedRoles<Call> {
  using Compute = typename GroupedRoles<Call>::Compute;

  template <class Program>
  ETC_DEVICE static bool store(
      const Run<Program>& run, const Compute& matmul, const typename Call::Coord& c, u32 packed,
      typename Compute::Counters& counters, u32& entered, Waiter who) {
    const auto size = GroupedTile::Size::of(packed);
    using Base = GroupedRoles<Call>;
    if (size.rows > 0 && !Base::wait_stored(run, matmul, c, size, counters.round)) return false;
    return notify_own_rank<Call>(run, c, entered, who);
  }
};

// silu(x @ gate.T) * (x @ up.T).
template <class Call>
struct grouped_gated : grouped_store<Call> {};

// In fp32: kIsFloat.
template <class Call>
struct grouped_float : grouped_store<Call> {};

// In fp32, of a weight of at most 128 rows: kIsThin.
template <class Call>
struct thin_float : grouped_store<Call> {};

}  // namespace etc
