// Dense matrix multiplication y = x @ w.T on tiles of many shapes, by clusters of two workers; or
// gated: silu(x @ gate.T) * (x @ up.T), where half of a tile's columns are rows of gate, and the
// same rows of up follow them.
//
// A program has a list of shapes, of which each launch chooses one. A worker has `rows` rows of x and
// `columns` rows of w. The pair splits the columns of a tile, or its rows, in which case each worker
// loads half of w's rows for both, or k, in which case each adds the other's sums to its own for half
// of the rows of x. One thread loads stages of `depth` boxes of 64 elements of k; two warpgroups
// multiply, and store the tile themselves: through shared memory, so that whole lines are written.
//
// SwappedTile: the rows of w are the rows of the tensor cores' tile and those of x its columns, of
// which any multiple of 8 is possible: few rows of x are multiplied with little padding. Of 64 rows
// of w, the warpgroups take turns along k, and the second one's sums are added to the first one's; of
// 128, each has 64.
// RowsTile: 128 rows of x, 64 for each warpgroup, and any multiple of 8 rows of w, so that the number
// of tiles can be made to fit the workers.
#pragma once
#include "functions/mainloop.cuh"
#include "ptx/wgmma_columns.cuh"

namespace etc {

enum TileSplit : u32 { kSplitColumns, kSplitRows, kSplitK };

// A shape as the host packs it, with its number among those of the program; sizes of a worker.
struct TileShape {
  u32 number, split, is_swapped, depth, rows, columns;

  ETC_DEVICE static constexpr TileShape of(u32 packed) {
    return {packed & 63,         packed >> 6 & 3,           packed >> 8 & 1,
            packed >> 9 & 7,     (packed >> 12 & 63) * 8,   (packed >> 18 & 63) * 8};
  }
  ETC_DEVICE constexpr u32 box_x() const { return rows * 128; }
  ETC_DEVICE constexpr u32 box_w() const { return columns * 128; }
  // A stage: its boxes of w, then those of x.
  ETC_DEVICE constexpr u32 bytes() const { return depth * (box_x() + box_w()); }
};

// The size of a task in its work item.
struct TileSize {
  u32 stages, number;

  ETC_DEVICE u32 packed() const { return stages | number << 24; }
  ETC_DEVICE static TileSize of(u32 v) { return {v & 0xffffffu, v >> 24}; }
};

// Where a worker's part of a tile lies in y: the words of a work item.
struct TilePlace {
  static constexpr int kWords = 4;
  u64 at;
  u32 row_bytes;
  i32 rows, columns;  // clipped at the edges of y

  ETC_DEVICE void write(u32 (&words)[kWords]) const {
    words[0] = u32(at), words[1] = u32(at >> 32), words[2] = row_bytes;
    words[3] = u32(rows) | u32(columns) << 16;
  }
  ETC_DEVICE static TilePlace read(u32 shared) {
    const uint4 v = ptx::load_shared16(shared);
    return {u64(v.x) | u64(v.y) << 32, v.z, i32(v.w & 0xffffu), i32(v.w >> 16)};
  }
};

// A thread's four sums of an eight of columns j, through shared memory.
template <u32 kCount>
ETC_DEVICE void store_four(const float (&d)[kCount], u32 j, u32 shared) {
  ptx::store_shared16(
      shared, {__float_as_uint(d[4 * j]), __float_as_uint(d[4 * j + 1]),
               __float_as_uint(d[4 * j + 2]), __float_as_uint(d[4 * j + 3])});
}
// Calls f(sum, other) for each of them, with those of another thread.
template <u32 kCount, class F>
ETC_DEVICE void combine_four(float (&d)[kCount], u32 j, u32 shared, F f) {
  const uint4 v = ptx::load_shared16(shared);
  f(d[4 * j], __uint_as_float(v.x)), f(d[4 * j + 1], __uint_as_float(v.y));
  f(d[4 * j + 2], __uint_as_float(v.z)), f(d[4 * j + 3], __uint_as_float(v.w));
}

// The two workers of a pair send each other sums.
struct PairExchange {
  u32 control;

