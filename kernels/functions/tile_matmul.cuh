// Dense matrix multiplication y = x @ w.T on tiles of many shapes; or gated: silu(x @ gate.T) *
// (x @ up.T), where half of a tile's columns are rows of gate, followed by the same rows of up.
//
// A call has a list of shapes; each run selects one, of `rows` rows of x and `columns` rows of w.
// One thread loads stages of `depth` boxes of 64 elements of k. Two warpgroups multiply and store
// the tile, through shared memory to write whole lines.
//
// SwappedTiles: rows of w are the M of wgmma and rows of x its N, any multiple of 8, so that x
// needs little padding. With up to 64 rows of w, the warpgroups multiply alternate boxes along k,
// and their sums are added; with more, each has half of the rows of w.
// RowsTiles: 128 rows of x, 64 for each warpgroup, and any multiple of 8 rows of w.
// WideTiles: as SwappedTiles, with 256 rows of w, and as many rows of x as a task has.
// In the first two, the rows of w are chosen so that the number of tiles fits the number of workers. A tile
// may use split-K among tasks: functions/tile_parts.cuh.
#pragma once
#include "functions/gather_rows.cuh"
#include "functions/rows_tile.cuh"
#include "functions/swapped_tile.cuh"
#include "functions/wide_tile.cuh"

namespace etc {

// The tile shapes of a program in the order of their numbers: swapped ones first, by rows.
template <u32... kTiles>
struct TileList {
  static constexpr u32 kAll[] = {kTiles...}, kCount = sizeof...(kTiles);

  // Whether shape n does not share the compute function of the one before it: those that share it
  // are equal but for columns and depth.
  ETC_DEVICE static constexpr bool begins_range(u32 n) {
    if (n == 0) return true;
    const TileShape shape = TileShape::of(kAll[n]), before = TileShape::of(kAll[n - 1]);
    return shape.is_swapped != before.is_swapped || shape.rows != before.rows;
  }
  ETC_DEVICE static constexpr u32 end_of(u32 first) {
    u32 end = first + 1;
    while (end < kCount && !begins_range(end)) ++end;
    return end;
  }
  // Calls f(TileRange) for the range that contains shape `shape_idx`.
  // NOTE: not by recursion: the compiler would inline the code of the last ranges once per level.
  template <class F>
  ETC_DEVICE static void with_alike(u32 shape_idx, F f) {
    (void)(false || ... || call_in_range<TileShape::of(kTiles).number>(shape_idx, f));
  }

 private:
  // Calls f for the range that begins with shape kFirst, if it contains `shape_idx`.
  template <u32 kFirst, class F>
  ETC_DEVICE static bool call_in_range(u32 shape_idx, F& f) {
    if constexpr (!begins_range(kFirst)) {
      return false;
    } else {
      constexpr u32 kEnd = end_of(kFirst);
      const bool is_contained = kEnd == kCount || shape_idx < kEnd;
      if (is_contained) f(TileRange<TileList, kFirst, kEnd>{});
      return is_contained;
    }
  }
};

// The code of a TileRange.
template <
    bool kIsHalf, class Weights, class Epilogue, class Tiles,
    u32 kKind = Tiles::kFirst.is_swapped + Tiles::kFirst.is_wide()>
struct TilesOf : RowsTiles<kIsHalf, Weights, Epilogue, Tiles> {};
template <bool kIsHalf, class Weights, class Epilogue, class Tiles>
struct TilesOf<kIsHalf, Weights, Epilogue, Tiles, 1>
    : SwappedTiles<kIsHalf, Weights, Epilogue, Tiles> {};
template <bool kIsHalf, class Weights, class Epilogue, class Tiles>
struct TilesOf<kIsHalf, Weights, Epilogue, Tiles, 2>
    : WideTiles<kIsHalf, Weights, Epilogue, Tiles> {};

// All tile shapes of a program with one epilogue. kHasStoreWarp: a warp notifies once both warpgroups
// have stored a tile, while they multiply the next one.
template <bool kIsHalf, class Weights, class Epilogue, bool kHasStoreWarp, u32... kTiles>
struct TileFamily {
  u32 control, buffer;
  static constexpr u32 kControlBytes = kHasStoreWarp ? 24 : 0;
  // round: the number of tiles.
  struct Counters {
    u32 round;
  };
  // mbarriers. `stored`: a warpgroup has stored its part of a tile. `seen`: the store warp has waited
  // for both parts.
  ETC_DEVICE u32 stored(u32 wg) const { return control + 8 * wg; }
  ETC_DEVICE u32 seen() const { return control + 16; }
  ETC_DEVICE void init() const {
    if constexpr (kHasStoreWarp) {
      ptx::mbarrier_init(seen(), 1);
      for (u32 wg = 0; wg < 2; ++wg) ptx::mbarrier_init(stored(wg), 128);
    }
  }

