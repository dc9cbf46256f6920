// Attention of blocks of rows, which follow each other in a request, to the positions of a paged
// cache: functions/attend_prompt.py describes blocks and warps.
#pragma once
#include "functions/attend_query.cuh"
#include "functions/attend_stages.cuh"
#include "functions/combine_slices.cuh"

namespace etc {

// Operands: those of attend up to the extents, and y. All rows are those of the block.
template <class Call>
struct PromptCall : AttendCall<Call> {
  static constexpr int kY = AttendCall<Call>::kExtents + 1;

  // What the compute threads get to know of a task, as words of its WorkItem.
  struct Words {
    typename Call::Coord c;
    typename AttendCall<Call>::Positions positions;  // that any row attends to
  };
};

// The compute role: each warp has 16 pairs of a row and a head, the M of mma, and multiplies them by
// all positions, its N. Pair n is head n % heads of row n / heads.
template <class Call>
struct PromptCompute : PromptCall<Call> {
  using Of = AttendCall<Call>;
  using Of::kDim, Of::kStage, Of::kRowBytes, Of::kStageBytes;
  using Words = typename PromptCall<Call>::Words;
  static constexpr u32 kControlBytes = 0;
  static constexpr i32 kPairs = 16, kSteps = kDim / 16, kTiles = kDim / 8;
  // Positions of which a thread has scores at once, and their tiles.
  static constexpr i32 kAtOnce = 32, kScores = kAtOnce / 8;
  // Steps of 16 elements of a query that a thread has in registers.
  static constexpr i32 kKept = 4;
  // In the buffer: eight chunks of the queries of each warp, at last those not in registers.
  static constexpr u32 kChunksBytes = 128, kWarpBytes = kPairs * kChunksBytes;
  static constexpr u32 kBytes = 8 * kWarpBytes;
  static_assert(kDim <= 128);  // a thread has no registers for more
  u32 control, buffer;

  struct Counters {};
  ETC_DEVICE void init() const {}

  template <u32 kVariants, class Program>
  ETC_DEVICE bool compute(
      const Run<Program>& run, StageReader<Program>& stages, const Work& work, Counters&) const {
    static_assert(kBytes <= Program::kBufferBytes);
    return Block<Program>(*this, run, stages, work.data).attend();
  }

 private:
  using Positions = typename Of::Positions;
  using Query = AttendQuery<Call>;

  template <class Program>
  struct Block {
    const PromptCompute& role;
    const Run<Program>& run;
    StageReader<Program>& stages;
    const u32 data;          // where the words are
    Positions positions;     // of the block
    Positions limits[2];     // of the lane's pairs: lane / 4 and eight more
    Positions outer, inner;  // that any, and that all, pairs of the warp attend to
    float most[2], sum[2], o[kTiles][4];

    ETC_DEVICE Block(
        const PromptCompute& role_, const Run<Program>& run_, StageReader<Program>& stages_,
        u32 data_)
        : role(role_), run(run_), stages(stages_), data(data_) {}

    // False after an abort, on all threads of the warpgroup.
    ETC_DEVICE bool attend() {
      u32 q[kKept][4];
      begin(q);
      // NOTE: not before, since queries need many registers until they are rotated.
      most[0] = most[1] = minus_infinity();
      sum[0] = sum[1] = 0.0f;
#pragma unroll
      for (auto& tile : o) tile[0] = tile[1] = tile[2] = tile[3] = 0.0f;
      i32 start = positions.first_stage() * kStage;
      bool has_failed = false;
#pragma unroll 1
      while (start < positions.end) {
        u32 address = stages.address(stages.next(kStageBytes));
        has_failed = !stages.wait_full(run);
        if (has_failed) break;
#pragma unroll 1
        for (i32 n = 0; n < kStage / kAtOnce; ++n) {
          const bool is_after = !Call::kHasSpan || start + kAtOnce > outer.begin;
          if (start < outer.end && is_after) add_positions(q, address, start);
          start += kAtOnce, address += kAtOnce * kRowBytes;
        }
        __syncwarp();  // the stage has been read
        stages.release(stages.count() - 1);
      }
      if (ptx::named_barrier_any<128>(2 + ptx::warp() / 4, has_failed)) return false;
      store();
      return true;
    }

