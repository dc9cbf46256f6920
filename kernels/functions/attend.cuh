// Attention of some query heads over a slice of the positions of a paged KV cache.
#pragma once
#include "functions/paged_rows.cuh"
#include "functions/rotary.cuh"

namespace etc {

// A warp multiplies a block of 16 positions, the M of an mma, by eight query heads, its N. Keys and
// values are loaded from global memory into mma fragments, without shared memory. The blocks of a
// KV head are distributed round-robin over its warps, whose results are added in order.
template <class Task>
struct attend {
  using Rows = PagedRows<Task, 1>;
  using Row = typename Rows::Row;

  ETC_DEVICE static void run(const Task& task) {
    run(task, [] { return true; });
  }
  // ready() waits for the queries and the cache; false after an abort. The row is loaded before.
  // NOTE: one row and at most eight heads per warp, since loops need registers for addresses.
  template <class Ready>
  ETC_DEVICE static void run(const Task& task, Ready ready) {
    const Row row = Rows::row(task, 0);
    const Slice slice(row.length, task.c.axis_s, task.number_slices(task.g));
    // NOTE: for one KV head, a copy of the code with a constant number of warps: faster for small
    // batches. Dynamic programs have no registers for two copies.
    const Pages<Task, Rows::kEnd> pages(task);
    if (Task::kHasCopies && pages.heads == 1) {
      if constexpr (Task::kHasCopies) attend_to<kWarps>(task, row, slice, ready);
    } else {
      attend_to<0>(task, row, slice, ready);
    }
  }

 private:
  static constexpr i32 kDim = Task::kHeadDim, kHeads = 8, kBlock = 16, kWarps = Task::threads / 32;
  static_assert(kWarps == kHeads && Task::kGroup <= kHeads);
  static constexpr int kVectors = kDim / 32;  // of a key, in each of four lanes
  static constexpr int kParts = kDim / 64;    // of a value: 64 elements, in eight lanes
  // Blocks of positions, and the end of the last one.
  struct Slice {
    i32 first, end, length;

    // Short rows use fewer slices, a power of two; the other slices are empty.
    ETC_DEVICE Slice(i32 length_, i32 s, i32 slices) : length(length_) {
      const i32 blocks = (length + kBlock - 1) / kBlock;
      const i32 most = maximum(1, length / Task::kSlicePositions);
      const i32 used = minimum(slices, i32(1u << (31 - __clz(most))));
      first = blocks * minimum(s, used) / used;
      end = blocks * minimum(s + 1, used) / used;
    }
  };

  // The fragments of a block. Lane g * 4 + c has the elements of keys g and g + 8 that Head
  // describes, and elements 8 g + {0 .. 7} of each part of values 2 c + {0, 1, 8, 9}.
  struct Block {
    uint4 key[2][kVectors], value[4][kParts];
  };

  template <int kWarpsOfHead, class Ready>
  ETC_DEVICE static void attend_to(
      const Task& task, const Row& row, const Slice& slice, Ready ready) {
    Warp<kWarpsOfHead> warp(task, row, slice);
    if (!warp.multiply(ready)) return;
    warp.store();
  }

  // kWarpsOfHead: the warps of a KV head, or 0 if their number is known only at run time.
  template <int kWarpsOfHead>
  struct Warp {
    static constexpr bool kHasAll = kWarpsOfHead == kWarps;

    const Task& task;
    const Row& row;
    const Slice& slice;
    Pages<Task, Rows::kEnd> pages;
    u64 table;  // the address of the request's page numbers
    i32 own;    // the index of the warp in the worker
    i32 known_shift;
    i32 g, c;
    u32 numbers;  // of pages: lane n has that of the n-th of the warp's next 32 blocks
    u32 page;     // of the block that is loaded next
    i32 next;     // the index of this block
    Block block;
    // For query heads 2 c and 2 c + 1: the largest score; the sum of weights over this lane's rows.
    float most[2], sum[2];
    float total[kDim / 16][4];