  template <u32 kVariants, class Program>
  ETC_DEVICE bool compute(
      const Run<Program>& run, StageReader<Program>& stages, const Work& work,
      Counters& counters) const {
    static_assert(2 * kHalfBuffer <= Program::kBufferBytes);
    const u32 variant = __shfl_sync(~0u, kVariants & work.variant, 0);
    bool is_going = true;
    const u32 at_shape = work.data + 4 * Epilogue::kWords;
    TileList<kTiles...>::with_alike(ptx::load_shared(at_shape) & 255, [&](auto tiles) ETC_INLINE {
      is_going = TilesOf<kIsHalf, Weights, Epilogue, decltype(tiles)>{{buffer}}
                  .template compute<kVariants>(
                      run, stages, work.size, at_shape, work.data, variant);
    });
    if constexpr (kHasStoreWarp) {
      // After an abort the store warp waits for no tile.
      if (is_going) wait_mbarrier(run, seen(), ~counters.round++ & 1);
      if (is_going) ptx::mbarrier_arrive(stored(ptx::thread() >> 7));
    }
    return is_going;
  }

  static constexpr u32 kMostStageBytes = [] {
    u32 most = 0;
    ((most = maximum(most, TileShape::of(kTiles).template bytes<Weights::kRowBytes>())), ...);
    return most;
  }();
};

// The weights of a call, or both of its operands.
template <class Call, int kScaleBits = Call::kScaleBits>
struct WeightsOf {
  using Type = PlainWeights<bool(Call::kWeightIsKN)>;
};
template <class Call, class Element, bool kAreCodes = bool(Call::kQuantizes)>
struct ScaledWeightsOf {
  using Type = ScaledWeights<u32(Call::kScaleShift), bool(Call::kScaleHasBlocks), Element>;
};
template <class Call, class Element>
struct ScaledWeightsOf<Call, Element, true> {
  using Type = ScaledOperands<Element>;
};
template <class Call>
struct WeightsOf<Call, 32> : ScaledWeightsOf<Call, float> {};
template <class Call>
struct WeightsOf<Call, 16> : ScaledWeightsOf<Call, bf16> {};

// TileFamily of the first n shapes of a call.
template <class Call, int n, u32... kTiles>
struct FamilyOf : FamilyOf<Call, n - 1, u32(Call::kTiles[n - 1]), kTiles...> {};
template <class Call, u32... kTiles>
struct FamilyOf<Call, 0, kTiles...> {
  using Family = TileFamily<
      bool(Call::kIsHalf), typename WeightsOf<Call>::Type, typename EpilogueOf<Call>::Type,
      has_role<Call>(kStoreRole), kTiles...>;
};

template <class Call>
struct tile_matmul : Roles {
  using Compute = typename FamilyOf<Call, sizeof(Call::kTiles) / sizeof(int)>::Family;
  using Epilogue = typename EpilogueOf<Call>::Type;
  using WeightKind = typename WeightsOf<Call>::Type;
  static constexpr u32 kBoxDepth = WeightKind::kBoxDepth;
  // Of tiles with as many rows of x as their tasks: rows of the boxes of x.
  static constexpr u32 kLeast = 16, kLarge = 64;
  // Weights that other tasks with the same expert read, too, are not the first to leave L2.
  static constexpr CachePolicy kKeeps = Call::kOwnRows ? kEvictNormal : kEvictFirst;
  static constexpr bool kGathers = has_role<Call>(kGatherRole);
  using Gathered = GatheredRows<Call, Call::kReads - 1, WeightKind::kRowBytes>;
  // Then the shape, the place of scales, and that of biases.
  static constexpr u32 kDataWords =
      Epilogue::kWords + 1 + WeightKind::kWords + Call::kIsBiased * BiasPlace::kWords;
  static constexpr u32 kVariant = Call::kGated * kGatedTile | Call::kIsPart * kPartOfTile |
                                  kGathers * kGatheredTile | Call::kIsBiased * kBiasedTile |
                                  has_role<Call>(kStoreRole) * kLeftTile;
  static constexpr u32 kUniformStageBytes = Call::kStageBytes;
  static constexpr bool kWritesPeers = Epilogue::kOnlyRounds && Call::kWrites > 1;

