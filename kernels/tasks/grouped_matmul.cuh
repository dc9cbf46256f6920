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
// which the pair shares, each worker having 64 rows of x. The finished tile is transposed on
// its way to the output buffer.
//
// A gated product needs the same rows of two weights, gate and up. Blocks of 64 rows hold
// eight of either in turn: so a thread has both factors of each of its results.
#pragma once
#include "ptx/warp.cuh"
#include "ptx/wgmma_columns.cuh"
#include "tasks/tile_ring.cuh"

namespace etc {

struct GroupedMatmul : TileRing<144, 96 * 128, 64> {
  static constexpr u32 kPiece = 16;     // rows of x or y that one bulk copy moves,
  static constexpr u32 kLarge = 64;     // or may move, where there are as many
  static constexpr u32 kMaxRows = 144;  // of a worker
  static constexpr u32 kRowBytes = kDepth * 2, kRoundRows = kRoundBytes / kRowBytes;
  static constexpr u32 kBoxRows = 128, kBoxBytes = kBoxRows * kRowBytes;  // of the weight
  static_assert(kMaxRows * kRowBytes == kBytesX && 2 * kBoxBytes == kBytesW);
  static_assert(kMaxRows <= 2 * kRoundRows);
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
  // stages. The rows of x end where the tile ends, not where a bulk copy does: what lies behind
  // them is multiplied too, and stored behind the tile's own rows.
  template <class Call, class Program>
  ETC_DEVICE bool load(
      const Run<Program>& run, const typename Call::Coord& c, u32 packed, u32& ring,
      u32 ahead = 0) const {
    if (packed == 0) return true;
    const Size size = Size::of(packed);
    const Box w = Call::template box<1>(run.g, c);
    for (u32 turn = 0; turn < size.turns(); ++turn) {
      for (u32 k = 0; k < size.steps; ++k, ++ring) {
        if (ahead > 0) {
          --ahead;
        } else if (!begin_stage<Call>(run, size, turn, k, w, ring)) {
          return false;
        }
        if constexpr (!Call::kGathers) fill_x<Call>(run, c, size, ring % kStages, k);
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

  // A consumer warpgroup multiplies its share of a tile and puts it into the output buffer.
  template <bool kIsHalf, bool kWeightIsKN, class Program>
  ETC_DEVICE bool consume(
      const Run<Program>& run, u32 packed, bool gated, u32& ring, u32& round) const {
    static_assert(!kWeightIsKN);
    const Size size = Size::of(packed);
    if (size.kind == kNarrow) {
      if constexpr (Program::kHasThin) {
        if (size.rows == kThinRows) {
          return multiply<kIsHalf, 1, kThinRows, true>(run, size.steps, false, ring, round);
        }
      }
      return multiply<kIsHalf, 1, kPiece>(run, size.steps, gated, ring, round);
    }
    bool going = true;
    for (u32 turn = 0; turn < size.turns() && going; ++turn) {
      with_columns<kPiece>(size.rows, [&](auto columns) {
        going = multiply<kIsHalf, 2, decltype(columns)::value>(
            run, size.steps, gated, ring, round);
      });
    }
    return going;
  }

  // Where both warpgroups meet over a tile, one that has given up has to come, too.
  ETC_DEVICE void pass(u32 packed, bool gated) const {
    if (gated && Size::of(packed).kind == kNarrow) meet(true);
  }

  // The storing warp takes a turn's results out of the buffer: `store(wg, column, first, end)`
  // issues the bulk stores of these rows and of 64 columns of the worker's share, 32 in fp32.
  template <bool kGated, bool kIsFloat, class Program, class Store>
  ETC_DEVICE bool drain(
      const Run<Program>& run, const Size& size, u32& round, Store store) const {
    const bool is_single = kGated || size.kind == kNarrow;
    const u32 share = rows_of_round(size.rows), split = share < size.rows;
    const u32 count = (is_single ? 1 : 2) << (split + kIsFloat);
    return drain_tile(run, count, round, [&](u32 wg, u32 h) {
      if (kGated && size.kind == kNarrow && wg == 1) return;
      u32 column = (is_single ? wg : wg * 2 + (h >> split)) * 64;
      if constexpr (kIsFloat) column = (wg * (is_single ? 2 : 4) + (h >> split)) * 32;
      const u32 first = (h & split) * share;
      store(wg, column, first, minimum(first + share, size.rows));
    });
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

  // Of `rows` results, those of the first round: all, or about half.
  ETC_DEVICE static constexpr u32 rows_of_round(u32 rows) {
    return rows <= kRoundRows ? rows : (rows / kPiece + 1) / 2 * kPiece;
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
  template <class Call, class Program>
  ETC_DEVICE void fill_x(
      const Run<Program>& run, const typename Call::Coord& c, const Size& size, u32 s,
      u32 k) const {
    const Box x = Call::template box<0>(run.g, c), large = Call::template large_box<0>(run.g, c);
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
  struct Columns {
    static constexpr int value = n;
  };
  template <u32 n, class F>
  ETC_DEVICE static void with_columns(u32 rows, F f) {
    if (rows == n) {
      f(Columns<n>{});
    } else if constexpr (n < kMaxRows) {
      with_columns<n + kPiece>(rows, f);
    }
  }

  // One block of a narrow or thin tile, of stages of twice the depth; otherwise two.
  // NOTE: a thin tile has two sums, one of either half of each stage: a long chain of additions
  // is less exact, and experts are picked by the result.
  template <bool kIsHalf, int kBlocks, int kColumns, bool kIsThin = false, class Program>
  ETC_DEVICE bool multiply(
      const Run<Program>& run, u32 steps, bool gated, u32& ring, u32& round) const {
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
                ptx::matrix_descriptor(w + b * (kBlockBytes / 16) + 2 * q),
                ptx::matrix_descriptor(x + 2 * q), (k | (kIsThin ? 0 : part) | q) != 0);
          }
        }
      }
    });
    if constexpr (kIsThin) {
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) d[0][i] += d[1][i];
      if (!lost) lost = !put_float<kColumns>(run, d[0], wg, round);
    } else if (gated) {
      lost = !put_gated<kIsHalf>(run, d, wg, round, lost);
    } else {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        if constexpr (Program::kIsFloat) {
          if (!lost) lost = !put_float<kColumns>(run, d[b], wg, round);
        } else {
          if (!lost) lost = !put<kIsHalf, kColumns>(run, d[b], wg, round);
        }
      }
    }
    return !ptx::named_barrier_any<128>(2 + wg, lost);
  }

  // 64 rows of the weight by kColumns rows of x become kColumns rows of 64 elements.
  template <bool kIsHalf, int kColumns, class Program>
  ETC_DEVICE bool put(
      const Run<Program>& run, const float (&d)[kColumns / 2], u32 wg, u32& round) const {
    const u32 thread = ptx::thread(), lane = thread & 31, warp = (thread >> 5) & 3;
    const u32 row = (lane >> 4) * 8 + (lane & 7);  // and 16 more each time
    const u32 unit = warp * 2 + ((lane >> 3) & 1);
    const u32 origin = out(wg) + row * 128 + ((unit ^ (row & 7)) << 4);
    constexpr u32 kShare = rows_of_round(kColumns);
#pragma unroll
    for (u32 first = 0; first < kColumns; first += kShare, ++round) {
      const bool came = wait_mbarrier(run, emptied(wg), (round & 1) ^ 1);
      if (!__all_sync(~0u, came)) return false;
#pragma unroll
      for (u32 i = 0; i < kShare && first + i < kColumns; i += kPiece) {
        const float* v = d + (first + i) / 2;
        ptx::store_matrix4_transposed(
            origin + i * kRowBytes, pack<kIsHalf>(v[0], v[1]), pack<kIsHalf>(v[2], v[3]),
            pack<kIsHalf>(v[4], v[5]), pack<kIsHalf>(v[6], v[7]));
      }
      ptx::fence_proxy_async_shared();
      ptx::mbarrier_arrive(filled(wg));
    }
    return true;
  }

  // The same in fp32: first the 32 elements that two of the warps have, then the others'.
  template <int kColumns, class Program>
  ETC_DEVICE bool put_float(
      const Run<Program>& run, const float (&d)[kColumns / 2], u32 wg, u32& round) const {
    const u32 thread = ptx::thread(), lane = thread & 31, warp = (thread >> 5) & 3;
    const u32 row = lane % 4 * 2, column = warp % 2 * 16 + lane / 4;
    constexpr u32 kShare = rows_of_round(kColumns);
#pragma unroll 1
    for (u32 half = 0; half < 2; ++half) {
#pragma unroll
      for (u32 first = 0; first < kColumns; first += kShare, ++round) {
        const bool came = wait_mbarrier(run, emptied(wg), (round & 1) ^ 1);
        if (!__all_sync(~0u, came)) return false;
        if (warp / 2 == half) {
#pragma unroll
          for (u32 i = 0; i < kShare && first + i < kColumns; i += 8) {
#pragma unroll
            for (u32 n = 0; n < 4; ++n) {
              const u32 r = row + n % 2, c = column + n / 2 * 8;
              const u32 to = out(wg) + (i + r) * kRowBytes + ((c / 4 ^ r) << 4) + c % 4 * 4;
              ptx::store_shared(to, d[(first + i) / 2 + n]);
            }
          }
        }
        ptx::fence_proxy_async_shared();
        ptx::mbarrier_arrive(filled(wg));
      }
    }
    return true;
  }

  // Blocks of 32 rows of gate and of up become rows of 32 elements each: a warpgroup's two
  // side by side in its buffer, or the one of either side by side in the first buffer.
  template <bool kIsHalf, int kBlocks, int kSums, class Program>
  ETC_DEVICE bool put_gated(
      const Run<Program>& run, const float (&d)[kBlocks][kSums], u32 wg, u32& round,
      bool lost) const {
    const u32 thread = ptx::thread(), lane = thread & 31, warp = (thread >> 5) & 3;
    const u32 row = lane & 15;  // and 16 more each time
    constexpr bool kTogether = kBlocks == 1;
    const u32 buffer = kTogether ? 0 : wg;
    // NOTE: the second buffer is emptied last, so both warpgroups may wait for it; none may
    // run ahead of its own, or it would take an older emptying for this one.
    const u32 last = kTogether ? 1 : wg;
    constexpr u32 kColumns = kSums * 2, kShare = rows_of_round(kColumns);
#pragma unroll
    for (u32 first = 0; first < kColumns; first += kShare, ++round) {
      if (!lost) lost = !wait_mbarrier(run, emptied(last), (round & 1) ^ 1);
      lost = __any_sync(~0u, lost);
      if (!lost) {
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          const u32 unit = (kTogether ? wg : u32(b)) * 4 + warp;
          const u32 to = out(buffer) + row * 128 + ((unit ^ (row & 7)) << 4);
#pragma unroll
          for (u32 i = 0; i < kShare && first + i < kColumns; i += kPiece) {
            const float* v = d[b] + (first + i) / 2;
            ptx::store_matrix2_transposed(
                to + i * kRowBytes, pack<kIsHalf>(silu(v[0]) * v[2], silu(v[1]) * v[3]),
                pack<kIsHalf>(silu(v[4]) * v[6], silu(v[5]) * v[7]));
          }
        }
        ptx::fence_proxy_async_shared();
      }
      if constexpr (kTogether) lost = meet(lost);
      if (!lost) ptx::mbarrier_arrive(filled(wg));
    }
    return !lost;
  }
  // Both warpgroups: whether one of them has lost its way.
  ETC_DEVICE static bool meet(bool lost) { return ptx::named_barrier_any<256>(1, lost); }
};

