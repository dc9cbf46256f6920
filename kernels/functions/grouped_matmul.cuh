// Grouped matrix multiplication: loading, gathering and storing of a task. The tiles and the
// mainloop are in grouped_compute.cuh.
#pragma once
#include "functions/grouped_compute.cuh"

namespace etc {

// The roles of all functions but the storing of a tile.
template <class Call>
struct GroupedRoles : Roles, GroupedTile {
  using Compute = GroupedMatmul<Call::kIsHalf, ActivationOf<Call>>;
  using Coord = typename Call::Coord;
  static constexpr bool kIsGathered = has_role<Call>(kGatherRole);
  static constexpr u32 kVariant =
      (Call::kGated ? kGated : 0) | (Call::kIsThin ? kThin : 0) |
      (kIsGathered ? kGathered : 0) | (Call::kIsBiased ? kBiased : 0);
  static constexpr u32 kUniformStageBytes = kStageBytes;

  template <class Program>
  ETC_DEVICE static u32 size(const Run<Program>& run, const Coord& c) {
    constexpr int kOfRows = kIsGathered ? Call::kReads - 1 : 0;
    const u32 rows = minimum(Call::template operand<kOfRows>(run.g, c).size[0], i32(kMaxRows));
    if (rows == 0) return 0;
    if constexpr (Call::kIsThin) {
      return Size{(num_steps<Call>(run, c) + 1) / 2, kThinRows, true, 2, 0}.packed();
    }
    const auto weight = Call::template operand<1>(run.g, c);
    const u32 wide = u32(weight.size[weight.kRank - 2]) * (1 + Call::kGated);
    if (wide == 0) return 0;  // a tile of columns after the edge
    const bool is_half = wide <= kBoxRows, is_narrow = is_half && rows <= kPiece;
    const u32 padded = (rows + kPiece - 1) / kPiece * kPiece;
    const u32 steps = num_steps<Call>(run, c), boxes = is_half && !is_narrow ? 1 : 2;
    const u32 few = kIsGathered && rows <= kFew ? rows : 0;
    return Size{is_narrow ? (steps + 1) / 2 : steps, padded, is_narrow, boxes, few}.packed();
  }
  template <class Program>
  ETC_DEVICE static RingStages stages(const Run<Program>&, u32 packed) {
    return {Size::of(packed).steps, kStageBytes};
  }

  // A bulk copy may load rows of x beyond the end of the tile. These are multiplied too, but not
  // stored.
  template <class Program, class Publish, class Loaded>
  ETC_DEVICE static bool load(
      const Run<Program>& run, StageLoader<Program>& stages, const Coord& c, u32 packed,
      Publish publish, Loaded loaded) {
    publish();
    if (packed == 0) return true;
    const Size size = Size::of(packed);
    // NOTE: before the loop: otherwise runtime tensors are loaded for each stage.
    const Box w = Call::template operand<1>(run.g, c).box();
    Box x{}, large_x{};
    if constexpr (!kIsGathered) {
      x = Call::template operand<0>(run.g, c).box(), large_x = Call::template operand<0>(run.g, c).large_box();
    }
    for (u32 k = 0; k < size.steps; ++k) {
      Stage stage;
      if (Call::kLoadsAhead && stages.is_begun()) {
        stage = stages.next_begun(kStageBytes);
      } else if (!begin_stage(run, stages, size, k, w, stage)) {
        return false;
      }
      if constexpr (!kIsGathered) fill_x(size, stage, k, x, large_x);
      loaded(k + 1);
    }
    return true;
  }

  // Loads the weight of stage n before the last wait.
  template <class Program>
  ETC_DEVICE static bool load_ahead(
      const Run<Program>& run, StageLoader<Program>& stages, const Coord& c, u32 packed, u32 n) {
    const Box w = Call::template operand<1>(run.g, c).box();
    Stage stage;
    return begin_stage(run, stages, Size::of(packed), n, w, stage);
  }

  template <class Program>
  ETC_DEVICE static bool gather(
      const Run<Program>& run, StageGatherer<Program>& stages, const Coord& c, u32 packed) {
    if (packed == 0) return true;
    const Size size = Size::of(packed);
    if (size.few > 0) return gather_few(run, stages, c, size);
    return gather_many(run, stages, c, size);
  }