  template <class Program>
  ETC_DEVICE static void prefetch_maps(const Run<Program>& run) {
    const auto c = Call::at(run.g, 0);
    if constexpr (!kGathers) ptx::prefetch_map(Call::template operand<0>(run.g, c).box());
    ptx::prefetch_map(Call::template operand<1>(run.g, c).box());
    if constexpr (Call::kGated) ptx::prefetch_map(Call::template operand<2>(run.g, c).box());
  }

  // The number of stages; 0 for a task with nothing to write.
  template <class Program>
  ETC_DEVICE static u32 size(const Run<Program>& run, const typename Call::Coord& c) {
    if constexpr (Call::kLoads || Call::kMayHaveNoRows) {
      const auto y = last_axes<2>(Call::template operand<Call::kReads>(run.g, c));
      if (y.size[0] <= 0 || y.size[1] <= 0) return 0;
    }
    const u32 depth = TileShape::of(packed_shape(run)).depth;  // 1, 2 or 4
    const u32 logarithm = depth >> 1;
    return (num_steps<Call, kBoxDepth>(run, c) + depth - 1) >> logarithm;
  }
  template <class Program>
  ETC_DEVICE static RingStages stages(const Run<Program>& run, u32 size) {
    return {size, bytes_of<Program>(TileShape::of(packed_shape(run)))};
  }

  template <class Program>
  ETC_DEVICE static void data(
      const Run<Program>& run, const typename Call::Coord& c, u32,
      u32 (&words)[kDataWords]) {
    const TileShape shape = shape_of(run, c);
    words[Epilogue::kWords] = packed_shape(run);
    if constexpr (Call::kOwnRows) {
      words[Epilogue::kWords] = TileShape::with_loaded(packed_shape(run), shape.num_loaded);
    }
    if constexpr (WeightKind::kIsScaled) scales(run, c).write(words + Epilogue::kWords + 1);
    if constexpr (WeightKind::kAreCodes) both_scales(run, c).write(words + Epilogue::kWords + 1);
    if constexpr (Call::kIsBiased) {
      biases(run, c).write(words + Epilogue::kWords + 1 + WeightKind::kWords);
    }
    if constexpr (Call::kIsPart) {
      const u64 address = u64(last_axes<1>(Call::template operand<Call::kReads>(run.g, c)).at(0));
      words[0] = u32(address), words[1] = u32(address >> 32);
      return;
    }
    const auto y = last_axes<2>(Call::template operand<Call::kReads>(run.g, c));
    const i32 wide = i32(Call::kGated ? shape.columns / 2 : shape.columns);
    const i32 rows = minimum(maximum(y.size[0], 0), i32(shape.num_loaded));
    const i32 columns = minimum(maximum(y.size[1], 0), wide);
    if constexpr (Epilogue::kOnlyRounds) {
      const u64 address = u64(y.at(0, 0));
      const u32 row_bytes = u32(y.stride[0]) * 2;
      typename Epilogue::Place{
          address, row_bytes, rows, columns, peers_of<Call>(run, c)}
          .write(words);
    } else {
      Epilogue::write({rows, columns}, c, words);
    }
  }

