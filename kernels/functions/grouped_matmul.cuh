// Grouped matrix multiplication: tiles of up to 288 rows of x, all of one group, by 512
// rows of that group's weight, by clusters of two workers.
//
// How many rows a tile has is known only at run time. So the weight's rows are the rows of
// the tensor cores' tile, 64 at a time, and the rows of x its columns, of which any number
// of 16 can be had. Two warpgroups multiply 2 x 64 rows of the weight each. Of a short tile
// (up to 144 rows, where the weight's bytes are what takes time) each worker of the pair
// computes all rows by half of the weight; of a long one half of the rows, by both halves
// one after the other, each of which the pair shares by multicast. Where no more than one half
// of the weight's rows are there, workers share them in the same way, whatever the rows of x;
// but with at most 16 of these a narrow tile has stages of twice the depth, so that as many
// bytes are under way. A thin tile has the same stages, but is of a weight of at most 128 rows,
// which the pair shares, each worker having 64 rows of x.
//
// Two blocks of 64 rows of the weight have eight of its rows in turn, so that a warp has 32
// neighbouring ones. Of a gated product, which needs the same rows of two weights, gate and up,
// eight of either lie in turn, in stages as in memory: so one block is of gate and the other of
// up, or half of a single one, and a thread has both factors of each of its results.
//
// A finished tile is transposed by the warpgroups that have it, in a little shared memory, and
// stored from registers: bulk stores would make them wait for the buffer. The storing warp tells
// where it goes, and notifies when all of it is there.
#pragma once
#include "ptx/warp.cuh"
#include "ptx/wgmma_columns.cuh"
#include "functions/tile_ring.cuh"

namespace etc {

struct GroupedMatmul : TileRing<144, 96 * 128, 64> {
  static constexpr u32 kPiece = 16;     // rows of x that one bulk copy moves,
  static constexpr u32 kLarge = 64;     // or may move, where there are as many
  static constexpr u32 kMaxRows = 144;  // of a worker
  static constexpr u32 kRowBytes = kDepth * 2;
  static constexpr u32 kBoxRows = 128, kBoxBytes = kBoxRows * kRowBytes;  // of the weight
  static_assert(kMaxRows * kRowBytes == kBytesX && 2 * kBoxBytes == kBytesW);
  static constexpr u32 kFew = 8;  // rows of x that come in bulk, one by one
  static constexpr u32 kThinRows = kLarge;  // of a worker, of a thin tile; else a narrow one's
  enum Kind : u32 { kNarrow, kShort, kHalf, kLong };

  // What the roles have to know of a task; no rows for an empty tile, of rows or columns.
  struct Size {
    u32 steps, rows;  // of a worker
    Kind kind;
    u32 few;  // rows that come one by one; 0 if they are too many for that

    ETC_DEVICE u32 packed() const { return steps | rows << 16 | u32(kind) << 24 | few << 26; }
    ETC_DEVICE static Size of(u32 v) {
      return {v & 0xffffu, v >> 16 & 0xffu, static_cast<Kind>(v >> 24 & 3), v >> 26};
    }
    // A long tile's halves of the weight come in turn; a short or narrow one's go one to each
    // worker, and of half a tile there is only one.
    ETC_DEVICE u32 turns() const { return kind == kLong ? 2 : 1; }
    ETC_DEVICE bool is_shared() const { return kind >= kHalf; }
    ETC_DEVICE u32 depth() const { return kind == kNarrow ? 2 : 1; }  // of a stage, in kDepth
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
  template <class Call, class Program>
  ETC_DEVICE static u32 size(const Run<Program>& run, const typename Call::Coord& c) {
    constexpr int kOfRows = Call::kGathers ? Call::kReads - 1 : 0;
    const u32 rows = minimum(Call::template operand<kOfRows>(run.g, c).size[0], 2 * kMaxRows);
    if (rows == 0) return 0;
    if constexpr (Call::kIsThin) {
      return Size{(num_steps<Call>(run, c) + 1) / 2, kThinRows, kNarrow, 0}.packed();
    }
    const auto weight = Call::template operand<1>(run.g, c);
    const u32 wide = u32(weight.size[weight.kRank - 2]) * (1 + Call::kGated);
    if (wide == 0) return 0;  // a tile of columns behind the edge
    const bool is_half = wide <= 2 * kBoxRows, is_narrow = is_half && rows <= kPiece;
    const bool is_shared = !is_narrow && (is_half || rows > kMaxRows);
    const u32 share = is_shared ? (rows + 1) / 2 : rows;
    const u32 padded = (share + kPiece - 1) / kPiece * kPiece;
    const Kind kind = is_narrow ? kNarrow : is_half ? kHalf : is_shared ? kLong : kShort;
    const u32 steps = num_steps<Call>(run, c);
    const u32 few = Call::kGathers && rows <= kFew ? rows : 0;
    return Size{is_narrow ? (steps + 1) / 2 : steps, padded, kind, few}.packed();
  }
  ETC_DEVICE static u32 num_stages(u32 packed) {
    return Size::of(packed).steps * Size::of(packed).turns();
  }

