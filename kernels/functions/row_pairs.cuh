// Products of pairs of rows of weights with one vector, for tasks of 256 threads: as fast as
// memory gives the weights.
#pragma once
#include "ptx/warp.cuh"
#include "worker/task.cuh"

namespace etc {

// The number of a token's experts whose rows of down gate_up_token prefetches into L2 after its own
// loads, as many as memory delivers until the activations are complete: more would delay the
// event. down_token prefetches the rows of the other experts.
template <class Task>
constexpr i32 kPrefetchedFirst = (Task::kTopK + 1) / 2;

// Prefetches rows of an expert into L2 if `is_needed` for this thread.
template <class Tile>
ETC_DEVICE void prefetch_rows(bool is_needed, const Tile& rows, u32 expert) {
  if (is_needed && rows.size[1] > 0) {
    const u64 first = u64(rows.at()) + u64(expert) * u64(rows.stride[0]) * 2;
    ptx::prefetch_l2(first, u32(rows.size[1] * rows.size[2]) * 2);
  }
}

// Eight pairs make a tile of the tensor cores, of whose other operand all columns are the
// vector: no sum over lanes is needed. The warps share the columns, 128 a step, among them;
// their sums are added in order.
// Experts may be picked in two ways: pairs are those of the first picked expert, then those of
// the next; or the columns are, each expert's with a weight.
struct RowPairs {
  // NOTE: 32 bits where they suffice: registers are scarce.
  u64 first;    // address of the first pair's first row
  u64 apart;    // bytes from a pair's first row to its second,
  u32 next;     // to the next pair's first row,
  u32 by_pair;  // and from an expert to the next, where pairs pick: of_expert pairs each
  i32 num_pairs, of_expert;
  u32 by_step;  // the same, where columns pick: each expert has `columns`, in num_expert_steps
  i32 columns, num_expert_steps, num_steps;
  u64 vector;     // address
  u32 by_vector;  // bytes from an expert's part to the next
  u32 picked;             // lane k's is the k-th expert, and
  float weight;           // its weight; lanes after the last need a finite one, for zeros

  static constexpr i32 kStepColumns = 128;
  static constexpr i32 steps_of(i32 columns) { return (columns + kStepColumns - 1) / kStepColumns; }

  // Experts at most whose pairs are loaded before arrived() is called: until then all others are
  // picked too.
  ETC_DEVICE i32 first_experts() const { return 1 + (kTilePairs * kAhead - 1) / of_expert; }

  // arrived(), once the first weights are under way: the vector is there; false to give up.
  // finish(pair, x, y) gets both sums of each pair, on one thread.
  template <class Task, class Arrived, class Finish>
  ETC_DEVICE void multiply(const Task& task, Arrived arrived, Finish finish) const {
    static_assert(Task::threads == kWarps * 32);
    float2* const sums = reinterpret_cast<float2*>(task.scratch);
    const i32 num_tiles = (num_pairs + kTilePairs - 1) / kTilePairs;
#pragma unroll 1
    for (i32 tile = 0; tile < num_tiles; tile += kMostTiles) {
      const i32 end = minimum(tile + kMostTiles, num_tiles), first_pair = tile * kTilePairs;
      if (!add_up<Task::kIsHalf>(task.thread, sums, tile, end, arrived)) return;
      task.sync();
      const i32 here = minimum(end * kTilePairs, num_pairs) - first_pair;
      for (i32 i = task.thread; i < here; i += Task::threads) {
        float2 sum = {};
#pragma unroll
        for (i32 warp = 0; warp < kWarps; ++warp) {
          const float2 part = sums[slot(i / kTilePairs, warp, i % kTilePairs)];
          sum = make_float2(sum.x + part.x, sum.y + part.y);
        }
        finish(first_pair + i, sum.x, sum.y);
      }
      task.sync();  // before they are written again
    }
  }

 private:
  static constexpr i32 kWarps = 8, kTilePairs = 8;
  static constexpr i32 kParts = 4;  // of a step: 32 columns, eight a lane
  static constexpr int kAhead = 2;  // steps whose loads are under way
  static constexpr i32 kMostTiles =
      Shared::kScratchBytes / (kWarps * kTilePairs * i32(sizeof(float2)));

  struct Step {
    uint4 weight[kParts][2];
    uint2 vector;  // of four columns a lane
  };
  // A step of a warp, and where the pair that this lane loads begins.
  struct Place {
    i32 tile, step;
    u64 row;
  };

  ETC_DEVICE static i32 slot(i32 tile, i32 warp, i32 pair) {
    return (tile * kWarps + warp) * kTilePairs + pair;
  }