  // Begins a stage of a task by loading its boxes of w.
  template <class Program>
  ETC_DEVICE static bool load_ahead(
      const Run<Program>& run, StageLoader<Program>& loader, const typename Call::Coord& c,
      u32, u32 stage_idx) {
    const TileShape shape = shape_of(run, c);
    Stage stage;
    if (!begin(run, loader, shape, few_rows(run, c), stage)) return false;
    load_weights(stage, shape, Weights(run, c), stage_idx);
    return true;
  }

  // Begins two stages, if they fit. NOTE: while these are read, the code of load() is fetched.
  template <class Program, class Ready>
  ETC_DEVICE static void load_first(
      const Run<Program>& run, StageLoader<Program>& loader, const typename Call::Coord& c,
      Ready ready) {
    constexpr u32 kFirstStages = 2 * Compute::kMostStageBytes <= StageRing<Program>::kBytes ? 2 : 1;
    if constexpr (kGathers) return ready();
    const TileShape shape = shape_of(run, c);
    const u32 count = before_start(size(run, c));
    const Weights w(run, c);
    const Rows x(run, c);
    ready();
#pragma unroll 1
    for (u32 n = 0; n < minimum(count, kFirstStages); ++n) {
      const Stage stage = loader.begin_first(bytes_of<Program>(shape), loaded_bytes_of(shape));
      load_weights(stage, shape, w, n);
      load_x(stage, shape, x, n);
    }
  }

  template <class Program, class Publish, class Loaded>
  ETC_DEVICE static bool load(
      const Run<Program>& run, StageLoader<Program>& loader, const typename Call::Coord& c,
      u32 size, Publish publish, Loaded loaded) {
    return load(run, loader, c, size, publish, [] { return true; }, loaded);
  }
  template <class Program, class Publish, class Started, class Loaded>
  ETC_DEVICE static bool load(
      const Run<Program>& run, StageLoader<Program>& loader, const typename Call::Coord& c,
      u32 size, Publish publish, Started started, Loaded loaded) {
    const u32 before = before_start(size);
    const TileShape shape = shape_of(run, c);
    const Rows x(run, c);
    const Weights w(run, c);
    // NOTE: before the loop: otherwise the number of rows is loaded for each stage.
    const u32 few = few_rows(run, c), bytes = bytes_of<Program>(shape);
    static_assert(Compute::kMostStageBytes <= StageRing<Program>::kBytes);
    u32 stage_idx = 0;
    publish();
    if constexpr (kLoadsEarly<Program> && kLoadsAtOnce<Call>) stage_idx = loader.take_first(bytes);
    // Of a stage that has w.
    const auto finish_stage = [&](const Stage& stage, u32 n) ETC_INLINE {
      load_x(stage, shape, x, n);
      loaded(n + 1);
    };
    if constexpr (StageLoader<Program>::kHasLaps && !kGathers) {
      if constexpr (Call::kLoadsAhead) {
#pragma unroll 1  // unrolled, it adds 300 to 400 instructions to each call
        for (; stage_idx < before && loader.is_begun(); ++stage_idx) {
          finish_stage(loader.next_begun(bytes), stage_idx);
        }
      }
      if (loader.is_in_laps(bytes)) {
        const u32 expected = loaded_bytes_of(shape), first = stage_idx;
        stage_idx = before;
        const auto load_next = [&](const Stage& stage, u32 i) ETC_INLINE {
          load_weights(stage, shape, w, first + i);
          finish_stage(stage, first + i);
        };
        if (!loader.begin_in_laps(run, bytes, expected, before - first, load_next)) return false;
      }
    }
#pragma unroll 1
    for (; stage_idx < size; ++stage_idx) {
      if (kWritesPeers && stage_idx == before && !started()) return false;
      Stage stage;
      // NOTE: by the same code as the other stages, see worker/ready/pending.cuh.
      const bool is_begun = Call::kLoadsAhead && loader.is_begun();
      if (is_begun) {
        stage = loader.next_begun(bytes);
      } else if (!begin(run, loader, shape, few, stage)) {
        return false;
      }
      if (!is_begun) load_weights(stage, shape, w, stage_idx);
      finish_stage(stage, stage_idx);
    }
    return true;
  }