    ETC_DEVICE Warp(const Task& task_, const Row& row_, const Slice& slice_)
        : task(task_), row(row_), slice(slice_), pages(task_) {
      table = Rows::pages(task, row.length > 0 ? row.request : 0);
      own = i32(ptx::warp()), g = lane() / 4u, c = lane() % 4u;
      known_shift = 31 - __clz(kWarps / pages.heads);
      // Of three KV heads, the warps of a fourth one read the last one again.
      if constexpr (!kHasAll) pages.base += minimum(head(), pages.heads - 1) * pages.head_bytes;
      most[0] = most[1] = minus_infinity();
      sum[0] = sum[1] = 0.0f;
#pragma unroll
      for (auto& tile : total) tile[0] = tile[1] = tile[2] = tile[3] = 0.0f;
    }

    template <class Ready>
    ETC_DEVICE bool multiply(Ready ready) {
      next = slice.first + among();
      find_page();
      if (!ready()) return false;
      fetch_keys();
      Head<kDim, Task::kIsHalf> query;
      const bool is_head = g < queries();
      const i32 number = head() * Task::kGroup + (is_head ? g : 0);
      query.load(u64(task.template operand<0>().at(0, number * kDim)), c, is_head);
      const bool is_in_range = row.length > 0;
      query.template rotate<Task::kNormalizes>(
          Rows::gain(task), Task::kEps, Rows::cos_sin(task, is_in_range ? row.position : 0), c,
          is_in_range);
      // NOTE: the query is in shared memory: programs with matmuls have no registers left for it.
#pragma unroll
      for (int i = 0; i < kVectors; ++i) ptx::store_shared16(kept(i), query.vector[i]);
      fetch_values();
#pragma unroll 1
      for (i32 at = next; at < slice.end; at = next) {
        float score[4] = {};
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
          const uint4 a = block.key[0][i], b = block.key[1][i], v = ptx::load_shared16(kept(i));
          ptx::mma_16x8x16<Task::kIsHalf>(score, a.x, b.x, a.y, b.y, v.x, v.y);
          ptx::mma_16x8x16<Task::kIsHalf>(score, a.z, b.z, a.w, b.w, v.z, v.w);
        }
        const bool is_page = page < pages.count;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const bool is_there = is_page && at * kBlock + g + i / 2 * 8 < slice.length;
          score[i] = is_there ? score[i] * Task::kScale : minus_infinity();
        }
        next = at + (1 << shift());
        find_page();
        fetch_keys();
        add_up(score);
        fetch_values();
      }
      return true;
    }

    // Each warp combines the results of its head's warps for a share of the head's queries, and
    // stores them. Those for query q are adjacent, from entry (head() * kHeads + q) << shift() on.
    ETC_DEVICE void store() {
      const i32 lane = Warp::lane(), share = kHeads >> shift();
      const i32 first = among() * share, number = head() * Task::kGroup + first;
      const auto sums = task.template operand<Rows::kEnd + 1>();
      const auto stats = task.template operand<Rows::kEnd + 2>();
      const auto y = task.template operand<Rows::kEnd + 3>();
      float2* const of_warp = reinterpret_cast<float2*>(task.scratch);  // [kWarps * kHeads]
      float2* const parts = of_warp + kWarps * kHeads;                  // [kWarps * kHeads][32]
      const i32 begin = (head() * kHeads << shift()) + among();
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int step = 4; step < 32; step *= 2) sum[j] += __shfl_xor_sync(~0u, sum[j], step);
        const i32 entry = begin + (2 * lane + j << shift());
        if (lane < 4) of_warp[entry] = make_float2(most[j], sum[j]);
      }
      task.sync();
      float factor[2];
      float2* to[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const i32 entry = begin + (lane % 4 * 2 + j << shift());
        factor[j] = weight(most[j], largest(of_warp + entry - among()));
        to[j] = parts + entry * 32 + lane / 4 * 4;
      }
      const i32 own_queries = minimum(queries() - first, share);
      float scale = 0.0f;
      if (lane < own_queries) {
        const float2* const from = of_warp + own * kWarps + (lane << shift());
        const float most_of_all = largest(from);
        float weights = 0.0f;
#pragma unroll
        for (i32 w = 0; w < kWarps; ++w) {
          const float2 one = from[among(w)];
          if (w >> shift() == 0) weights += one.y * weight(one.x, most_of_all);
        }
        if (weights != 0.0f) scale = 1.0f / weights;
        if (stats.size[2] > 0) {
          *reinterpret_cast<float2*>(stats.at(0, number + lane)) =
              make_float2(most_of_all, weights);
        }
      }
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          const float* const of = total[part * 4 + t];
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            to[j][t] = make_float2(of[j] * factor[j], of[2 + j] * factor[j]);
          }
        }
        task.sync();
        float2 all = {};
        float* sum_to = sums.at(0, number, 0, part * 64 + lane * 2);
        u64 y_to = u64(y.at(0, number * kDim + part * 64 + lane * 2));