   private:
    ETC_DEVICE static u32 lane() { return ptx::lane(); }
    ETC_DEVICE u32 own_address() const { return role.buffer + ptx::warp() * kWarpBytes; }
    ETC_DEVICE static i32 own_pair(i32 n) {
      return i32(ptx::warp()) * kPairs + n * 8 + i32(lane() / 4);
    }
    // NOTE: loaded again at the end, so that they occupy no registers meanwhile.
    ETC_DEVICE Words load_words() const {
      Words words;
#pragma unroll
      for (u32 n = 0; n < sizeof(words) / 4; ++n) {
        reinterpret_cast<u32*>(&words)[n] = ptx::load_shared(data + n * 4);
      }
      return words;
    }
    ETC_DEVICE i32 count_heads(const typename Call::Coord& c) const {
      return Call::template operand<0>(run.g, c).size[1] / kDim;
    }
    ETC_DEVICE i32 count_rows(const typename Call::Coord& c) const {
      return Call::template operand<0>(run.g, c).size[0];
    }

    // The queries of the warp's pairs, and the positions.
    ETC_DEVICE void begin(u32 (&q)[kKept][4]) {
      const Words words = load_words();
      const auto c = words.c;
      positions = words.positions;
      const i32 num_heads = count_heads(c), num_rows = count_rows(c);
      const i32 first_pair = i32(ptx::warp()) * kPairs;
      const auto extents = last_axes<2>(Call::template operand<Of::kExtents>(run.g, c));
      // The last row for pairs that do not exist.
      const auto row_of = [&](i32 pair) ETC_INLINE {
        return minimum(pair / num_heads, num_rows - 1);
      };
      const auto positions_of = [&](i32 pair) ETC_INLINE {
        const uint2 bounds = ptx::load8_l2_if(true, u64(extents.at(row_of(pair))));
        return Positions{i32(bounds.x), i32(bounds.y)};
      };
      const Positions first = positions_of(first_pair);
      const Positions last = positions_of(first_pair + kPairs - 1);
      outer = {first.begin, first_pair < num_rows * num_heads ? last.end : 0};
      inner = {last.begin, first.end};
      const auto heads = Call::template operand<0>(run.g, c);
      const u32 g = lane() / 4;
      // Stores eight chunks of a head, permuted as those of the cache.
      const auto put = [&](i32 n, const uint4& low, const uint4& high) ETC_INLINE {
        const u32 target = own_address() + (u32(n) * 8 + g) * kChunksBytes;
        ptx::store_shared16(target + (lane() % 4 ^ g) * 16, low);
        ptx::store_shared16(target + (lane() % 4 + 4 ^ g) * 16, high);
      };
      typename Query::Own head[2];
#pragma unroll
      for (i32 n = 0; n < 2; ++n) {
        const i32 pair = own_pair(n), element = pair % num_heads * kDim;
        limits[n] = positions_of(pair);
        typename Query::Own bias;
        const bool is_there = limits[n].end > 0;
        head[n].load(u64(heads.at(row_of(pair), element)), i32(lane() % 4), is_there);
        Query::load_bias(run, c, element, is_there, bias);
        Query::apply(head[n], bias, Query::turn(run, c, limits[n].end));
        put(n, head[n].vector[0], head[n].vector[1]);
      }
      __syncwarp();  // the chunks in registers are complete
#pragma unroll
      for (u32 step = 0; step < u32(kKept); ++step) load_query(q[step], step);
      if constexpr (kSteps > kKept) {
        __syncwarp();  // they have been read
#pragma unroll
        for (i32 n = 0; n < 2; ++n) put(n, head[n].vector[2], head[n].vector[3]);
        __syncwarp();  // the others are complete
      }
    }
    // Two of the chunks in the buffer, in the layout of mma.
    ETC_DEVICE void load_query(u32 (&q)[4], u32 step) const {
      const u32 in_eight = lane() % 8, row = lane() / 8 % 2 * 8 + in_eight;
      const u32 source = own_address() + row * kChunksBytes;
      ptx::load_matrix4(q, source + (2 * step + lane() / 16 ^ in_eight) * 16);
    }