  // `arrived`: the other worker's sums for the own rows; `ready`: it can receive those of its rows.
  ETC_DEVICE u32 arrived() const { return control; }
  ETC_DEVICE u32 ready() const { return control + 8; }
  ETC_DEVICE void init() const {
    ptx::mbarrier_init(arrived(), 1);
    ptx::mbarrier_init(ready(), 1);
  }

  // The eights of rows, of kEights, that worker `half` of the pair adds begin here.
  template <u32 kEights>
  ETC_DEVICE static u32 first(u32 half) {
    return (half * kEights + 1) / 2;
  }

  // One thread, when a task begins: nothing uses the own buffer, and the other worker may send.
  template <u32 kEights>
  ETC_DEVICE void begin() const {
    const u32 half = blockIdx.x & 1;
    const u32 received = first<kEights>(half + 1) - first<kEights>(half);
    if (received == 0) return;
    ptx::mbarrier_arrive_expect(arrived(), received * 2048);
    ptx::mbarrier_arrive_cluster_release(ready(), half ^ 1);
  }

  // The first warpgroup of a worker: adds the other's sums, to be found at `sums`, for the own eights.
  // `n` counts these calls. True if the program was aborted.
  template <u32 kEights, class Program>
  ETC_DEVICE bool add(
      const Run<Program>& run, float (&d)[kEights * 4], u32 sums, u32 n, bool lost) const {
    const u32 half = blockIdx.x & 1, thread = ptx::thread();
    const u32 first = PairExchange::first<kEights>(half);
    const u32 end = PairExchange::first<kEights>(half + 1);
    const bool receives = first < end, sends = end - first < kEights;
    if (!lost && sends) lost = !wait_mbarrier<true>(run, ready(), n & 1);
    if (ptx::named_barrier_any<128>(2, lost)) return true;
    sums += thread * 16;
    const u32 place = half == 0 ? end : 0;  // of the other worker's first eight
#pragma unroll
    for (u32 j = 0; j < kEights; ++j) {
      if (j >= first && j < end) continue;
#pragma unroll
      for (u32 i = 0; i < 4; ++i) {
        const u32 to = sums + (j - place) * 2048 + 4 * i;
        ptx::store_async_cluster(to, __float_as_uint(d[4 * j + i]), arrived(), half ^ 1);
      }
    }
    if (receives) lost = !wait_mbarrier(run, arrived(), n & 1);
    const auto add = [](float& sum, float other) { sum += other; };
#pragma unroll
    for (u32 j = 0; j < kEights; ++j) {
      if (j >= first && j < end) combine_four(d, j, sums + (j - first) * 2048, add);
    }
    return ptx::named_barrier_any<128>(2, lost);
  }
};

// The mainloop of a warpgroup, which multiplies every kStep-th box of a stage; w and x: descriptors of
// its first boxes in the ring's first stage. Returns whether a wait was given up.
template <bool kIsHalf, u32 kPacked, u32 kStep, u32 kCount, class Program>
ETC_DEVICE bool multiply_boxes(
    const Run<Program>& run, StageReader<Program>& stages, u32 count, u32 w, u32 x,
    float (&d)[kCount]) {
  constexpr TileShape kShape = TileShape::of(kPacked);
#pragma unroll
  for (float& sum : d) sum = 0;
  const auto multiply = [&](u32 begin, u32) {
#pragma unroll
    for (u32 box = 0; box < kShape.depth; box += kStep) {
      const u32 at_w = w + (begin + box * kShape.box_w()) / 16;
      const u32 at_x = x + (begin + box * kShape.box_x()) / 16;
#pragma unroll
      for (u32 q = 0; q < 4; ++q) {
        const u64 rows = ptx::matrix_descriptor((kShape.is_swapped ? at_w : at_x) + 2 * q);
        const u64 columns = ptx::matrix_descriptor((kShape.is_swapped ? at_x : at_w) + 2 * q);
        ptx::wgmma_columns<kIsHalf, 2 * kCount>(d, rows, columns, 1);
      }
    }
  };
  const bool lost = multiply_stages<kShape.bytes()>(run, stages, count, false, multiply);
#pragma unroll
  for (float& sum : d) ptx::keep_order(sum);
  return lost;
}

// Half of the buffer: what a warpgroup stores. Where the warpgroups take turns, the first half
// receives the sums of the second one, and then what is stored; the second half, those of the other
// worker. All compute threads meet after a task: the buffer is free for the next one.
constexpr u32 kHalfBuffer = 8192;

// Up to 64 rows of x; 64 or 128 rows of w.
template <bool kIsHalf, u32 kPacked>
struct SwappedTile {
  static constexpr TileShape kShape = TileShape::of(kPacked);
  static constexpr u32 kRows = kShape.rows, kDepth = kShape.depth, kEights = kRows / 8;
  static constexpr u32 kBoxX = kShape.box_x(), kBoxW = kShape.box_w();
  static constexpr bool kTakesTurns = kShape.columns == 64;  // the warpgroups, along k
  static constexpr bool kExchanges = kShape.split == kSplitK;
  static_assert(kTakesTurns || (kShape.columns == 128 && !kExchanges));