#pragma unroll
        for (i32 i = 0; i < kWarps; i += 2) {
          const float2* const from = parts + (own * kWarps + i) * 32 + lane;
          all = make_float2(all.x + from[0].x + from[32].x, all.y + from[0].y + from[32].y);
          if (among(i + 2) != 0) continue;
          const float by = __shfl_sync(~0u, scale, i >> shift());
          if (i >> shift() < own_queries) {
            if (sums.size[2] > 0) *reinterpret_cast<float2*>(sum_to) = all;
            if (y.size[0] > 0) ptx::store4(y_to, pack<Task::kIsHalf>(all.x * by, all.y * by));
          }
          sum_to += sums.stride[1], y_to += kDim * 2;
          all = {};
        }
        task.sync();
      }
    }

   private:
    // NOTE: unsigned, which is cheaper: the compiler recomputes it in the loop.
    ETC_DEVICE u32 lane() const { return u32(task.thread) % 32; }
    // log2 of the number of warps of a head.
    ETC_DEVICE i32 shift() const {
      return kWarpsOfHead > 0 ? 31 - __clz(kWarpsOfHead) : known_shift;
    }
    // The warp's KV head; a warp's index among those of its head; the head's number of queries.
    ETC_DEVICE i32 head() const { return kHasAll ? 0 : own >> shift(); }
    ETC_DEVICE i32 among(i32 warp) const { return warp & ((1 << shift()) - 1); }
    ETC_DEVICE i32 among() const { return kHasAll ? own : among(own); }
    ETC_DEVICE i32 queries() const {
      const i32 all = task.template operand<0>().size[1] / kDim;
      return minimum(all - head() * Task::kGroup, Task::kGroup);
    }
    // NOTE: reads a head's warps several times if they are fewer than kWarps.
    ETC_DEVICE float largest(const float2* of_warp) const {
      float most = minus_infinity();
#pragma unroll
      for (i32 w = 0; w < kWarps; ++w) most = fmaxf(most, of_warp[among(w)].x);
      return most;
    }
    ETC_DEVICE static float weight(float score, float most) {
      return most == minus_infinity() ? 0.0f : ptx::exp2(score - most);
    }

    // The shared address of this lane's i-th vector of the query, beyond store()'s first array.
    ETC_DEVICE u32 kept(int i) const {
      const i32 at = (own * kVectors + i) * 32 + g * 4 + c;
      return ptx::shared_address(task.scratch) + kWarps * kHeads * u32(sizeof(float2)) + at * 16;
    }
    // Sets `page` to that of block `next`.
    ETC_DEVICE void find_page() {
      const i32 n = (u32(next - slice.first) >> shift()) % 32;
      if (n == 0) {
        const i32 at = next + (lane() << shift());
        numbers = ~0u;
        if (at < slice.end) {
          numbers = ptx::load4_l2(table + u32(at) * kBlock / Task::kPageSize * 4);
        }
      }
      page = __shfl_sync(~0u, numbers, n);
    }
    // The position in its page at which block `next` begins.
    ETC_DEVICE i32 slot() const { return u32(next) * kBlock % Task::kPageSize; }
    ETC_DEVICE void fetch_keys() {
      const bool is_page = next < slice.end && page < pages.count;
      const u64 from = pages.key(is_page ? page : 0, slot() + g) + c * 16;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const bool is_there = is_page && next * kBlock + g + r * 8 < slice.length;
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
          const u64 at = from + r * 8 * kDim * 2 + i * 64;
          block.key[r][i] = ptx::load16_l2_if(is_there, at);
        }
      }
    }
    // NOTE: zeros beyond the last position, where the cache may contain NaNs.
    ETC_DEVICE void fetch_values() {
      const bool is_page = next < slice.end && page < pages.count;
      const u64 from =
          pages.key(is_page ? page : 0, slot() + 2 * c) + pages.value_bytes + g * 16;
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const i32 apart = r / 2 * 8 + r % 2;
        const bool is_there = is_page && next * kBlock + 2 * c + apart < slice.length;
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
          const u64 at = from + apart * kDim * 2 + i * 128;
          block.value[r][i] = ptx::load16_l2_if(is_there, at);
        }
      }
    }

    // Online softmax: rescales the sums, and adds the block's values with their weights. score: of
    // positions g (0, 1) and g + 8 (2, 3), for query heads 2 c and 2 c + 1.
    ETC_DEVICE void add_up(const float (&score)[4]) {
      float p[4], scale[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float here = fmaxf(score[j], score[2 + j]);
#pragma unroll
        for (int step = 4; step < 32; step *= 2) {
          here = fmaxf(here, __shfl_xor_sync(~0u, here, step));
        }
        const float now = fmaxf(most[j], here);
        scale[j] = weight(most[j], now);
        p[j] = weight(score[j], now);
        p[2 + j] = weight(score[2 + j], now);
        sum[j] = sum[j] * scale[j] + p[j] + p[2 + j];
        most[j] = now;
      }
      const u32 b0 = transposed(pack<Task::kIsHalf>(p[0], p[1]));
      const u32 b1 = transposed(pack<Task::kIsHalf>(p[2], p[3]));
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        u32 v[4][4];
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const uint4 four = block.value[r][part];
          v[r][0] = four.x, v[r][1] = four.y, v[r][2] = four.z, v[r][3] = four.w;
        }
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          float(&to)[4] = total[part * 4 + t];
#pragma unroll
          for (int i = 0; i < 4; ++i) to[i] *= scale[i % 2];
          // Rows g and g + 8 of the mma are adjacent elements of the value.
          ptx::mma_16x8x16<Task::kIsHalf>(
              to, lower(v[0][t], v[1][t]), upper(v[0][t], v[1][t]), lower(v[2][t], v[3][t]),
              upper(v[2][t], v[3][t]), b0, b1);
        }
      }
    }
    // Transposes an 8 x 8 fragment: from row g, columns 2 c and 2 c + 1 to column g, rows 2 c and
    // 2 c + 1.
    ETC_DEVICE u32 transposed(u32 v) const {
      const u32 even = __shfl_sync(~0u, v, c * 8 + g / 2);
      const u32 odd = __shfl_sync(~0u, v, c * 8 + 4 + g / 2);
      return g % 2 == 0 ? lower(even, odd) : upper(even, odd);
    }
    ETC_DEVICE static u32 lower(u32 a, u32 b) { return __byte_perm(a, b, 0x5410); }
    ETC_DEVICE static u32 upper(u32 a, u32 b) { return __byte_perm(a, b, 0x7632); }
  };
};

}  // namespace etc
