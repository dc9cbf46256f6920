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
    constexpr u32 kBytes = sizeof(*rows.base);
    const u64 first = u64(rows.at()) + u64(expert) * u64(rows.stride[0]) * kBytes;
    ptx::prefetch_l2(first, u32(rows.size[1] * rows.size[2]) * kBytes);
  }
}

// Weights of the elements of the vector, of which a lane loads eight adjacent columns at a time.
struct PlainPairs {
  static constexpr u32 kBytes = 2;
  static constexpr i32 kLoads = 4;  // of 16 bytes, that a lane has of each row of a step
  static constexpr int kAhead = 2;  // steps whose loads are under way
  struct Scales {};                 // of all rows
  using Place = Scales;             // of those of a lane's row
  using Scale = Scales;             // of a step

  ETC_DEVICE static Place place(const Scales&, u32, i32) { return {}; }
  ETC_DEVICE static void fetch(Scale&, const Scales&, const Place&, bool, u32, i32) {}
  ETC_DEVICE static float scaled(const Scale&, float weight) { return weight; }
  // The n-th eight columns of a row that a lane has in a step, and the first of them.
  template <bool kIsHalf>
  ETC_DEVICE static uint4 eight(const uint4 (&words)[kLoads], i32 n) {
    return words[n];
  }
  ETC_DEVICE static i32 column(i32 n, i32 lane) { return n * 32 + lane % 4 * 8; }
};

// Codes of e4m3, of which a lane loads sixteen columns at a time. A step is a block of k: each row
// has a scale for it, or one for all. Rows share scales in groups of 1 << kShift.
template <u32 kShift, bool kHasBlocks, class Element>
struct ScaledPairs {
  static constexpr u32 kBytes = 1;
  static constexpr i32 kLoads = 2;
  static constexpr int kAhead = 4;
  // Of the scales [experts, any, any]: the address, and bytes to the next expert and row. first,
  // second: the rows of w of the first pair; next: rows to the next pair.
  struct Scales {
    u64 address;
    u32 by_expert, pitch;
    i32 first, second, next;
  };
  using Place = u64;
  using Scale = u32;  // its bits

  // Of the row of a pair that a lane adds up: even ones the first.
  ETC_DEVICE static Place place(const Scales& scales, u32 expert, i32 pair) {
    const i32 row = (ptx::lane() % 2 == 0 ? scales.first : scales.second) + pair * scales.next;
    return scales.address + u64(expert) * scales.by_expert + u64(u32(row) >> kShift) * scales.pitch;
  }
  // `by_column`: the expert, where columns pick.
  ETC_DEVICE static void fetch(
      Scale& bits, const Scales& scales, Place place, bool is_there, u32 by_column, i32 block) {
    bits = 0;
    const u64 first = place + u64(by_column) * scales.by_expert;
    ptx::load_l2_into<sizeof(Element)>(
        bits, is_there, first + (kHasBlocks ? block * sizeof(Element) : 0));
  }
  ETC_DEVICE static float scaled(Scale bits, float weight) {
    return weight * __uint_as_float(bits << (32 - 8 * sizeof(Element)));  // bf16 is the upper half
  }
  template <bool kIsHalf>
  ETC_DEVICE static uint4 eight(const uint4 (&words)[kLoads], i32 n) {
    const uint4 codes = words[n / 2];
    const uint2 left = widen4<kIsHalf>(n % 2 == 0 ? codes.x : codes.z);
    const uint2 right = widen4<kIsHalf>(n % 2 == 0 ? codes.y : codes.w);
    return {left.x, left.y, right.x, right.y};
  }
  ETC_DEVICE static i32 column(i32 n, i32 lane) { return n / 2 * 64 + lane % 4 * 16 + n % 2 * 8; }
};

// The weights of a task.
template <class Task, int kScaleBits = Task::kScaleBits>
struct PairsOf {
  using Type = PlainPairs;
};
template <class Task>
struct PairsOf<Task, 32> {
  using Type = ScaledPairs<u32(Task::kScaleShift), bool(Task::kScaleHasBlocks), float>;
};
template <class Task>
struct PairsOf<Task, 16> {
  using Type = ScaledPairs<u32(Task::kScaleShift), bool(Task::kScaleHasBlocks), bf16>;
};

// The scales of operand kOperand, for pairs of rows; see ScaledPairs.
template <class Task, int kOperand>
ETC_DEVICE auto pair_scales(const Task& task, i32 first, i32 second, i32 next) {
  using Pairs = typename PairsOf<Task>::Type;
  if constexpr (Task::kScaleBits == 0) {
    return typename Pairs::Scales{};
  } else {
    const auto scales = task.template operand<kOperand>();
    constexpr u32 kBytes = sizeof(*scales.base);
    return typename Pairs::Scales{
        u64(scales.at()), u32(scales.stride[0]) * kBytes, u32(scales.stride[1]) * kBytes,
        first, second, next};
  }
}