  u32 control, buffer;

  // The 256 compute threads; `exchanged` counts tiles of which the pair split k. Of a gated tile,
  // the first half of the weights' rows are those of gate.
  template <bool kMayBeGated, class Program>
  ETC_DEVICE bool compute(
      const Run<Program>& run, StageReader<Program>& stages, u32 count, u32 place, bool is_gated,
      u32& exchanged) const {
    const u32 wg = __shfl_sync(~0u, ptx::thread() >> 7, 0);
    const PairExchange pair{control};
    if constexpr (kExchanges) {
      if (ptx::thread() == 0) pair.begin<kEights>();
    }
    // NOTE: kept warp-uniform, so that descriptors stay in uniform registers.
    const u32 base = stages.descriptor_base() | 0x10000u;
    const u32 w0 = __shfl_sync(~0u, base + wg * (kTakesTurns ? kBoxW : 64 * 128) / 16, 0);
    const u32 first_x = kDepth * kBoxW + (kTakesTurns ? wg * kBoxX : 0);
    const u32 x0 = __shfl_sync(~0u, base + first_x / 16, 0);
    float d[kRows / 2];
    constexpr u32 kStep = kTakesTurns ? 2 : 1;
    bool lost = multiply_boxes<kIsHalf, kPacked, kStep>(run, stages, count, w0, x0, d);
    if constexpr (kTakesTurns) {
      lost = combine(d, wg, lost, [](float& sum, float other) { sum += other; });
      if (wg == 0) {
        u32 first = 0, end = kEights;
        if constexpr (kExchanges) {
          lost = pair.add<kEights>(run, d, buffer + kHalfBuffer, exchanged, lost);
          first = pair.first<kEights>(blockIdx.x & 1);
          end = pair.first<kEights>((blockIdx.x & 1) + 1);
        }
        if (kMayBeGated && is_gated) gate_warps(d);
        if (!lost) store(place, d, 0, first, end);
      }
      if constexpr (kExchanges) ++exchanged;
    } else if (kMayBeGated && is_gated) {
      lost = combine(d, wg, lost, [](float& gate, float up) { gate = silu(gate) * up; });
      if (wg == 0 && !lost) store(place, d, 0, 0, kEights);
    } else {
      lost = ptx::named_barrier_any<128>(2 + wg, lost);
      if (!lost) store(place, d, wg, 0, kEights);
    }
    return !lost;
  }