  // One thread: all of a tile, or what is not gathered, but for the weight of the first `ahead`
  // stages; after each, the n-th, loaded(n, stages) is called. The rows of x end where the tile
  // ends, not where a bulk copy does: what lies behind them is multiplied too, but not stored.
  template <class Call, class Program, class Loaded>
  ETC_DEVICE bool load(
      const Run<Program>& run, const typename Call::Coord& c, u32 packed, u32& ring,
      Loaded loaded, u32 ahead = 0) const {
    if (packed == 0) return true;
    const Size size = Size::of(packed);
    // NOTE: before the loop: what they load from runtime tensors would be loaded for each stage.
    const Box w = Call::template box<1>(run.g, c);
    Box x{}, large_x{};
    if constexpr (!Call::kGathers) {
      x = Call::template box<0>(run.g, c), large_x = Call::template large_box<0>(run.g, c);
    }
    for (u32 turn = 0; turn < size.turns(); ++turn) {
      for (u32 k = 0; k < size.steps; ++k, ++ring) {
        if (ahead > 0) {
          --ahead;
        } else if (!begin_stage<Call>(run, size, turn, k, w, ring)) {
          return false;
        }
        if constexpr (!Call::kGathers) fill_x<Call>(size, ring % kStages, k, x, large_x);
        loaded(turn * size.steps + k + 1, size.steps * size.turns());
      }
    }
    return true;
  }

  // One thread: the weight of a tile's n-th stage.
  template <class Call, class Program>
  ETC_DEVICE bool load_weight(
      const Run<Program>& run, const typename Call::Coord& c, u32 packed, u32 n, u32 ring) const {
    const Size size = Size::of(packed);
    const u32 turn = n / size.steps;
    const Box w = Call::template box<1>(run.g, c);
    return begin_stage<Call>(run, size, turn, n - turn * size.steps, w, ring);
  }

  // Two warps of each worker, of which this is one: a tile's rows of x, wherever they lie.
  template <class Call, class Program>
  ETC_DEVICE bool gather(
      const Run<Program>& run, const typename Call::Coord& c, u32 packed, u32& ring) const {
    if (packed == 0) return true;
    const Size size = Size::of(packed);
    if (size.few > 0) return gather_few<Call>(run, c, size, ring);
    bool going = true;
    with_columns<kPiece>(size.rows, [&](auto rows) {
      going = gather_many<Call, decltype(rows)::value / 8>(run, c, size, ring);
    });
    return going;
  }

  // A consumer warpgroup multiplies its share of a tile and stores it.
  template <bool kIsHalf, bool kWeightIsKN, class Program>
  ETC_DEVICE bool consume(
      const Run<Program>& run, u32 packed, bool gated, u32& ring, u32& round) const {
    static_assert(!kWeightIsKN);
    const Size size = Size::of(packed);
    bool going = true;
    for (u32 turn = 0; turn < size.turns() && going; ++turn) {
      const auto multiply_by = [&](auto columns, auto blocks, auto thin) {
        going = multiply<kIsHalf, decltype(blocks)::value, decltype(columns)::value,
                         decltype(thin)::value>(run, size.steps, gated, turn, ring, round);
      };
      if (size.kind != kNarrow) {
        with_columns<kPiece>(size.rows, [&](auto columns) {
          multiply_by(columns, Number<2>{}, Number<0>{});
        });
      } else if (Program::kHasThin && size.rows == kThinRows) {
        if constexpr (Program::kHasThin) {
          multiply_by(Number<kThinRows>{}, Number<1>{}, Number<1>{});
        }
      } else {
        multiply_by(Number<kPiece>{}, Number<1>{}, Number<0>{});
      }
    }
    if (going) ptx::mbarrier_arrive(filled(ptx::thread() >> 7));
    ++round;
    return going;
  }