  template <class Program>
  ETC_DEVICE static bool gather(
      const Run<Program>& run, StageGatherer<Program>& stages, const typename Call::Coord& c,
      u32 size) {
    if (size == 0) return true;
    const TileShape shape = shape_of(run, c);
    return Gathered::gather(run, stages, c, {size, bytes_of<Program>(shape)}, shape);
  }

  // The store warp notifies once the tile is in memory.
  template <class Program>
  ETC_DEVICE static bool store(
      const Run<Program>& run, const Compute& matmul, const typename Call::Coord& c, u32 size,
      typename Compute::Counters& counters, u32& entered, Waiter who) {
    if (size > 0) {
      const u32 parity = counters.round++ & 1;
      bool is_stored = wait_mbarrier(run, matmul.stored(0), parity);
      is_stored = is_stored && wait_mbarrier(run, matmul.stored(1), parity);
      if (!__all_sync(~0u, is_stored)) return false;
      if (ptx::lane() == 0) ptx::mbarrier_arrive(matmul.seen());
    }
    return notify_own_rank<Call>(run, c, entered, who);
  }

 private:
  // The stages that are loaded before peers have started: all but the last one, if the tile is
  // stored on peers.
  ETC_DEVICE static constexpr u32 before_start(u32 size) {
    return size - u32(kWritesPeers && size > 0);
  }
  // The bytes of a stage in the ring.
  template <class Program>
  ETC_DEVICE static constexpr u32 bytes_of(const TileShape& shape) {
    if constexpr (StageRing<Program>::kUniform > 0) return StageRing<Program>::kUniform;
    return shape.template bytes<WeightKind::kRowBytes>();
  }
  // Of a task that gathers rows, those that bulk copies load.
  template <class Program>
  ETC_DEVICE static u32 few_rows(const Run<Program>& run, const typename Call::Coord& c) {
    if constexpr (!kGathers) return 0;
    else return Gathered::few(own_rows(run, c));
  }
  // Begins the next stage of a task.
  template <class Program>
  ETC_DEVICE static bool begin(
      const Run<Program>& run, StageLoader<Program>& loader, const TileShape& shape, u32 few,
      Stage& stage) {
    const u32 bytes = bytes_of<Program>(shape);
    if constexpr (!kGathers) return loader.begin(run, bytes, loaded_bytes_of(shape), false, stage);
    const u32 expected = shape.depth * (box_w(shape) + few * 128);
    return loader.begin(run, bytes, expected, few == 0, stage);
  }
  ETC_DEVICE static constexpr u32 loaded_bytes_of(const TileShape& shape) {
    return shape.template loaded_bytes<WeightKind::kRowBytes>();
  }
  ETC_DEVICE static constexpr u32 box_w(const TileShape& shape) {
    return shape.template box_w<WeightKind::kRowBytes>();
  }
  // The place of the scales, the operands after the weights.
  template <class Program>
  ETC_DEVICE static ScalePlace scales(const Run<Program>& run, const typename Call::Coord& c) {
    constexpr int kFirst = 1 + Call::kWeights;
    const auto w = last_axes<2>(Call::template operand<1>(run.g, c));
    const auto gate = last_axes<2>(Call::template operand<kFirst>(run.g, c));
    const auto up = last_axes<2>(Call::template operand<kFirst + Call::kGated>(run.g, c));
    const auto up_rows = last_axes<2>(Call::template operand<1 + Call::kGated>(run.g, c));
    const u32 pitch = u32(gate.stride[0]) * sizeof(*gate.base);
    const u32 num_blocks = (u32(w.size[1]) + kBlockDepth - 1) / kBlockDepth;
    return {u64(gate.at(0, 0)), u64(up.at(0, 0)), w.start[0], w.start[0] + w.size[0],
            up_rows.start[0] - w.start[0], pitch, num_blocks};
  }