 private:
  // Combines the first warpgroup's sums with the second one's, four eights of rows at a time.
  template <class F>
  ETC_DEVICE bool combine(float (&d)[kRows / 2], u32 wg, bool lost, F f) const {
    const u32 sums = buffer + (ptx::thread() & 127) * 16;
#pragma unroll
    for (u32 first = 0; first < kEights; first += 4) {
      if (first > 0) ptx::named_barrier<256>(1);
      if (wg == 1) {
#pragma unroll
        for (u32 j = first; j < first + 4 && j < kEights; ++j) {
          store_four(d, j, sums + j % 4 * 2048);
        }
      }
      lost = ptx::named_barrier_any<256>(1, lost);
      if (wg == 0) {
#pragma unroll
        for (u32 j = first; j < first + 4 && j < kEights; ++j) {
          combine_four(d, j, sums + j % 4 * 2048, f);
        }
      }
    }
    // The sums have been read: the tile is stored in their place.
    if (wg == 0 && !kExchanges) ptx::named_barrier<128>(2);
    return lost;
  }

  // The first warpgroup: warps 0 and 1 have gate's sums, 2 and 3 up's of the same columns.
  ETC_DEVICE void gate_warps(float (&d)[kRows / 2]) const {
    const u32 thread = ptx::thread() & 127, up = buffer + kHalfBuffer + thread % 64 * 16;
#pragma unroll
    for (u32 j = 0; j < kEights; ++j) {
      if (thread >= 64) store_four(d, j, up + j * 1024);
    }
    ptx::named_barrier<128>(2);  // up's sums are in the buffer
#pragma unroll
    for (u32 j = 0; j < kEights; ++j) {
      const auto gate = [](float& sum, float other) { sum = silu(sum) * other; };
      if (thread < 64) combine_four(d, j, up + j * 1024, gate);
    }
  }

  // A warpgroup's 64 columns of y and eights of rows [first, end), transposed in shared memory into
  // rows of 128 bytes.
  ETC_DEVICE void store(
      u32 place, const float (&d)[kRows / 2], u32 wg, u32 first, u32 end) const {
    const u32 thread = ptx::thread() & 127, lane = thread & 31, warp = thread >> 5;
    const u32 out = buffer + wg * kHalfBuffer;
    const u32 matrix = warp * 2 + (lane >> 3 & 1), in_row = lane & 7;
    const u32 in = out + in_row * 128 + ((matrix ^ in_row) << 4);
#pragma unroll
    for (u32 j = 0; j < kEights; ++j) {
      ptx::store_matrix2_transposed(
          in + j * 1024, pack<kIsHalf>(d[4 * j], d[4 * j + 1]),
          pack<kIsHalf>(d[4 * j + 2], d[4 * j + 3]));
    }
    ptx::named_barrier<128>(2 + wg);
    const TilePlace to = TilePlace::read(place);
    const u32 unit = thread % 8, column = wg * 64 + unit * 8;
#pragma unroll
    for (u32 i = 0; i < (kRows + 15) / 16; ++i) {
      const u32 row = i * 16 + thread / 8;
      if (row >= first * 8 && row < minimum(end * 8, u32(to.rows)) && column < u32(to.columns)) {
        ptx::store16(
            to.at + u64(row) * to.row_bytes + column * 2,
            ptx::load_shared16(out + row * 128 + ((unit ^ (row & 7)) << 4)));
      }
    }
  }
};

// 128 rows of x, 64 for each warpgroup; any multiple of 8 rows of w.
template <bool kIsHalf, u32 kPacked>
struct RowsTile {
  static constexpr TileShape kShape = TileShape::of(kPacked);
  static constexpr u32 kColumns = kShape.columns, kDepth = kShape.depth, kEights = kColumns / 8;
  static constexpr u32 kBoxX = kShape.box_x(), kBoxW = kShape.box_w();
  static_assert(kShape.rows == 128 && kShape.split != kSplitK);

  u32 control, buffer;

