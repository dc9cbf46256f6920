// The gather role of a matrix multiplication: rows of x, named by their numbers, go to a stage.
#pragma once
#include "functions/tile_shape.cuh"
#include "worker/stage_ring.cuh"

namespace etc {

// So few rows are loaded by bulk copies, one by one.
constexpr u32 kFewGathered = 8;

// Two warps copy the rows of operand 0 that operand kNumbers names. shape: that of the task, with its
// own number of rows in `loaded`, in whole groups of kStep. kRowBytes: of a row of w in a box.
template <class Call, int kNumbers, u32 kRowBytes>
struct GatheredRows {
  static constexpr u32 kStep = 16, kMostRows = 144;
  using Coord = typename Call::Coord;

  // Rows that are loaded one by one: 0 if there are more than kFewGathered.
  ETC_DEVICE static u32 few(u32 rows) { return rows <= kFewGathered ? rows : 0; }

  template <class Program>
  ETC_DEVICE static bool gather(
      const Run<Program>& run, StageGatherer<Program>& stages, const Coord& c, RingStages all,
      const TileShape& shape) {
    const auto numbers = Call::template operand<kNumbers>(run.g, c);
    if (u32(numbers.size[0]) <= kFewGathered) return gather_few(run, stages, c, all, shape);
    return gather_many(run, stages, c, all, shape);
  }

 private:
  // Bytes from a stage's begin to its first box of x.
  ETC_DEVICE static u32 x_offset(const TileShape& shape) {
    return shape.depth * shape.box_w<kRowBytes>();
  }

  // Each lane of the first warp loads one row.
  template <class Program>
  ETC_DEVICE static bool gather_few(
      const Run<Program>& run, StageGatherer<Program>& stages, const Coord& c, RingStages all,
      const TileShape& shape) {
    if (ptx::thread() / 32 % 2 == 1) {
      stages.skip(all);
      return true;
    }
    const Box x = Call::template operand<0>(run.g, c).box();
    const auto numbers = Call::template operand<kNumbers>(run.g, c);
    const u32 lane = ptx::lane(), few = u32(numbers.size[0]);
    const i32 row = lane < few ? i32(ptx::load4_l2(u64(numbers.at(lane)))) : 0;
    for (u32 n = 0; n < all.count; ++n) {
      Stage stage;
      if (!stages.begin(run, all.bytes, stage)) return false;
      const u32 first = stage.at + x_offset(shape) + lane * 128;
      for (u32 box = 0; box < shape.depth; ++box) {
        const i32 column = i32((n * shape.depth + box) * 64);
        if (lane < few) ptx::load_box(first + box * shape.box_x(), {x.map, column, row, 0}, stage.full);
      }
    }
    return true;
  }

  // A warp has four of each eight adjacent rows, and a lane copies 16 bytes of each.
  // NOTE: such copies belong to the generic proxy: a fence is needed before wgmma reads them.
  template <class Program>
  ETC_DEVICE static bool gather_many(
      const Run<Program>& run, StageGatherer<Program>& stages, const Coord& c, RingStages all,
      const TileShape& shape) {
    const auto x = Call::template operand<0>(run.g, c);
    const auto numbers = Call::template operand<kNumbers>(run.g, c);
    const u32 thread = ptx::thread(), unit = thread % 8, first = thread / 8 % 8;
    const u32 row_bytes = u32(x.size[1]) * 2;
    const u32 in_box = x_offset(shape) + first * 128 + ((unit ^ first) << 4);
    u32 offset[kMostRows / 8];  // from x's first row to this lane's, in units of 16 bytes
#pragma unroll
    for (u32 i = 0; i < kMostRows / 8; ++i) {
      const i32 row = minimum(i32(first + i * 8), numbers.size[0] - 1);
      const u32 row_idx = i * 8 < shape.num_loaded ? ptx::load4_l2(u64(numbers.at(row))) : 0;
      offset[i] = row_idx * (row_bytes / 16) + unit;
    }
    u32 column = 0;
    for (u32 n = 0; n < all.count; ++n) {
      Stage stage;
      if (!stages.begin(run, all.bytes, stage)) return false;
      for (u32 box = 0; box < shape.depth; ++box, column += 128) {
        const u32 target = stage.at + box * shape.box_x() + in_box;
        const u32 bytes = column + unit * 16 < row_bytes ? 16 : 0;
        const u64 source = u64(x.at()) + column;
        const auto copy_two = [&](u32 i) ETC_INLINE {
#pragma unroll
          for (u32 k = 2 * i; k < 2 * i + 2; ++k) {
            ptx::copy16_async(target + k * 8 * 128, source + u64(offset[k]) * 16, bytes);
          }
        };
        switch (shape.num_loaded / kStep) {
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
};

}  // namespace etc