  // The same if x is scaled, too: then its scales follow those of w.
  template <class Program>
  ETC_DEVICE static OperandScales both_scales(
      const Run<Program>& run, const typename Call::Coord& c) {
    constexpr int kFirst = 1 + Call::kWeights;
    const auto x = last_axes<2>(Call::template operand<0>(run.g, c));
    const auto w = last_axes<2>(Call::template operand<1>(run.g, c));
    const auto of_w = last_axes<2>(Call::template operand<kFirst>(run.g, c));
    const auto of_up = last_axes<2>(Call::template operand<kFirst + Call::kGated>(run.g, c));
    const auto of_x = last_axes<2>(Call::template operand<kFirst + Call::kWeights>(run.g, c));
    const i32 of_block = w.start[0] & i32(kBlockDepth - 1), first = i32(kBlockDepth) - of_block;
    const u32 next = first < w.size[0] ? u32(of_w.stride[0]) * sizeof(*of_w.base) : 0;
    const i32 row = w.start[0] / i32(kBlockDepth);
    return {u64(of_x.at(0, 0)), u64(of_w.at(row, 0)), u64(of_up.at(row, 0)),
            u32(of_x.stride[0]) * 4, next, x.size[0], first,
            (u32(x.size[1]) + kBlockDepth - 1) / kBlockDepth};
  }

  template <class Program>
  ETC_DEVICE static u32 packed_shape(const Run<Program>& run) {
    return u32(Call::number_packed_tile(run.g));
  }
  template <class Program>
  ETC_DEVICE static u32 own_rows(const Run<Program>& run, const typename Call::Coord& c) {
    return u32(last_axes<2>(Call::template operand<Call::kReads>(run.g, c)).size[0]);
  }
  // The shape of a task, with its own number of rows if that may differ between tasks.
  template <class Program>
  ETC_DEVICE static TileShape shape_of(const Run<Program>& run, const typename Call::Coord& c) {
    TileShape shape = TileShape::of(packed_shape(run));
    if constexpr (Call::kOwnRows) {
      shape.num_loaded = minimum(shape.num_loaded, (own_rows(run, c) + kLeast - 1) / kLeast * kLeast);
    }
    return shape;
  }
  // The addresses of the biases, the operands after the weights and their scales.
  template <class Program>
  ETC_DEVICE static BiasPlace biases(const Run<Program>& run, const typename Call::Coord& c) {
    constexpr int kFirst = 1 + Call::kWeights * (WeightKind::kIsScaled ? 2 : 1);
    const auto gate = last_axes<1>(Call::template operand<kFirst>(run.g, c));
    const auto up = last_axes<1>(Call::template operand<kFirst + Call::kGated>(run.g, c));
    return {u64(gate.at(0)), u64(up.at(0))};
  }
  // Rows of x: a box, and a larger one of tiles that have as many rows as their tasks.
  struct Rows {
    Box first{}, large{};

    template <class Program>
    ETC_DEVICE Rows(const Run<Program>& run, const typename Call::Coord& c) {
      if constexpr (kGathers) return;
      const auto x = Call::template operand<0>(run.g, c);
      first = x.box();
      if constexpr (Call::kOwnRows) large = x.large_box();
    }
  };
  // The first boxes of the weights: of one matrix, or of gate and up.
  struct Weights {
    Box first, up;

    template <class Program>
    ETC_DEVICE Weights(const Run<Program>& run, const typename Call::Coord& c)
        : first(Call::template operand<1>(run.g, c).box()), up(first) {
      if constexpr (Call::kGated) up = Call::template operand<2>(run.g, c).box();
    }
  };