    // Online softmax over kAtOnce positions from `start` on, whose keys are at a shared address.
    // Lane g * 4 + c has scores of pairs g and g + 8 for positions 2 c and 2 c + 1 of each tile.
    ETC_DEVICE void add_positions(const u32 (&q)[kKept][4], u32 address, i32 start) {
      float p[kScores][4] = {};
      const u32 in_eight = lane() % 8, key = address + (lane() / 16 * 8 + in_eight) * kRowBytes;
#pragma unroll
      for (u32 step = 0; step < u32(kSteps); ++step) {
        const u32 chunk = (2 * step + lane() / 8 % 2 ^ in_eight) << 4;
        u32 a[4];
        if (step < u32(kKept)) {
#pragma unroll
          for (int i = 0; i < 4; ++i) a[i] = q[step % kKept][i];
        } else {
          load_query(a, step - kKept);
        }
#pragma unroll
        for (u32 n = 0; n < u32(kScores); n += 2) {
          u32 k[4];
          ptx::load_matrix4(k, key + n * 8 * kRowBytes + chunk);
          ptx::mma_16x8x16<Call::kIsHalf>(p[n], a[0], a[1], a[2], a[3], k[0], k[1]);
          ptx::mma_16x8x16<Call::kIsHalf>(p[n + 1], a[0], a[1], a[2], a[3], k[2], k[3]);
        }
      }
      weigh(p, start);
      const i32 begin = positions.begin - start, end = positions.end - start;
      const bool is_whole = (!Call::kHasSpan || begin <= 0) && end >= kAtOnce;
      if (is_whole) {
        add_values(p, address, [](u32 value, i32) ETC_INLINE { return value; });
      } else {
        add_values(p, address, [&](u32 value, i32 first) ETC_INLINE {
          return value & Query::mask(first, begin, end);
        });
      }
    }
    // Adds the weighted values. masked(two elements, of which position, from `start` on).
    template <class Masked>
    ETC_DEVICE void add_values(const float (&p)[kScores][4], u32 address, Masked masked) {
      const u32 in_eight = lane() % 8;
      const u32 value = address + Of::kValues + (lane() / 8 % 2 * 8 + in_eight) * kRowBytes;
#pragma unroll
      for (i32 n = 0; n < kScores; n += 2) {
        u32 a[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          a[i] = pack<Call::kIsHalf>(p[n + i / 2][i % 2 * 2], p[n + i / 2][i % 2 * 2 + 1]);
        }
        const i32 low = n * 8 + i32(lane() % 4) * 2, high = low + 8;
#pragma unroll
        for (u32 step = 0; step < u32(kSteps); ++step) {
          u32 v[4];
          const u32 chunk = (2 * step + lane() / 16 ^ in_eight) << 4;
          ptx::load_matrix4_transposed(v, value + u32(n) * 8 * kRowBytes + chunk);
#pragma unroll
          for (u32 i = 0; i < 2; ++i) {
            ptx::mma_16x8x16<Call::kIsHalf>(
                o[2 * step + i], a[0], a[1], a[2], a[3], masked(v[2 * i], low),
                masked(v[2 * i + 1], high));
          }
        }
      }
    }
    // Makes weights of products of queries and keys, and scales the sums so far.
    ETC_DEVICE void weigh(float (&p)[kScores][4], i32 start) {
      const bool is_after = !Call::kHasSpan || start >= inner.begin;
      const bool is_inside = is_after && start + kAtOnce <= inner.end;
      float here[2] = {minus_infinity(), minus_infinity()};
#pragma unroll
      for (i32 n = 0; n < kScores; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) p[n][i] = Query::capped(p[n][i] * Call::kScale);
      }
      if (!is_inside) {
#pragma unroll
        for (i32 n = 0; n < kScores; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const i32 position = start + n * 8 + i32(lane() % 4) * 2 + i % 2;
            const Positions& of_row = limits[i / 2];
            if (!Query::is_among(position, of_row.begin, of_row.end)) p[n][i] = minus_infinity();
          }
        }
      }
#pragma unroll
      for (i32 n = 0; n < kScores; ++n) {
#pragma unroll
        for (int j = 0; j < 2; ++j) here[j] = fmaxf(here[j], fmaxf(p[n][2 * j], p[n][2 * j + 1]));
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        here[j] = fmaxf(here[j], __shfl_xor_sync(~0u, here[j], 1));
        here[j] = fmaxf(here[j], __shfl_xor_sync(~0u, here[j], 2));
      }
      if (__any_sync(~0u, here[0] > most[0] || here[1] > most[1])) {
        float factor[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float now = fmaxf(most[j], here[j]);
          factor[j] = Query::weight(most[j], now);
          sum[j] *= factor[j];
          most[j] = now;
        }
#pragma unroll
        for (auto& tile : o) {
#pragma unroll
          for (int i = 0; i < 4; ++i) tile[i] *= factor[i / 2];
        }
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        // NOTE: a row may attend to none of the positions so far.
        const float largest = most[j] == minus_infinity() ? 0.0f : most[j];
#pragma unroll
        for (i32 n = 0; n < kScores; ++n) {
#pragma unroll
          for (int i = 2 * j; i < 2 * j + 2; ++i) {
            p[n][i] = ptx::exp2(p[n][i] - largest);
            sum[j] += p[n][i];
          }
        }
      }
    }