// Eight pairs make a tile of the tensor cores, of whose other operand all columns are the
// vector: no sum over lanes is needed. The warps share the columns, 128 a step, among them;
// their sums are added in order.
// Experts may be picked in two ways: pairs are those of the first picked expert, then those of
// the next; or the columns are, each expert's with a weight.
template <class Weights>
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
  typename Weights::Scales scales;

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
  static constexpr int kAhead = Weights::kAhead;
  static constexpr i32 kMostTiles =
      Shared::kScratchBytes / (kWarps * kTilePairs * i32(sizeof(float2)));

  struct Step {
    uint4 weight[2][Weights::kLoads];  // of the rows of a pair
    uint2 vector;                      // of four columns a lane
    typename Weights::Scale scale;
  };
  // A step of a warp, and where the pair that this lane loads begins.
  struct Place {
    i32 tile, step;
    u64 row;
    typename Weights::Place scale;
  };

  ETC_DEVICE static i32 slot(i32 tile, i32 warp, i32 pair) {
    return (tile * kWarps + warp) * kTilePairs + pair;
  }

  // The sums of each warp's columns for the tiles up to `end`. Even lanes have those of the first
  // rows of pairs.
  // NOTE: indices after the last step give zeros, so that there is no branch.
  template <bool kIsHalf, class Arrived>
  ETC_DEVICE bool add_up(i32 thread, float2* sums, i32 tile, i32 end, Arrived arrived) const {
    const i32 warp = thread / 32, lane = thread % 32;
    Place place{tile, warp, 0, {}}, ahead{tile, warp, 0, {}};
    find_row(ahead, lane);
    Step steps[kAhead];
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      fetch_weight(ahead, end, lane, steps[n]);
      if (advance(ahead, warp)) find_row(ahead, lane);
    }
    if (tile == 0 && !arrived()) return false;
    ahead = place;
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      fetch_vector(ahead, end, lane, steps[n]);
      advance(ahead, warp);
    }
    find_row(ahead, lane);
    float sum = 0.0f;
#pragma unroll 1
    while (place.tile < end) {
#pragma unroll
      for (int n = 0; n < kAhead; ++n) {
        const float part = product<kIsHalf>(steps[n], lane);
        const float of_expert = __shfl_sync(~0u, weight, place.step / num_expert_steps);
        sum = __fmaf_rn(Weights::scaled(steps[n].scale, of_expert), part, sum);
        fetch_weight(ahead, end, lane, steps[n]);
        fetch_vector(ahead, end, lane, steps[n]);
        if (advance(ahead, warp)) find_row(ahead, lane);
        const i32 here = place.tile - tile;
        if (advance(place, warp)) {
          if (here + tile < end && lane % 4 < 2) {
            float2& of_pair = sums[slot(here, warp, lane / 4)];
            (lane % 4 == 0 ? of_pair.x : of_pair.y) = sum;
          }
          sum = 0.0f;
        }
      }
    }
    return true;
  }

  // Sets the row of a pair of a tile, and the place of its scales.
  ETC_DEVICE void find_row(Place& place, i32 lane) const {
    const i32 pair = minimum(place.tile * kTilePairs + lane / 4, num_pairs - 1);
    const i32 k = pair / of_expert, in_expert = pair - k * of_expert;
    const u32 expert = __shfl_sync(~0u, picked, k);
    place.row = first + u64(expert) * by_pair + u64(u32(in_expert)) * next + lane % 4 * 16;
    place.scale = Weights::place(scales, by_pair > 0 ? expert : 0, in_expert);
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
    constexpr i32 kBytes = Weights::kBytes, kLoadColumns = 16 / kBytes;
    const i32 k = place.step / num_expert_steps, block = place.step - k * num_expert_steps;
    const i32 column = block * kStepColumns, num_left = left(place, end, column);
    const u32 expert = __shfl_sync(~0u, picked, k);
    const u64 source = place.row + u64(expert) * by_step + column * kBytes;
#pragma unroll
    for (i32 i = 0; i < Weights::kLoads; ++i) {
      const bool is_inside = (i * 4 + lane % 4) * kLoadColumns < num_left;
      step.weight[0][i] = ptx::load16_once_if(is_inside, source + i * 64);
      step.weight[1][i] = ptx::load16_once_if(is_inside, source + apart + i * 64);
    }
    Weights::fetch(step.scale, scales, place.scale, num_left > 0, by_step > 0 ? expert : 0, block);
  }
  ETC_DEVICE void fetch_vector(const Place& place, i32 end, i32 lane, Step& step) const {
    const i32 k = place.step / num_expert_steps;
    const i32 column = (place.step - k * num_expert_steps) * kStepColumns;
    const u64 source = vector + u64(u32(k)) * by_vector + column * 2;
    step.vector = ptx::load8_l2_if(lane * 4 < left(place, end, column), source + lane * 8);
  }

  // NOTE: a dot product does not depend on the order of columns. The eight neighbours that a lane
  // has are one operand of mma: columns 0, 1, 4, 5 in a row of it, 2, 3, 6, 7 in another, which
  // even and odd columns of the other operand multiply. So they stay in their registers.
  template <bool kIsHalf>
  ETC_DEVICE static float product(const Step& step, i32 lane) {
    float d[2][4] = {};
#pragma unroll
    for (i32 i = 0; i < kParts; ++i) {
      const i32 source_lane = Weights::column(i, lane) / 4;
      const u32 words[4] = {
          __shfl_sync(~0u, step.vector.x, source_lane),
          __shfl_sync(~0u, step.vector.y, source_lane),
          __shfl_sync(~0u, step.vector.x, source_lane + 1),
          __shfl_sync(~0u, step.vector.y, source_lane + 1)};
      const u32 low = lane & 4 ? words[1] : words[0], high = lane & 4 ? words[3] : words[2];
#pragma unroll
      for (i32 n = 0; n < 2; ++n) {
        const uint4 w = Weights::template eight<kIsHalf>(step.weight[n], i);
        ptx::mma_16x8x16<kIsHalf>(d[n], w.x, w.y, w.z, w.w, low, high);
      }
    }
    return lane % 2 == 0 ? d[0][0] + d[0][3] : d[1][0] + d[1][3];
  }
};

}  // namespace etc