  ETC_DEVICE static void load_x(
      const Stage& stage, const TileShape& shape, const Rows& x, u32 stage_idx) {
    if constexpr (kGathers) return;
    const i32 column = x.first.x + i32(stage_idx * shape.depth * kBoxDepth);
    const u32 target = stage.at + shape.depth * box_w(shape);
    if constexpr (Call::kOwnRows) {
      for (u32 row = 0; row < shape.num_loaded;) {
        const bool is_large = row + kLarge <= shape.num_loaded;
        const Box& first = is_large ? x.large : x.first;
        const Box at_row{first.map, column, first.y + i32(row), first.z};
        each_box(shape, at_row, [&](u32 box, const Box& part) {
          ptx::load_box(target + box * shape.box_x() + row * 128, part, stage.full);
        });
        row += is_large ? kLarge : kLeast;
      }
      return;
    }
    const Box first{x.first.map, column, x.first.y, x.first.z};
    each_box(shape, first, [&](u32 box, const Box& part) {
      ptx::load_box(target + box * shape.box_x(), part, stage.full, kEvictLast);
    });
  }
  ETC_DEVICE static void load_weights(
      const Stage& stage, const TileShape& shape, const Weights& w, u32 stage_idx) {
    const i32 k = i32(stage_idx * shape.depth * kBoxDepth);
    if constexpr (WeightKind::kIsScaled) return load_codes(stage, shape, w, k);
    if constexpr (Call::kWeightIsKN) {
      static_assert(!Call::kGated);
      return load_chunks(stage, shape, {w.first.map, w.first.x, w.first.y + k, w.first.z});
    }
    const Box first{w.first.map, w.first.x + k, w.first.y, w.first.z};
    const u32 half_box = box_w(shape) / 2;
    each_box(shape, first, [&](u32 box, const Box& part) {
      ptx::load_box(stage.at + box * box_w(shape), part, stage.full, kKeeps);
    });
    if constexpr (Call::kGated) {
      const Box up{w.up.map, w.up.x + k, w.up.y, w.up.z};
      each_box(shape, up, [&](u32 box, const Box& part) {
        const u32 target = stage.at + half_box + box * box_w(shape);
        ptx::load_box(target, part, stage.full, kKeeps);
      });
    }
  }

  // Codes, from k on: a box has a block of them.
  ETC_DEVICE static void load_codes(
      const Stage& stage, const TileShape& shape, const Weights& w, i32 k) {
    const u32 block_bytes = shape.columns * kBlockDepth;
    const auto load = [&](u32 block, const Box& first, u32 target) ETC_INLINE {
      const Box part{first.map, first.x + k + i32(block * kBlockDepth), first.y, first.z};
      ptx::load_box(stage.at + block * block_bytes + target, part, stage.full, kKeeps);
    };
    const auto load_block = [&](u32 block) ETC_INLINE {
      load(block, w.first, 0);
      if constexpr (Call::kGated) load(block, w.up, block_bytes / 2);
    };
    load_block(0);
    if (shape.depth > kBlockBoxes) load_block(1);
  }

  // Weights [k, n], from box `first` on: copies of 64 k by 64 columns.
  ETC_DEVICE static void load_chunks(
      const Stage& stage, const TileShape& shape, const Box& first) {
    each_number(shape, [&](u32 box) {
      const u32 target = stage.at + box * box_w(shape);
      const i32 k = first.y + i32(box * kStageDepth);
#pragma unroll 1
      for (u32 n = 0; n < box_w(shape); n += kChunkBytes) {
        const Box part{first.map, first.x + i32(n / 128), k, first.z};
        ptx::load_box(target + n, part, stage.full, kKeeps);
      }
    });
  }

  // Calls f(box, part) for the boxes of a stage, which are adjacent along k.
  // NOTE: unrolled: memory throughput is higher if adjacent boxes are requested together.
  template <class F>
  ETC_DEVICE static void each_box(const TileShape& shape, const Box& first, F f) {
    each_number(shape, [&](u32 box) ETC_INLINE {
      f(box, Box{first.map, first.x + i32(box * kBoxDepth), first.y, first.z});
    });
  }
  template <class F>
  ETC_DEVICE static void each_number(const TileShape& shape, F f) {
    f(0);
    if (shape.depth == 1) return;
    f(1);
    if (shape.depth == 2) return;
    f(2);
    f(3);
  }
};

}  // namespace etc