  // The store warp writes the place of this task's tile, and waits until it is stored.
  template <class Program>
  ETC_DEVICE static bool wait_stored(
      const Run<Program>& run, const Compute& matmul, const Coord& c, u32& round) {
    const auto y = Call::template operand<Call::kReads>(run.g, c);
    constexpr int kOfRows = y.kRank - 2, kOfColumns = y.kRank - 1;
    const i32 rows = minimum(y.size[kOfRows], i32(kMaxRows));
    const i32 columns = minimum(y.size[kOfColumns], i32(2 * kBoxRows));
    const u32 row_bytes = u32(y.stride[kOfRows]) * sizeof(*y.base);
    const u64 at = u64(y.at());
    if (ptx::lane() == 0) {
      ptx::store_shared8(matmul.place(), u32(at), u32(at >> 32));
      ptx::store_shared8(matmul.place() + 8, row_bytes, u32(rows) | u32(columns) << 16);
      if constexpr (Call::kIsBiased) {
        constexpr int kFirst = 2 + Call::kGated, kLast = kFirst + Call::kGated;
        const u64 gate = u64(Call::template operand<kFirst>(run.g, c).at());
        const u64 up = u64(Call::template operand<kLast>(run.g, c).at());
        ptx::store_shared8(matmul.place() + 16, u32(gate), u32(gate >> 32));
        ptx::store_shared8(matmul.place() + 24, u32(up), u32(up >> 32));
      }
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
      const Run<Program>& run, StageLoader<Program>& stages, const Size& size, u32 k, const Box& w,
      Stage& stage) {
    const u32 rows = kIsGathered ? size.few : size.rows;
    const u32 expected = size.depth() * rows * kRowBytes + size.boxes * kBoxBytes;
    if (!stages.begin(run, kStageBytes, expected, rows == 0, stage)) return false;
    fill_w(size, stage, k, w);
    return true;
  }

  // Few rows: each lane of the first warp loads one row by bulk copies.
  template <class Program>
  ETC_DEVICE static bool gather_few(
      const Run<Program>& run, StageGatherer<Program>& stages, const Coord& c, const Size& size) {
    if (ptx::thread() / 32 % 2 == 1) {
      stages.skip({size.steps, kStageBytes});
      return true;
    }
    const Box x = Call::template operand<0>(run.g, c).box();
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

  // More rows: a warp has four of each eight adjacent rows, and a lane copies 16 bytes of each.
  // NOTE: such copies belong to the generic proxy: a fence is needed before wgmma reads them.
  template <class Program>
  ETC_DEVICE static bool gather_many(
      const Run<Program>& run, StageGatherer<Program>& stages, const Coord& c, const Size& size) {
    const auto x = Call::template operand<0>(run.g, c);
    const auto tokens = Call::template operand<Call::kReads - 1>(run.g, c);
    const u32 thread = ptx::thread(), unit = thread % 8, first = thread / 8 % 8;
    const u32 to = first * kRowBytes + ((unit ^ first) << 4), row_bytes = u32(x.size[1]) * 2;
    u32 offset[kMaxRows / 8];  // from x's first row to this lane's, in units of 16 bytes
#pragma unroll
    for (u32 i = 0; i < kMaxRows / 8; ++i) {
      const i32 row = minimum(i32(first + i * 8), tokens.size[0] - 1);
      const u32 token = i * 8 < size.rows ? ptx::load4_l2(u64(tokens.at(row))) : 0;
      offset[i] = token * (row_bytes / 16) + unit;
    }
    u32 column = 0;
    for (u32 k = 0; k < size.steps; ++k) {
      Stage stage;
      if (!stages.begin(run, kStageBytes, stage)) return false;
      for (u32 part = 0; part < size.depth(); ++part, column += kRowBytes) {
        const u32 at = stage.at + part * (kPiece * kRowBytes) + to;
        const u32 bytes = column + unit * 16 < row_bytes ? 16 : 0;
        const u64 from = u64(x.at()) + column;
        const auto copy_two = [&](u32 i) ETC_INLINE {
#pragma unroll
          for (u32 n = 2 * i; n < 2 * i + 2; ++n) {
            ptx::copy16_async(at + n * 8 * kRowBytes, from + u64(offset[n]) * 16, bytes);
          }
        };
        switch (size.rows / kPiece) {
          default: copy_two(8); [[fallthrough]];
          case 8: copy_two(7); [[fallthrough]];
          case 7: copy_two(6); [[fallthrough]];
          case 6: copy_two(5); [[fallthrough]];
          case 5: copy_two(4); [[fallthrough]];
          case 4: copy_two(3); [[fallthrough]];
          case 3: copy_two(2); [[fallthrough]];
          case 2: copy_two(1); [[fallthrough]];
          case 1: copy_two(0);
        }
      }
      ptx::mbarrier_arrive_copied(stage.full);
    }
    return true;
  }

  // One thread: the bulk copies of a stage.
  ETC_DEVICE static void fill_x(
      const Size& size, const Stage& stage, u32 k, const Box& x, const Box& large) {
    const u32 to = stage.at;
    auto at = [&](const Box& box, u32 row, u32 step) -> Box {
      return {box.map, box.x + i32(step * kStageDepth), box.y + i32(row), box.z};
    };
    if (size.is_narrow) {
      constexpr u32 kRows = Call::kIsThin ? kThinRows : kPiece;
      for (u32 part = 0; part < 2; ++part) {
        const Box box = at(Call::kIsThin ? large : x, 0, 2 * k + part);
        ptx::load_box(to + part * (kRows * kRowBytes), box, stage.full);
      }
      return;
    }
    for (u32 i = 0; i < size.rows;) {
      const bool is_large = i + kLarge <= size.rows;
      ptx::load_box(to + i * kRowBytes, at(is_large ? large : x, i, k), stage.full);
      i += is_large ? kLarge : kPiece;
    }
  }
  ETC_DEVICE static void fill_w(const Size& size, const Stage& stage, u32 k, const Box& w) {
    for (u32 i = 0; i < size.boxes; ++i) {
      const u32 row = size.is_narrow ? 0 : i * kBoxRows / (1 + Call::kGated);
      const u32 step = size.is_narrow ? 2 * k + i : k;
      const u32 to = stage.at + kBytesX + i * kBoxBytes;
      const Box from{w.map, w.x + i32(step * kStageDepth), w.y + i32(row), w.z};
      if constexpr (Call::kGated) {
        ptx::load_box_of_halves(to, from, stage.full);
      } else {
        ptx::load_box(to, from, stage.full);
      }
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
    using Base = GroupedRoles<Call>;
    if (packed > 0 && !Base::wait_stored(run, matmul, c, counters.round)) return false;
    return notify_own_rank<Call>(run, c, entered, who);
  }
};

// The activation of x @ gate.T and x @ up.T.
template <class Call>
struct grouped_gated : grouped_store<Call> {};

// With kIsThin: the result is in fp32, and the weight has at most 128 rows.
template <class Call>
struct thin_float : grouped_store<Call> {};

}  // namespace etc
