// Products of pairs of rows of weights with one vector, for tasks of 256 threads: as fast as
// memory gives the weights.
#pragma once
#include "functions/half_vector.cuh"
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

// Weights of the elements of the vector.
struct PlainPairs {
  static constexpr u32 kBytes = 2;
  struct Scales {};      // of all rows
  using Place = Scales;  // of those of a lane's row
  using Scale = Scales;  // of a step

  ETC_DEVICE static Place place(const Scales&, u32, i32) { return {}; }
  ETC_DEVICE static void fetch(Scale&, const Scales&, const Place&, i32, u32, i32) {}
  ETC_DEVICE static float scaled(const Scale&, i32, float weight) { return weight; }
  // The words of four columns, of eight that a lane has loaded: the first two, and the second two.
  template <bool kIsHalf>
  ETC_DEVICE static uint2 four(uint4 words, i32 n) {
    return n == 0 ? make_uint2(words.x, words.y) : make_uint2(words.z, words.w);
  }
};

// Codes of e4m3. A step has two blocks of k: each row has a scale for each, or one for all. Rows share
// scales in groups of 1 << kShift.
template <u32 kShift, bool kHasBlocks, class Element>
struct ScaledPairs {
  static constexpr u32 kBytes = 1;
  // Of the scales [experts, any, any]: the address, and bytes to the next expert and row. first: the
  // row of w of the first pair that a lane adds up; next: rows to the next pair.
  struct Scales {
    u64 address;
    u32 by_expert, pitch;
    i32 first, next;
  };
  using Place = u64;
  struct Scale {
    u32 bits[kHasBlocks ? 2 : 1];
  };

  ETC_DEVICE static Place place(const Scales& scales, u32 expert, i32 pair) {
    const i32 row = scales.first + pair * scales.next;
    return scales.address + u64(expert) * scales.by_expert + u64(u32(row) >> kShift) * scales.pitch;
  }
  // num_left: columns from the step's first one on. `by_column`: the expert, where columns pick.
  ETC_DEVICE static void fetch(
      Scale& scale, const Scales& scales, Place place, i32 num_left, u32 by_column, i32 step) {
    const u64 first = place + u64(by_column) * scales.by_expert;
    const u64 source = first + (kHasBlocks ? step * 2 * sizeof(Element) : 0);
#pragma unroll
    for (i32 i = 0; i < (kHasBlocks ? 2 : 1); ++i) {
      scale.bits[i] = 0;
      ptx::load_l2_into<sizeof(Element)>(
          scale.bits[i], i * 128 < num_left, source + i * sizeof(Element));
    }
  }
  ETC_DEVICE static float scaled(const Scale& scale, i32 block, float weight) {
    return weight * number_of<Element>(scale.bits[kHasBlocks ? block : 0]);
  }
  template <bool kIsHalf>
  ETC_DEVICE static uint2 four(uint4 codes, i32 n) {
    return widen4<kIsHalf>(n < 2 ? n == 0 ? codes.x : codes.y : n == 2 ? codes.z : codes.w);
  }
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

// The scales of operand kOperand, for pairs of rows; see ScaledPairs. first, second: the rows of w of
// the first pair, which even and odd lanes add up.
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
        task.thread % 2 == 0 ? first : second, next};
  }
}

// Eight pairs make a tile of the tensor cores, of whose other operand all columns are the
// vector: no sum over lanes is needed. The warps share the columns, 256 bytes of a row a step, among
// them; their sums are added in order.
// Experts are picked in one of two ways: pairs are those of the first picked expert, then those of
// the next; or, with kColumnsPick, the columns are, each expert's with a weight.
template <class Weights, bool kColumnsPick>
struct RowPairs {
  // NOTE: 32 bits where they suffice: registers are scarce.
  u64 first;      // address of the first pair's first row
  u64 apart;      // bytes from a pair's first row to its second,
  u32 next;       // to the next pair's first row,
  u32 by_expert;  // and from an expert to the next
  i32 num_experts, num_pairs;
  i32 of_expert;            // pairs of an expert, if pairs pick
  i32 columns, num_steps;   // of an expert
  u64 vector;               // address
  u32 by_vector;            // bytes from an expert's part to the next, if columns pick
  u32 picked;               // lane k's is the k-th expert, and
  float weight;             // its weight; lanes after the last need a finite one, for zeros
  typename Weights::Scales scales;