  template <bool kMayBeGated, class Program>
  ETC_DEVICE bool compute(
      const Run<Program>& run, StageReader<Program>& stages, u32 count, u32 place, bool is_gated,
      u32&) const {
    const u32 wg = __shfl_sync(~0u, ptx::thread() >> 7, 0);
    const u32 base = stages.descriptor_base() | 0x10000u;
    const u32 w0 = __shfl_sync(~0u, base, 0);
    const u32 x0 = __shfl_sync(~0u, base + (kDepth * kBoxW + wg * 64 * 128) / 16, 0);
    float d[kColumns / 2];
    bool lost = multiply_boxes<kIsHalf, kPacked, 1>(run, stages, count, w0, x0, d);
    if constexpr (kMayBeGated && kColumns % 16 == 0) {
      if (is_gated) {
#pragma unroll
        for (u32 i = 0; i < kColumns / 4; ++i) d[i] = silu(d[i]) * d[i + kColumns / 4];
      }
    }
    lost = ptx::named_barrier_any<128>(2 + wg, lost);
    if (!lost) store(place, d, wg);
    return !lost;
  }

 private:
  // A warp's 16 rows of y, 64 columns at a time, through its own part of the buffer.
  ETC_DEVICE void store(u32 place, const float (&d)[kColumns / 2], u32 wg) const {
    const u32 thread = ptx::thread() & 127, lane = thread & 31, warp = thread >> 5;
    const u32 out = buffer + wg * kHalfBuffer + warp * 2048, in_row = lane & 15;
    const u32 first = wg * 64 + warp * 16, unit = lane % 8;
    const TilePlace to = TilePlace::read(place);
#pragma unroll
    for (u32 g = 0; g < kEights; g += 8) {
      if (g * 8 >= u32(to.columns)) break;
#pragma unroll
      for (u32 j = g; j < g + 8 && j < kEights; ++j) {
        ptx::store_matrix2(
            out + in_row * 128 + (((j - g) ^ (in_row & 7)) << 4),
            pack<kIsHalf>(d[4 * j], d[4 * j + 1]), pack<kIsHalf>(d[4 * j + 2], d[4 * j + 3]));
      }
      __syncwarp();
      const u32 column = (g + unit) * 8;
#pragma unroll
      for (u32 i = 0; i < 4; ++i) {
        const u32 row = i * 4 + lane / 8;
        if (first + row < u32(to.rows) && column < u32(to.columns) && g + unit < kEights) {
          ptx::store16(
              to.at + u64(first + row) * to.row_bytes + column * 2,
              ptx::load_shared16(out + row * 128 + ((unit ^ (row & 7)) << 4)));
        }
      }
      __syncwarp();
    }
  }
};

// The tile of a shape.
template <bool kIsHalf, u32 kPacked, bool kIsSwapped = TileShape::of(kPacked).is_swapped>
struct TileOf : RowsTile<kIsHalf, kPacked> {};
template <bool kIsHalf, u32 kPacked>
struct TileOf<kIsHalf, kPacked, true> : SwappedTile<kIsHalf, kPacked> {};

// All tiles of a program.
template <bool kIsHalf, u32... kTiles>
struct TileFamily {
  u32 control, buffer;
  static constexpr u32 kControlBytes = 16;
  struct Counters {
    u32 exchanged = 0;
  };
  ETC_DEVICE void init() const { PairExchange{control}.init(); }
  // The buffer is used between named barriers of the warps that share it.
  template <class Program>
  ETC_DEVICE bool wait_buffer(const Run<Program>&, const Counters&) const {
    return true;
  }

  template <u32 kVariants, class Program>
  ETC_DEVICE bool compute(
      const Run<Program>& run, StageReader<Program>& stages, const Work& work,
      Counters& counters) const {
    static_assert(2 * kHalfBuffer <= Program::kBufferBytes);
    const bool is_gated = __shfl_sync(~0u, kVariants & work.variant, 0) != 0;
    bool going = true;
    const TileSize size = TileSize::of(work.size);
    const auto try_tile = [&](auto tile) {
      constexpr u32 kPacked = decltype(tile)::value;
      if (size.number != TileShape::of(kPacked).number) return;
      going = TileOf<kIsHalf, kPacked>{{control, buffer}}.template compute<kVariants != 0>(
          run, stages, size.stages, work.data, is_gated, counters.exchanged);
    };
    (try_tile(Number<kTiles>{}), ...);
    return going;
  }