  // The storing warp tells where the tile of this task goes, and waits until it is there.
  template <class Call, class Program>
  ETC_DEVICE bool see_stored(
      const Run<Program>& run, const typename Call::Coord& c, const Size& size,
      u32& round) const {
    const auto y = Call::template operand<Call::kReads>(run.g, c);
    constexpr int kOfRows = y.kRank - 2, kOfColumns = y.kRank - 1;
    const u32 first_row = size.template first_row<Call::kIsThin>();
    const u32 first = size.template first_weight<Call::kIsThin>(0) / (1 + Call::kGated);
    const i32 rows = minimum(maximum(y.size[kOfRows] - i32(first_row), 0), kMaxRows);
    const i32 columns = minimum(maximum(y.size[kOfColumns] - i32(first), 0), 4 * kBoxRows);
    const u32 row_bytes = u32(y.stride[kOfRows]) * sizeof(*y.base);
    const u64 at = u64(y.at()) + u64(first_row) * row_bytes + first * sizeof(*y.base);
    if (ptx::lane() == 0) {
      ptx::store_shared8(place(), u32(at), u32(at >> 32));
      ptx::store_shared8(place() + 8, row_bytes, u32(rows) | u32(columns) << 16);
      ptx::mbarrier_arrive(placed());
    }
    bool came = wait_mbarrier(run, filled(0), round & 1);
    came = came && wait_mbarrier(run, filled(1), round & 1);
    ++round;
    return __all_sync(~0u, came);
  }

  // The buffer is that of warps who meet before they use it for anything else.
  template <class Program>
  ETC_DEVICE bool wait_emptied(const Run<Program>&, u32) const {
    return true;
  }

 private:
  // One thread: says what will come into a stage, and loads its weight.
  template <class Call, class Program>
  ETC_DEVICE bool begin_stage(
      const Run<Program>& run, const Size& size, u32 turn, u32 k, const Box& w, u32 ring) const {
    const u32 s = ring % kStages;
    if (!wait_free(run, ring)) return false;
    const u32 rows = Call::kGathers ? size.few : size.rows;
    ptx::mbarrier_arrive_expect(full(s), size.depth() * rows * kRowBytes + kBytesW);
    if (rows > 0) ptx::mbarrier_arrive_many(full(s), kGatherers);
    fill_w<Call>(size, s, turn, k, w);
    return true;
  }

  // Few rows: a lane of the first warp copies one of them in bulk.
  template <class Call, class Program>
  ETC_DEVICE bool gather_few(
      const Run<Program>& run, const typename Call::Coord& c, const Size& size, u32& ring) const {
    if (ptx::thread() / 32 % 2 == 1) {
      ring += size.steps;
      return true;
    }
    const Box x = Call::template box<0>(run.g, c);
    const auto tokens = Call::template operand<Call::kReads - 1>(run.g, c);
    const u32 lane = ptx::lane();
    const i32 token = lane < size.few ? i32(ptx::load4_l2(u64(tokens.at(lane)))) : 0;
    for (u32 k = 0; k < size.steps; ++k, ++ring) {
      const u32 s = ring % kStages;
      if (!__all_sync(~0u, wait_free(run, ring))) return false;
      for (u32 part = 0; part < size.depth(); ++part) {
        const i32 column = i32((k * size.depth() + part) * kDepth);
        const u32 to = stage(s) + (part * kPiece + lane) * kRowBytes;
        if (lane < size.few) ptx::load_box(to, {x.map, column, token, 0}, full(s));
      }
    }
    return true;
  }

  // More rows: each warp has four of eight neighbours, of which a lane copies 16 bytes each:
  // kEach rows a lane.
  // NOTE: such copies belong to the generic proxy: who reads them by wgmma sets a fence before.
  template <class Call, u32 kEach, class Program>
  ETC_DEVICE bool gather_many(
      const Run<Program>& run, const typename Call::Coord& c, const Size& size, u32& ring) const {
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
      for (u32 k = 0; k < size.steps; ++k, ++ring) {
        const u32 s = ring % kStages;
        if (!__all_sync(~0u, wait_free(run, ring))) return false;
        for (u32 part = 0; part < size.depth(); ++part, column += kRowBytes) {
          const u32 at = stage(s) + part * (kPiece * kRowBytes) + to;
          const u32 bytes = column + unit * 16 < row_bytes ? 16 : 0;
          const u64 from = u64(x.at()) + column;
#pragma unroll
          for (u32 i = 0; i < kEach; ++i) {
            ptx::copy16_async(at + i * 8 * kRowBytes, from + u64(offset[i]) * 16, bytes);
          }
        }
        ptx::mbarrier_arrive_copied(full(s));
      }
    }
    return true;
  }