    ETC_DEVICE void store() {
      const auto c = load_words().c;
      const i32 num_heads = count_heads(c), num_rows = count_rows(c);
      const auto y = Call::template operand<PromptCall<Call>::kY>(run.g, c);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        sum[j] += __shfl_xor_sync(~0u, sum[j], 1);
        sum[j] += __shfl_xor_sync(~0u, sum[j], 2);
        const i32 pair = own_pair(j), row = pair / num_heads, head = pair % num_heads;
        if constexpr (Call::kHasSinks) {
          const auto sinks = last_axes<1>(Call::template operand<Of::kSinks>(run.g, c));
          sum[j] += sink_weight(__uint_as_float(ptx::load4_l2(u64(sinks.at(head)))), most[j]);
        }
        if (row >= num_rows) continue;
        const float factor = sum[j] == 0.0f ? 0.0f : 1.0f / sum[j];
        const u64 target = u64(y.at(row, head * kDim + i32(lane() % 4) * 2));
#pragma unroll
        for (i32 t = 0; t < kTiles; ++t) {
          const float low = o[t][2 * j] * factor, high = o[t][2 * j + 1] * factor;
          ptx::store4(target + u32(t) * 16, pack<Call::kIsHalf>(low, high));
        }
      }
    }
  };
};

template <class Call>
struct attend_prompt : AttendRoles<Call, typename PromptCall<Call>::Words>, PromptCall<Call> {
  using Of = AttendCall<Call>;
  using Of::kStageBytes;
  using Words = typename PromptCall<Call>::Words;
  using Compute = PromptCompute<Call>;
  using Feed = AttendFeed<Call, kEvictNormal>;  // other blocks read the same positions

  struct Prepared {
    Words words;
    u32 count;  // stages
    AttendSource<Call> source;
    Feed feed;
  };
  template <class Program>
  ETC_DEVICE static Prepared prepare(const Run<Program>& run, const typename Call::Coord& c) {
    const AttendSource<Call> source(run, c);
    auto row = source.row(0);
    row.positions.end = source.row(source.rows - 1).positions.end;
    const u32 count = u32(row.positions.stages());
    return {{c, row.positions}, count, source, {source, {0, 0, 0}, count, row}};
  }

  template <class Program, class Publish, class Event, class Loaded>
  ETC_DEVICE static bool load(
      const Run<Program>& run, StageLoader<Program>& loader, const Prepared& prepared, u32,
      Publish publish, Event event, Loaded loaded) {
    static_assert(kStageBytes <= StageRing<Program>::kBytes);
    publish();
    Feed feed = prepared.feed;
#pragma unroll 1
    for (u32 n = 0; n < prepared.count; ++n) {
      Stage stage;
      if (n >= Of::kMostStages && !loader.wait_outstanding(run, Of::kMostStages)) return false;
      if (!loader.begin(run, kStageBytes, feed.bytes(), false, stage)) return false;
      feed.load(prepared.source, stage);
      loaded(n + 1);
    }
    return event.wait();
  }
};

}  // namespace etc