  // The bytes of a stage of tile `number`.
  ETC_DEVICE static u32 stage_bytes(u32 number) {
    u32 bytes = 0;
    ((bytes = number == TileShape::of(kTiles).number ? TileShape::of(kTiles).bytes() : bytes), ...);
    return bytes;
  }
  static constexpr bool kMulticast = (false || ... || (TileShape::of(kTiles).split == kSplitRows));
};

// TileFamily of the first n tiles of a call.
template <class Call, int n, u32... kTiles>
struct FamilyOf : FamilyOf<Call, n - 1, u32(Call::kTiles[n - 1]), kTiles...> {};
template <class Call, u32... kTiles>
struct FamilyOf<Call, 0, kTiles...> {
  using Family = TileFamily<bool(Call::kIsHalf), kTiles...>;
};

template <class Call>
struct tile_matmul : Roles {
  using Compute = typename FamilyOf<Call, sizeof(Call::kTiles) / sizeof(int)>::Family;
  static constexpr u32 kDataWords = TilePlace::kWords;
  static constexpr u32 kVariant = Call::kGated;
  static constexpr bool kMulticast = Compute::kMulticast;
  template <class Program>
  ETC_DEVICE static bool multicasts(const Run<Program>& run) {
    return shape_of(run).split == kSplitRows;
  }
  template <class Program>
  ETC_DEVICE static bool sends(const Run<Program>& run) {
    return shape_of(run).split != kSplitColumns;
  }

  template <class Program>
  ETC_DEVICE static void prefetch_maps(const Run<Program>& run) {
    const auto c = Call::at(run.g, 0);
    ptx::prefetch_map(Call::template box<0>(run.g, c));
    ptx::prefetch_map(Call::template box<1>(run.g, c));
    if constexpr (Call::kGated) ptx::prefetch_map(Call::template box<2>(run.g, c));
  }

  // The stages of a worker.
  template <class Program>
  ETC_DEVICE static u32 size(const Run<Program>& run, const typename Call::Coord& c) {
    const TileShape shape = shape_of(run);
    const u32 depth = shape.depth << u32(shape.split == kSplitK);
    return TileSize{(num_steps<Call>(run, c) + depth - 1) / depth, shape.number}.packed();
  }
  ETC_DEVICE static RingStages stages(u32 size) {
    return {TileSize::of(size).stages, Compute::stage_bytes(TileSize::of(size).number)};
  }

  template <class Program>
  ETC_DEVICE static void data(
      const Run<Program>& run, const typename Call::Coord& c, u32,
      u32 (&words)[TilePlace::kWords]) {
    const TileShape shape = shape_of(run);
    const auto y = Call::template operand<Call::kReads>(run.g, c);
    const i32 wide = i32(Call::kGated ? shape.columns / 2 : shape.columns);
    const i32 row = shape.split == kSplitRows ? half() * i32(shape.rows) : 0;
    const i32 column = shape.split == kSplitColumns ? half() * wide : 0;
    const i32 rows = minimum(maximum(y.size[0] - row, 0), i32(shape.rows));
    const i32 columns = minimum(maximum(y.size[1] - column, 0), wide);
    TilePlace{u64(y.at(row, column)), u32(y.stride[0]) * 2, rows, columns}.write(words);
  }

  // Begins stage n of a task with its boxes of w.
  template <class Program>
  ETC_DEVICE static bool load_ahead(
      const Run<Program>& run, StageLoader<Program>& loader, const typename Call::Coord& c, u32 size,
      u32 n) {
    const TileShape shape = shape_of(run);
    Stage stage;
    if (!loader.begin(run, shape.bytes(), shape.bytes(), false, stage)) return false;
    load_weights(stage, shape, Weights(run, c, shape, size), n);
    return true;
  }