  // The sums of each warp's columns for the tiles up to `end`.
  // NOTE: indices after the last step give zeros, so that there is no branch.
  template <bool kIsHalf, class Arrived>
  ETC_DEVICE bool add_up(i32 thread, float2* sums, i32 tile, i32 end, Arrived arrived) const {
    const i32 warp = thread / 32, lane = thread % 32;
    Place place{tile, warp, 0}, ahead{tile, warp, row(tile, lane)};
    Step steps[kAhead];
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      fetch_weight(ahead, end, lane, steps[n]);
      if (advance(ahead, warp)) ahead.row = row(ahead.tile, lane);
    }
    if (tile == 0 && !arrived()) return false;
    ahead = place;
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      fetch_vector(ahead, end, lane, steps[n]);
      advance(ahead, warp);
    }
    ahead.row = row(ahead.tile, lane);
    float2 sum = {};
#pragma unroll 1
    while (place.tile < end) {
#pragma unroll
      for (int n = 0; n < kAhead; ++n) {
        const float2 part = product<kIsHalf>(steps[n], lane);
        fetch_weight(ahead, end, lane, steps[n]);
        fetch_vector(ahead, end, lane, steps[n]);
        if (advance(ahead, warp)) ahead.row = row(ahead.tile, lane);
        const float scale = __shfl_sync(~0u, weight, place.step / num_expert_steps);
        sum.x = __fmaf_rn(scale, part.x, sum.x);
        sum.y = __fmaf_rn(scale, part.y, sum.y);
        const i32 here = place.tile - tile;
        if (advance(place, warp)) {
          if (here + tile < end && lane % 4 == 0) sums[slot(here, warp, lane / 4)] = sum;
          sum = {};
        }
      }
    }
    return true;
  }

  ETC_DEVICE u64 row(i32 tile, i32 lane) const {
    const i32 pair = minimum(tile * kTilePairs + lane / 4, num_pairs - 1), k = pair / of_expert;
    const u32 expert = __shfl_sync(~0u, picked, k);
    return first + u64(expert) * by_pair + u64(u32(pair - k * of_expert)) * next + lane % 4 * 16;
  }
  // Whether another tile begins.
  ETC_DEVICE bool advance(Place& place, i32 warp) const {
    place.step += kWarps;
    if (place.step < num_steps) return false;
    place.step = warp;
    ++place.tile;
    return true;
  }

  // Columns from a step's first one to the end; none after the last step.
  ETC_DEVICE i32 left(const Place& place, i32 end, i32 column) const {
    return place.tile < end && place.step < num_steps ? columns - column : 0;
  }
  ETC_DEVICE void fetch_weight(const Place& place, i32 end, i32 lane, Step& step) const {
    const i32 k = place.step / num_expert_steps;
    const i32 column = (place.step - k * num_expert_steps) * kStepColumns;
    const u32 expert = __shfl_sync(~0u, picked, k);
    const u64 source = place.row + u64(expert) * by_step + column * 2;
#pragma unroll
    for (i32 i = 0; i < kParts; ++i) {
      const bool is_inside = i * 32 + lane % 4 * 8 < left(place, end, column);
      step.weight[i][0] = ptx::load16_once_if(is_inside, source + i * 64);
      step.weight[i][1] = ptx::load16_once_if(is_inside, source + apart + i * 64);
    }
  }
  ETC_DEVICE void fetch_vector(const Place& place, i32 end, i32 lane, Step& step) const {
    const i32 k = place.step / num_expert_steps;
    const i32 column = (place.step - k * num_expert_steps) * kStepColumns;
    const u64 source = vector + u64(u32(k)) * by_vector + column * 2;
    step.vector = ptx::load8_l2_if(lane * 4 < left(place, end, column), source + lane * 8);
  }

  // NOTE: a dot product does not depend on the order of columns. The eight neighbours that a lane
  // loads are one operand of mma: columns 0, 1, 4, 5 in a row of it, 2, 3, 6, 7 in another, which
  // even and odd columns of the other operand multiply. So they stay in their registers.
  template <bool kIsHalf>
  ETC_DEVICE static float2 product(const Step& step, i32 lane) {
    float d[2][4] = {};
#pragma unroll
    for (i32 i = 0; i < kParts; ++i) {
      const i32 source_lane = i * 8 + lane % 4 * 2;
      const u32 words[4] = {
          __shfl_sync(~0u, step.vector.x, source_lane),
          __shfl_sync(~0u, step.vector.y, source_lane),
          __shfl_sync(~0u, step.vector.x, source_lane + 1),
          __shfl_sync(~0u, step.vector.y, source_lane + 1)};
      const u32 low = lane & 4 ? words[1] : words[0], high = lane & 4 ? words[3] : words[2];
#pragma unroll
      for (i32 n = 0; n < 2; ++n) {
        const uint4 w = step.weight[i][n];
        ptx::mma_16x8x16<kIsHalf>(d[n], w.x, w.y, w.z, w.w, low, high);
      }
    }
    return make_float2(d[0][0] + d[0][3], d[1][0] + d[1][3]);
  }
};

}  // namespace etc