// The tile stays on this rank, through a tensor map that clips it.
template <class Task>
struct grouped_store {
  template <class Call, class Program>
  ETC_DEVICE static bool store(
      const GroupedMatmul& matmul, const Run<Program>& run, const typename Call::Coord& c,
      u32 packed, u32& round, u32&, u32& entered, Waiter who) {
    const auto size = GroupedMatmul::Size::of(packed);
    const Box y = Call::template box<Call::kReads>(run.g, c);
    const Box large = Call::template large_box<Call::kReads>(run.g, c);
    for (u32 turn = 0; turn < size.turns() && size.rows > 0; ++turn) {
      const u32 skipped = size.template first_weight<Call::kIsThin>(turn);
      const i32 first = y.x + i32(skipped / (1 + Call::kGated));
      const i32 row = y.y + i32(size.template first_row<Call::kIsThin>());
      const bool done = matmul.drain<bool(Call::kGated), Call::kIsFloat || Call::kIsThin>(
          run, size, round, [&](u32 wg, u32 column, u32 begin, u32 end) {
            for (u32 i = begin; i < end;) {
              const bool is_large = i + GroupedMatmul::kLarge <= end;
              ptx::store_box(
                  {is_large ? large.map : y.map, first + i32(column), row + i32(i), y.z},
                  matmul.out(wg) + (i - begin) * GroupedMatmul::kRowBytes);
              i += is_large ? GroupedMatmul::kLarge : GroupedMatmul::kPiece;
            }
          });
      if (!done) return false;
    }
    return GroupedMatmul::notify_stored<Call>(run, c, entered, who);
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