  static constexpr i32 kStepColumns = 256 / Weights::kBytes;
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
  static constexpr int kAhead = 2;  // steps whose loads are under way
  static constexpr i32 kLoads = 4;  // of 16 bytes, that a lane has of each row of a step
  static constexpr i32 kSums = 2;   // of a step, each over half of its columns
  static constexpr i32 kVectorWords = kStepColumns / 64;  // that a lane has, of two columns each
  static constexpr i32 kMostTiles =
      Shared::kScratchBytes / (kWarps * kTilePairs * i32(sizeof(float2)));

  struct Step {
    uint4 weight[2][kLoads];  // of the rows of a pair
    u32 vector[kVectorWords];
    typename Weights::Scale scale;
    float of_expert;  // its weight, if columns pick
  };
  // A step of a warp, and the pair of its tile that this lane loads. pair or step, by which experts
  // are picked, is that of the expert.
  struct Place {
    i32 tile, expert, pair, step;
  };
  // Where that pair begins.
  struct Row {
    u64 address;
    typename Weights::Place scale;
  };
  // To the pair or step that is kWarps further, where an expert has `size`.
  // NOTE: divisions in each step took twice the instructions of its multiplications.
  struct Jump {
    i32 size, experts, remainder;

    ETC_DEVICE explicit Jump(i32 of_each)
        : size(of_each), experts(kWarps / of_each), remainder(kWarps % of_each) {}
    ETC_DEVICE void apply(i32& expert, i32& value) const {
      expert += experts, value += remainder;
      if (value >= size) value -= size, ++expert;
    }
  };
  static_assert(kWarps == kTilePairs);

  ETC_DEVICE static i32 slot(i32 tile, i32 warp, i32 pair) {
    return (tile * kWarps + warp) * kTilePairs + pair;
  }

  // The sums of each warp's columns for the tiles up to `end`. Even lanes have those of the first
  // rows of pairs.
  // NOTE: indices after the last step give zeros, so that there is no branch.
  template <bool kIsHalf, class Arrived>
  ETC_DEVICE bool add_up(i32 thread, float2* sums, i32 tile, i32 end, Arrived arrived) const {
    const i32 warp = thread / 32, lane = thread & 31;
    const Jump jump(kColumnsPick ? num_steps : of_expert);
    const Place first_place = begin(tile, warp, lane);
    Place ahead = first_place;
    Row row = find_row(ahead, lane);
    Step steps[kAhead];
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      fetch_weight(ahead, row, end, lane, steps[n]);
      if (advance(ahead, first_place, jump)) row = find_row(ahead, lane);
    }
    if (tile == 0 && !arrived()) return false;
    Place of_vector = first_place;
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      fetch_vector(of_vector, end, lane, steps[n]);
      advance(of_vector, first_place, jump);
    }
    row = find_row(ahead, lane);  // of experts that had not been picked
    const i32 num_turns = turns_of(warp);
    i32 tiles_left = end - tile, turns_left = num_turns;
    float* of_pair = &sums[slot(0, warp, lane / 4)].x + lane % 2;
    float sum = 0.0f;
    auto vector = prepared<kIsHalf>(steps[0].vector);