  template <class Program, class Loaded>
  ETC_DEVICE static bool load(
      const Run<Program>& run, StageLoader<Program>& loader, const typename Call::Coord& c, u32 size,
      Loaded loaded) {
    const TileShape shape = shape_of(run);
    Box x = Call::template box<0>(run.g, c);
    const Weights w(run, c, shape, size);
    if (shape.split == kSplitRows) x.y += half() * i32(shape.rows);
    x.x += first_k(shape, size);
    const u32 bytes = shape.bytes(), count = TileSize::of(size).stages;
    for (u32 n = 0; n < count; ++n) {
      Stage stage;
      if (Call::kLoadsAhead && loader.is_begun()) {
        stage = loader.next_begun(bytes);
      } else {
        if (!loader.begin(run, bytes, bytes, false, stage)) return false;
        if constexpr (Call::kLoadsAhead) loader.start_ahead();
        load_weights(stage, shape, w, n);
      }
      const u32 to = stage.at + shape.depth * shape.box_w();
      each_box(shape, x, [&](u32 box, const Box& from) {
        ptx::load_box(to + box * shape.box_x(), from, stage.full, kEvictLast);
      });
      x.x += i32(shape.depth * kStageDepth);
      loaded(n + 1);
    }
    return true;
  }

 private:
  template <class Program>
  ETC_DEVICE static TileShape shape_of(const Run<Program>& run) {
    return TileShape::of(u32(Call::number_packed_tile(run.g)));
  }
  ETC_DEVICE static i32 half() { return i32(blockIdx.x & 1); }
  // Where this worker begins along k.
  ETC_DEVICE static i32 first_k(const TileShape& shape, u32 size) {
    if (shape.split != kSplitK) return 0;
    return half() * i32(TileSize::of(size).stages * shape.depth * kStageDepth);
  }
  // The first boxes of the rows of weights that this worker loads: of gate and up, or of one matrix.
  struct Weights {
    Box first, up;

    template <class Program>
    ETC_DEVICE Weights(
        const Run<Program>& run, const typename Call::Coord& c, const TileShape& shape, u32 size)
        : first(Call::template box<1>(run.g, c)), up(first) {
      const i32 own = shape.split == kSplitColumns ? half() * i32(shape.columns) : 0;
      if constexpr (Call::kGated) {
        up = Call::template box<2>(run.g, c);
        if (shape.split == kSplitRows && half() == 1) first = up;
        first.y += own / 2, up.y += own / 2;
        up.x += first_k(shape, size);
      } else {
        first.y += shape.split == kSplitRows ? half() * i32(shape.columns / 2) : own;
      }
      first.x += first_k(shape, size);
    }
  };

  ETC_DEVICE static void load_weights(
      const Stage& stage, const TileShape& shape, const Weights& w, u32 n) {
    const i32 k = i32(n * shape.depth * kStageDepth);
    const Box first{w.first.map, w.first.x + k, w.first.y, w.first.z};
    const u32 half_box = shape.box_w() / 2;
    if (shape.split == kSplitRows) {
      const u32 to = stage.at + u32(half()) * half_box;
      each_box(shape, first, [&](u32 box, const Box& from) {
        ptx::load_box_multicast(to + box * shape.box_w(), from, stage.full, 3);
      });
      return;
    }
    each_box(shape, first, [&](u32 box, const Box& from) {
      ptx::load_box(stage.at + box * shape.box_w(), from, stage.full, kEvictFirst);
    });
    if constexpr (Call::kGated) {
      const Box up{w.up.map, w.up.x + k, w.up.y, w.up.z};
      each_box(shape, up, [&](u32 box, const Box& from) {
        ptx::load_box(stage.at + half_box + box * shape.box_w(), from, stage.full);
      });
    }
  }

  // The boxes of a stage, neighbours along k.
  // NOTE: unrolled: memory delivers more if neighbours are requested together.
  template <class F>
  ETC_DEVICE static void each_box(const TileShape& shape, const Box& first, F f) {
    constexpr u32 kMostDepth = 4;
#pragma unroll
    for (u32 box = 0; box < kMostDepth; ++box) {
      const Box from{first.map, first.x + i32(box * kStageDepth), first.y, first.z};
      if (box < shape.depth) f(box, from);
    }
  }
};

}  // namespace etc