  // One thread: the bulk copies of a stage.
  template <class Call>
  ETC_DEVICE void fill_x(
      const Size& size, u32 s, u32 k, const Box& x, const Box& large) const {
    const u32 own = blockIdx.x & 1, to = stage(s);
    auto at = [&](const Box& box, u32 row, u32 step) -> Box {
      return {box.map, box.x + i32(step * kDepth), box.y + i32(row), box.z};
    };
    if constexpr (Call::kIsThin) {
      for (u32 part = 0; part < 2; ++part) {
        const Box box = at(large, size.first_row<true>(), 2 * k + part);
        ptx::load_box(to + part * (kThinRows * kRowBytes), box, full(s));
      }
      return;
    }
    if (size.kind == kNarrow) {
      ptx::load_box_multicast(
          to + own * (kPiece * kRowBytes), at(x, 0, 2 * k + own), full(s), 3);
      return;
    }
    bool is_own = own == 0;  // of a short tile, one worker loads every other box for both
    for (u32 i = 0; i < size.rows;) {
      const bool is_large = i + kLarge <= size.rows;
      const Box box = at(is_large ? large : x, size.first_row<false>() + i, k);
      if (size.is_shared()) {
        ptx::load_box(to + i * kRowBytes, box, full(s));
      } else if (is_own) {
        ptx::load_box_multicast(to + i * kRowBytes, box, full(s), 3);
      }
      is_own = !is_own;
      i += is_large ? kLarge : kPiece;
    }
  }
  template <class Call>
  ETC_DEVICE void fill_w(const Size& size, u32 s, u32 turn, u32 k, const Box& w) const {
    constexpr bool kGated = Call::kGated;
    const u32 own = blockIdx.x & 1, first = size.first_weight<Call::kIsThin>(turn);
    const u32 to = stage(s) + kBytesX;
    auto at = [&](u32 row, u32 step) -> Box {
      return {w.map, w.x + i32(step * kDepth), w.y + i32(row / (1 + kGated)), w.z};
    };
    if constexpr (Call::kIsThin) {
      ptx::load_box_multicast(to + own * kBoxBytes, at(first, 2 * k + own), full(s), 3);
    } else if (size.kind == kNarrow) {
      for (u32 i = 0; i < 2; ++i) {
        load_weight<kGated, false>(to + i * kBoxBytes, at(first, 2 * k + i), full(s));
      }
    } else if (size.kind == kShort) {
      for (u32 i = 0; i < 2; ++i) {
        load_weight<kGated, false>(to + i * kBoxBytes, at(first + i * kBoxRows, k), full(s));
      }
    } else {
      load_weight<kGated, true>(to + own * kBoxBytes, at(first + own * kBoxRows, k), full(s));
    }
  }
  // kIsShared: to both workers.
  template <bool kGated, bool kIsShared>
  ETC_DEVICE static void load_weight(u32 shared, const Box& box, u32 barrier) {
    if constexpr (kGated && kIsShared) {
      ptx::load_box_of_halves_multicast(shared, box, barrier, 3);
    } else if constexpr (kGated) {
      ptx::load_box_of_halves(shared, box, barrier);
    } else if constexpr (kIsShared) {
      ptx::load_box_multicast(shared, box, barrier, 3);
    } else {
      ptx::load_box(shared, box, barrier);
    }
  }

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

  // Where a worker's share of a tile goes: the first of so many rows and columns.
  struct Place {
    u64 at;
    u32 row_bytes;
    i32 rows, columns;
  };
  // NOTE: no buffer is filled or emptied here: `filled` says that a warpgroup has stored.
  static constexpr u32 kPlaceOffset = 192;
  static_assert(kPlaceOffset + 16 <= Shared::kBarrierBytes);
  ETC_DEVICE u32 placed() const { return emptied(0); }
  ETC_DEVICE u32 place() const { return base + kPlaceOffset; }
  // Without the first columns, which are another turn's.
  ETC_DEVICE Place read_place(i32 skipped, u32 item_bytes) const {
    const uint2 at = ptx::load_shared8(place()), rest = ptx::load_shared8(place() + 8);
    return {(u64(at.y) << 32 | at.x) + u32(skipped) * item_bytes, rest.x,
            i32(rest.y & 0xffffu), i32(rest.y >> 16) - skipped};
  }