#pragma unroll 1
    while (tiles_left > 0) {
#pragma unroll
      for (int n = 0; n < kAhead; ++n) {
        Step& step = steps[n];
        const Sums of_step = product<kIsHalf>(step, vector, lane);
        const float of_expert = kColumnsPick ? step.of_expert : 1.0f;
        float factors[kSums];
#pragma unroll
        for (i32 i = 0; i < kSums; ++i) factors[i] = Weights::scaled(step.scale, i, of_expert);
        // NOTE: before the products are added, for which the tensor cores take a while.
        fetch_weight(ahead, row, end, lane, step);
        fetch_vector(ahead, end, lane, step);
#pragma unroll
        for (i32 i = 0; i < kSums; ++i) sum = __fmaf_rn(factors[i], of_step.part[i], sum);
        vector = prepared<kIsHalf>(steps[(n + 1) % kAhead].vector);
        if (advance(ahead, first_place, jump)) row = find_row(ahead, lane);
        if (--turns_left == 0) {
          if (tiles_left > 0 && lane % 4 < 2) *of_pair = sum;
          of_pair += slot(1, 0, 0) * 2;
          sum = 0.0f;
          --tiles_left, turns_left = num_turns;
        }
      }
    }
    return true;
  }

  // Steps of a warp for each tile; at least one, of zeros.
  ETC_DEVICE i32 turns_of(i32 warp) const {
    const i32 all = kColumnsPick ? num_experts * num_steps : num_steps;
    return maximum(1, (all + kWarps - 1 - warp) / kWarps);
  }
  // The first step of a warp from `tile` on.
  ETC_DEVICE Place begin(i32 tile, i32 warp, i32 lane) const {
    const i32 pair = tile * kTilePairs + lane / 4;
    if constexpr (kColumnsPick) {
      return {tile, warp / num_steps, pair, warp % num_steps};
    } else {
      return {tile, pair / of_expert, pair % of_expert, warp};
    }
  }
  // Whether another tile begins.
  ETC_DEVICE bool advance(Place& place, const Place& first_place, const Jump& jump) const {
    if constexpr (kColumnsPick) {
      jump.apply(place.expert, place.step);
      if (place.expert < num_experts) return false;
      place.expert = first_place.expert;
      place.pair += kTilePairs;
    } else {
      place.step += kWarps;
      if (place.step < num_steps) return false;
      jump.apply(place.expert, place.pair);
    }
    place.step = first_place.step;
    ++place.tile;
    return true;
  }
  // NOTE: pairs after the last one are those of any other.
  ETC_DEVICE Row find_row(const Place& place, i32 lane) const {
    const i32 pair = kColumnsPick ? minimum(place.pair, num_pairs - 1) : place.pair;
    u32 expert = 0;
    if constexpr (!kColumnsPick) {
      expert = __shfl_sync(~0u, picked, minimum(place.expert, num_experts - 1));
    }
    const u64 address = first + u64(expert) * by_expert + u64(u32(pair)) * next + lane % 4 * 16;
    return {address, Weights::place(scales, expert, pair)};
  }

  // Columns from a step's first one to the end; none after the last step.
  ETC_DEVICE i32 left(const Place& place, i32 end) const {
    const bool is_there =
        place.tile < end && (kColumnsPick ? place.expert < num_experts : place.step < num_steps);
    return is_there ? columns - place.step * kStepColumns : 0;
  }
  ETC_DEVICE void fetch_weight(
      const Place& place, const Row& row, i32 end, i32 lane, Step& step) const {
    constexpr i32 kBytes = Weights::kBytes, kLoadColumns = 16 / kBytes;
    const i32 num_left = left(place, end);
    const u32 expert = kColumnsPick ? __shfl_sync(~0u, picked, place.expert) : 0;
    const u64 source =
        row.address + u64(expert) * by_expert + place.step * kStepColumns * kBytes;
#pragma unroll
    for (i32 i = 0; i < kLoads; ++i) {
      const bool is_inside = (i * 4 + lane % 4) * kLoadColumns < num_left;
      step.weight[0][i] = ptx::load16_once_if(is_inside, source + i * 64);
      step.weight[1][i] = ptx::load16_once_if(is_inside, source + apart + i * 64);
    }
    Weights::fetch(step.scale, scales, row.scale, num_left, expert, place.step);
    if constexpr (kColumnsPick) step.of_expert = __shfl_sync(~0u, weight, place.expert);
  }
  ETC_DEVICE void fetch_vector(const Place& place, i32 end, i32 lane, Step& step) const {
    u64 source = vector + (place.step * kStepColumns + lane * kVectorWords * 2) * 2;
    if constexpr (kColumnsPick) source += u64(u32(place.expert)) * by_vector;
    const bool is_inside = lane * kVectorWords * 2 < left(place, end);
    if constexpr (kVectorWords == 2) {
      const uint2 words = ptx::load8_l2_if(is_inside, source);
      step.vector[0] = words.x, step.vector[1] = words.y;
    } else {
      const uint4 words = ptx::load16_l2_if(is_inside, source);
      step.vector[0] = words.x, step.vector[1] = words.y;
      step.vector[2] = words.z, step.vector[3] = words.w;
    }
  }

  struct Sums {
    float part[kSums];
  };
  struct Unchanged {};
  using Halves = HalfVector<kVectorWords>;

  // A step's part of the vector, as it is multiplied.
  // NOTE: numbers of e4m3 are such of f16; to make them such of bf16 takes three more instructions
  // for each two.
  template <bool kIsHalf>
  ETC_DEVICE static auto prepared(const u32 (&words)[kVectorWords]) {
    if constexpr (kIsHalf || Weights::kBytes == 2) {
      return Unchanged{};
    } else {
      return Halves::of(words);
    }
  }
  template <bool kIsHalf>
  ETC_DEVICE static Sums product(const Step& step, Unchanged, i32 lane) {
    return multiply_step<kIsHalf>(step, step.vector, lane);
  }
  template <bool kIsHalf>
  ETC_DEVICE static Sums product(const Step& step, Halves vector, i32 lane) {
    Sums sums = {};
    if (!vector.is_exact) {  // seldom. NOTE: so that what follows is not in a branch, it adds zeros
      sums = multiply_step<kIsHalf>(step, step.vector, lane);
#pragma unroll
      for (u32& word : vector.words) word = 0;
    }
    const Sums halves = multiply_step<true>(step, vector.words, lane);
#pragma unroll
    for (i32 i = 0; i < kSums; ++i) {
      sums.part[i] = __fmaf_rn(halves.part[i], vector.unit, sums.part[i]);
    }
    return sums;
  }
  // NOTE: a dot product does not depend on the order of columns. The neighbours that a lane loads
  // are operands of mma: half of them in a row of it, half in another, which even and odd columns of
  // the other operand multiply. So they stay in their registers, and all lanes need the same
  // register of others.
  template <bool kIsHalf>
  ETC_DEVICE static Sums multiply_step(
      const Step& step, const u32 (&vector)[kVectorWords], i32 lane) {
    float d[2][kSums][4] = {};
#pragma unroll
    for (i32 i = 0; i < kLoads; ++i) {
      const i32 source_lane = i * 8 + lane % 4 * 2 + lane / 4 % 2;
#pragma unroll
      for (i32 m = 0; m < kVectorWords / 2; ++m) {
        const u32 low = __shfl_sync(~0u, vector[2 * m], source_lane);
        const u32 high = __shfl_sync(~0u, vector[2 * m + 1], source_lane);
#pragma unroll
        for (i32 n = 0; n < 2; ++n) {
          const uint2 even = Weights::template four<kIsHalf>(step.weight[n][i], m);
          const uint2 odd =
              Weights::template four<kIsHalf>(step.weight[n][i], m + kVectorWords / 2);
          ptx::mma_16x8x16<kIsHalf>(
              d[n][i * kSums / kLoads], even.x, odd.x, even.y, odd.y, low, high);
        }
      }
    }
    Sums sums;
#pragma unroll
    for (i32 i = 0; i < kSums; ++i) {
      sums.part[i] = lane % 2 == 0 ? d[0][i][0] + d[0][i][3] : d[1][i][0] + d[1][i][3];
    }
    return sums;
  }
};

}  // namespace etc
