// Sampling of the next token, one warp per row; and the smallest logit that top_k and top_p keep.
#pragma once
#include "common/philox.cuh"
#include "functions/best_column.cuh"

namespace etc {

template <class Task>
struct sample_column {
  ETC_DEVICE static void run(const Task& task) {
    const auto x = task.template operand<0>();
    const i32 lane = task.thread % 32, columns = x.size[1];
#pragma unroll 1
    for (i32 row = task.thread / 32; row < x.size[0]; row += Task::threads / 32) {
      const Row sampled(task, row);
      const u64 source = u64(x.at(row));
      Best best;
#pragma unroll 1
      for (i32 first = lane * 8; first < columns; first += kAtOnce * 32 * 8) {
        uint4 vectors[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const i32 column = first + i * 32 * 8;
          vectors[i] = ptx::load16_l2_if(column < columns, source + column * 2);
        }
        end_row<2, Task::kIsHalf>(vectors, first, 32 * 8, columns);
        // NOTE: not unrolled, since the code is large; vectors[0] is the next one.
#pragma unroll 1
        for (int i = 0; i < kAtOnce; ++i) {
          const i32 column = first + i * 32 * 8;
          if (column < columns) sampled.add(best, vectors[0], column);
#pragma unroll
          for (int n = 1; n < kAtOnce; ++n) vectors[n - 1] = vectors[n];
        }
      }
      best.reduce();
      if (lane == 0) {
        *task.template operand<4>().at(row) = best.value;
        *task.template operand<5>().at(row) = best.column;
      }
    }
  }

 private:
  static constexpr int kAtOnce = 4;  // vectors in flight per lane

  struct Row {
    float scale, least;
    u32 seed[2], position;
    i32 before;  // columns before the tile

    ETC_DEVICE Row(const Task& task, i32 row) {
      const u64 sampling = u64(task.template operand<1>().at(row));
      scale = __uint_as_float(ptx::load4_l2(sampling));
      seed[0] = ptx::load4_l2(sampling + 12), seed[1] = ptx::load4_l2(sampling + 16);
      position = ptx::load4_l2(u64(task.template operand<2>().at() + row));
      least = __uint_as_float(ptx::load4_l2(u64(task.template operand<3>().at(row))));
      before = task.number_first(task.g) + task.template operand<0>().start[1];
    }
    // Adds eight columns; returns early if all are below `least`.
    ETC_DEVICE void add(Best& best, uint4 words, i32 column) const {
      const u32 word[4] = {words.x, words.y, words.z, words.w};
      bool is_kept = false;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack<Task::kIsHalf>(word[i]);
        is_kept = is_kept || pair.x >= least || pair.y >= least;
        best.note_nan(pair.x), best.note_nan(pair.y);
      }
      if (!is_kept) return;
      uint4 bits = {};
      // NOTE: not unrolled, since the code is large; words.x is the next pair.
#pragma unroll 1
      for (int i = 0; i < 4; ++i) {
        if (scale > 0.0f && i % 2 == 0) {
          const u32 four = u32(before + column) / 4 + i / 2;
          bits = philox(make_uint4(four, position, 0, 0), seed[0], seed[1]);
        }
        const float2 pair = unpack<Task::kIsHalf>(words.x);
        add_one(best, pair.x, bits.x, column + 2 * i);
        add_one(best, pair.y, bits.y, column + 2 * i + 1);
        words = make_uint4(words.y, words.z, words.w, 0);
        bits = make_uint4(bits.z, bits.w, 0, 0);
      }
    }
    ETC_DEVICE void add_one(Best& best, float logit, u32 bits, i32 column) const {
      if (!(logit >= least)) return;
      // NOTE: without fma, as NumPy computes.
      best.add(scale > 0.0f ? __fadd_rn(__fmul_rn(logit, scale), gumbel(bits)) : logit, column);
    }
  };
};

template <class Task>
struct least_kept {
  ETC_DEVICE static void run(const Task& task) {
    const u64 sampling = u64(task.template operand<1>().at());
    const float scale = __uint_as_float(ptx::load4_l2(sampling));
    const float top_p = __uint_as_float(ptx::load4_l2(sampling + 4));
    const i32 top_k = i32(ptx::load4_l2(sampling + 8));
    Search search(task, scale);
    u32 least = 0;
    // By top_k, then by top_p.
    // NOTE: not unrolled, since the code is large.
#pragma unroll 1
    for (int n = 0; n < 2; ++n) {
      const bool is_weighted = n == 1;
      if (!(scale > 0.0f && (is_weighted ? top_p < 1.0f : top_k > 0))) continue;
      if (is_weighted) search.largest = search.largest_of_row();
      const float goal = is_weighted ? top_p : float(minimum(top_k, search.columns));
      least = search.run(is_weighted, least, goal);
    }
    if (task.thread == 0) {
      *task.template operand<2>().at() = least > 0 ? number(least) : minus_infinity();
    }
  }