  // One block of a narrow or thin tile, of stages of twice the depth; otherwise two.
  // NOTE: a thin tile has two sums, one of either half of each stage: a long chain of additions
  // is less exact, and experts are picked by the result.
  template <bool kIsHalf, int kBlocks, int kColumns, bool kIsThin, class Program>
  ETC_DEVICE bool multiply(
      const Run<Program>& run, u32 steps, bool gated, u32 turn, u32& ring, u32 round) const {
    const u32 thread = ptx::thread();
    const u32 lane = thread & 31, wg = __shfl_sync(~0u, thread >> 7, 0);
    constexpr u32 kBlockBytes = 64 * kRowBytes, kParts = 2 / kBlocks;
    const u32 own = descriptor_base() | 0x10000u;
    const u32 x0 = __shfl_sync(~0u, own, 0);
    const u32 w0 = __shfl_sync(~0u, own + (kBytesX + wg * kBlocks * kBlockBytes) / 16, 0);
    // NOTE: set, though the first product need not add: otherwise they would be alive all
    // through the lane's loop, those of each number of columns beside the others.
    float d[kIsThin ? 2 : kBlocks][kColumns / 2] = {};
    bool lost = multiply_steps(run, steps, gated, ring, lane, [&](u32 s, u32 k) {
#pragma unroll
      for (u32 part = 0; part < kParts; ++part) {
        const u32 x = x0 + (s * kStageBytes + part * kColumns * kRowBytes) / 16;
        const u32 w = w0 + (s * kStageBytes + part * kBoxBytes) / 16;
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
    // Before the first of them reads the place or needs the buffer, which they all have left.
    lost = ptx::named_barrier_any<128>(2 + wg, lost);
    if (!lost) {
      const i32 skipped = (i32(turn) * i32(2 * kBoxRows)) >> gated;
      if constexpr (kIsThin) {
#pragma unroll
        for (int i = 0; i < kColumns / 2; ++i) d[0][i] += d[1][i];
      }
      if constexpr (kIsThin || Program::kIsFloat) {
        put_float<kBlocks, kColumns>(read_place(skipped, 4), d);
      } else if (Program::kHasGate && gated) {
        put<kBlocks, kColumns>(skipped, [&](int i, int n) {
          const float* gate = d[0] + i * 4 + n * 2;
          const float* up = kBlocks == 1 ? gate + 2 : d[kBlocks - 1] + i * 4 + n * 2;
          return pack<kIsHalf>(silu(gate[0]) * up[0], silu(gate[1]) * up[1]);
        });
      } else {
        put<2 * kBlocks, kColumns>(skipped, [&](int i, int n) {
          const float* v = d[n % kBlocks] + i * 4 + n / kBlocks * 2;
          return pack<kIsHalf>(v[0], v[1]);
        });
      }
    }
    return !lost;
  }

  // A warpgroup's share of kColumns rows, of which a warp has kUnits times eight elements each:
  // value(i, n) are two of unit n of the rows from 8 i on, as the tensor cores leave them.
  template <int kUnits, int kColumns, class Value>
  ETC_DEVICE void put(i32 skipped, Value value) const {
    constexpr i32 kRow = 4 * kUnits, kStep = 128 / kRow;  // units of a row; rows of a store
    constexpr i32 kMost = i32(kRoundBytes) / (kRow * 16);
    constexpr int kEights = kUnits == 1 ? 2 : 4 / kUnits;  // of rows, that go in at once
    const u32 thread = ptx::thread(), lane = thread & 31, wg = thread >> 7;
    // Units of a row lie in an order of their own, so that neighbouring rows meet in no bank.
    auto spot = [&](u32 row, u32 unit) {
      const u32 turned = kRow < 8 ? row / 2 % kRow : row % 8;
      return out(wg) + row * (kRow * 16) + ((unit ^ turned) << 4);
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
      if (first == 0) {  // not earlier: registers are scarce
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

  // The same of elements in fp32, as they are.
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

// The tile stays on this rank.
template <class Task>
struct grouped_store {
  template <class Call, class Program>
  ETC_DEVICE static bool store(
      const GroupedMatmul& matmul, const Run<Program>& run, const typename Call::Coord& c,
      u32 packed, u32& round, u32&, u32& entered, Waiter who) {
    const auto size = GroupedMatmul::Size::of(packed);
    if (size.rows > 0 && !matmul.see_stored<Call>(run, c, size, round)) return false;
    return GroupedMatmul::notify_kept<Call>(run, c, entered, who);
  }
};

// silu(x @ gate.T) * (x @ up.T).
template <class Task>
struct grouped_gated : grouped_store<Task> {};

// In fp32: kIsFloat.
template <class Task>
struct grouped_float : grouped_store<Task> {};

// In fp32, of a weight of at most 128 rows: kIsThin.
template <class Task>
struct thin_float : grouped_store<Task> {};

}  // namespace etc