 private:
  static constexpr int kAtOnce = 4, kWarps = Task::threads / 32;

  // The bits of a logit as an integer that sorts like it; 0 for NaN, which is ignored.
  ETC_DEVICE static u32 key(u32 bits, float logit) {
    const u32 key_bits = bits ^ ((bits & 0x8000u) != 0 ? 0xffffu : 0x8000u);
    return logit == logit ? key_bits : 0;
  }
  ETC_DEVICE static float number(u32 key) {
    const u32 bits = key ^ ((key & 0x8000u) != 0 ? 0x8000u : 0xffffu);
    return unpack<Task::kIsHalf>(bits).x;
  }

  // NOTE: sums are in a fixed order, so that a row always has the same bits.
  struct Search {
    const Task& task;
    u64 source;
    i32 columns;
    float scale, largest = 0.0f;

    ETC_DEVICE Search(const Task& task_, float scale_) : task(task_), scale(scale_ * 1.44269504f) {
      const auto x = task.template operand<0>();
      source = u64(x.at()), columns = x.size[1];
    }

    // The largest key such that at least `goal` logits are not below it. is_weighted: the largest such
    // that these logits have `goal` of the probability of all that are not below `least`.
    ETC_DEVICE u32 run(bool is_weighted, u32 least, float goal) const {
      u32 bound = 0;
#pragma unroll 1
      for (int shift = 14; shift >= 0; shift -= 2) {
        float sum[4] = {};
        const u32 step = 1u << shift;
        each([&](u32 bits) {
          const float logit = unpack<Task::kIsHalf>(bits).x;
          const u32 own_key = key(bits, logit);
          if (own_key == 0 || own_key < bound || own_key < least) return;
          const float weight = is_weighted ? ptx::exp2((logit - largest) * scale) : 1.0f;
#pragma unroll
          for (int n = 0; n < 4; ++n) {
            if (own_key >= bound + n * step) sum[n] += weight;
          }
        });
        total(sum);
        if (is_weighted && shift == 14) goal *= sum[0];
#pragma unroll
        for (int n = 3; n > 0; --n) {
          if (sum[n] >= goal) {
            bound += n * step;
            break;
          }
        }
      }
      return bound < least ? least : bound;
    }
    ETC_DEVICE float largest_of_row() const {
      float most = minus_infinity();
      each([&](u32 bits) { most = fmaxf(most, unpack<Task::kIsHalf>(bits).x); });
#pragma unroll
      for (int step = 16; step > 0; step /= 2) {
        most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
      }
      float* const parts = reinterpret_cast<float*>(task.scratch);
      if (task.thread % 32 == 0) parts[task.thread / 32] = most;
      task.sync();
#pragma unroll 1
      for (int warp = 0; warp < kWarps; ++warp) most = fmaxf(most, parts[warp]);
      task.sync();
      return most;
    }

   private:
    // Calls f with the bits of each logit of this thread.
    template <class F>
    ETC_DEVICE void each(F f) const {
#pragma unroll 1
      for (i32 first = task.thread * 8; first < columns; first += kAtOnce * Task::threads * 8) {
        uint4 vectors[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const i32 column = first + i * Task::threads * 8;
          vectors[i] = ptx::load16_l2_if(column < columns, source + column * 2);
        }
        end_row<2, Task::kIsHalf>(vectors, first, Task::threads * 8, columns);
        // NOTE: not unrolled: the code is large. vectors[0].x is the next pair.
#pragma unroll 1
        for (int i = 0; i < kAtOnce * 4; ++i) {
          if (first + i / 4 * Task::threads * 8 >= columns) break;
          f(vectors[0].x & 0xffffu), f(vectors[0].x >> 16);
          vectors[0] = make_uint4(vectors[0].y, vectors[0].z, vectors[0].w, 0);
          if (i % 4 != 3) continue;
#pragma unroll
          for (int n = 1; n < kAtOnce; ++n) vectors[n - 1] = vectors[n];
        }
      }
    }
    // All threads get the sums over all threads.
    ETC_DEVICE void total(float (&sum)[4]) const {
      float* const parts = reinterpret_cast<float*>(task.scratch);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        sum[n] = ptx::warp_sum(sum[n]);
        if (task.thread % 32 == 0) parts[task.thread / 32 * 4 + n] = sum[n];
      }
      task.sync();
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        sum[n] = 0.0f;
#pragma unroll 1
        for (int warp = 0; warp < kWarps; ++warp) sum[n] += parts[warp * 4 + n];
      }
      task.sync();
    }
  };
};

}  // namespace etc
