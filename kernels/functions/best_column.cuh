// The largest number of each row, and the first column that has it: a warp a row.
#pragma once
#include "worker/task.cuh"

namespace etc {

// The best of the numbers so far. After reduce(), `value` is a NaN if one of them is.
struct Best {
  float value = minus_infinity();
  i32 column = 0;
  bool has_nan = false;

  ETC_DEVICE void add(float element, i32 place) {
    if (element > value || (element == value && place < column)) value = element, column = place;
    note_nan(element);
  }
  // NOTE: costs one instruction, into a predicate.
  ETC_DEVICE void note_nan(float element) { has_nan = has_nan || element != element; }
  ETC_DEVICE bool is_finite() const { return fabsf(value) < -minus_infinity(); }
  // Of all lanes.
  ETC_DEVICE void reduce() {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      const float other_value = __shfl_xor_sync(~0u, value, step);
      add(other_value, __shfl_xor_sync(~0u, column, step));
    }
    if (__any_sync(~0u, has_nan)) value = __uint_as_float(0x7fffffffu);
  }
};

// Sets the numbers of a vector that are not in the row, of which `num_left` are left, to -inf.
template <int kBytes, bool kIsHalf>
ETC_DEVICE void end_row(uint4& words, i32 num_left) {
  if (num_left >= 16 / kBytes) return;
  u32 word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (kBytes == 4) {
      if (i >= num_left) word[i] = 0xff800000u;
    } else {
      constexpr u32 kInfinity = kIsHalf ? 0xfc00u : 0xff80u;
      if (2 * i + 1 >= num_left) word[i] = (word[i] & 0xffffu) | kInfinity << 16;
      if (2 * i >= num_left) word[i] = (word[i] & 0xffff0000u) | kInfinity;
    }
  }
  words = make_uint4(word[0], word[1], word[2], word[3]);
}

// The same for vectors of one thread, the first at column `first`, the others `stride` apart.
template <int kBytes, bool kIsHalf, int kCount>
ETC_DEVICE void end_row(uint4 (&vectors)[kCount], i32 first, i32 stride, i32 columns) {
  if (first + (kCount - 1) * stride + 16 / kBytes <= columns) return;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    end_row<kBytes, kIsHalf>(vectors[i], columns - first - i * stride);
  }
}

template <class Task>
struct best_column {
  ETC_DEVICE static void run(const Task& task) {
    const auto x = task.template operand<0>();
    constexpr i32 kBytes = sizeof(*x.base), kEach = 16 / kBytes;  // numbers of a vector
    const i32 lane = task.thread % 32, columns = x.size[1] / kEach * kEach;
#pragma unroll 1
    for (i32 row = task.thread / 32; row < x.size[0]; row += Task::threads / 32) {
      const u64 source = u64(x.at(row));
      Best best;
#pragma unroll 1
      for (i32 first = lane * kEach; first < columns; first += kAtOnce * 32 * kEach) {
        uint4 vectors[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const i32 place = first + i * 32 * kEach;
          vectors[i] = ptx::load16_l2_if(place < columns, source + place * kBytes);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const i32 place = first + i * 32 * kEach;
          if (place < columns) add<kBytes>(best, vectors[i], place);
        }
      }
      if (lane == 0 && columns < x.size[1]) {  // the vector in which the row ends
        uint4 words = ptx::load16_l2_if(true, source + columns * kBytes);
        end_row<kBytes, Task::kIsHalf>(words, x.size[1] - columns);
        add<kBytes>(best, words, columns);
      }
      best.reduce();
      if (lane == 0) {
        *task.template operand<1>().at(row) = best.value;
        *task.template operand<2>().at(row) = best.column;
      }
    }
  }

 private:
  static constexpr int kAtOnce = 8;  // vectors in flight a lane

  template <int kBytes>
  ETC_DEVICE static void add(Best& best, uint4 words, i32 place) {
    const u32 word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kBytes == 4) {
        best.add(__uint_as_float(word[i]), place + i);
      } else {
        const float2 pair = unpack<Task::kIsHalf>(word[i]);
        best.add(pair.x, place + 2 * i);
        best.add(pair.y, place + 2 * i + 1);
      }
    }
  }
};

// The best of all tiles of a row, for its warp.
template <class Task>
struct BestOfTiles {
  template <class F>
  ETC_DEVICE static void each_row(const Task& task, F f) {
    const auto values = task.template operand<0>();
    const auto ids = task.template operand<1>();
    const i32 lane = task.thread % 32;
#pragma unroll 1
    for (i32 row = task.thread / 32; row < values.size[0]; row += Task::threads / 32) {
      Best best;
#pragma unroll 4
      for (i32 tile = lane; tile < values.size[1]; tile += 32) {
        const float value = __uint_as_float(ptx::load4_l2(u64(values.at(row, tile))));
        const i32 id = i32(ptx::load4_l2(u64(ids.at(row, tile))));
        best.add(value, tile * Task::kColumns + id);
      }
      best.reduce();
      f(row, lane, best);
    }
  }
};

// Tokens: of a row that has no step, and of one whose largest number is not finite.
constexpr i32 kNoToken = -1, kNotFinite = -2;

template <class Task>
struct next_token {
  ETC_DEVICE static void run(const Task& task) {
    i32* const next_position = task.template operand<6>().at();
    bool has_fault = false;
    BestOfTiles<Task>::each_row(task, [&](i32 row, i32 lane, const Best& best) {
      const i32 position = at<2>(task, row);
      const bool has_step = position >= 0, is_finite = best.is_finite();
      const i32 token = is_finite ? best.column : kNotFinite;
      const bool has_next =
          has_step && position + 1 < at<3>(task, row) && !stops(task, row, token);
      has_fault = has_fault || (has_step && !is_finite);
      if (lane == 0) {
        *(task.template operand<5>().at() + row) = has_step ? token : kNoToken;
        next_position[row] = has_next ? position + 1 : -1;
      }
    });
    if (!ptx::named_barrier_any<Task::threads>(1, has_fault)) return;
    const i32 rows = task.template operand<0>().size[0];
    for (i32 row = task.thread; row < rows; row += Task::threads) next_position[row] = -1;
  }

 private:
  template <int kOperand>
  ETC_DEVICE static i32 at(const Task& task, i32 row) {
    return i32(ptx::load4_l2(u64(task.template operand<kOperand>().at() + row)));
  }
  ETC_DEVICE static bool stops(const Task& task, i32 row, i32 token) {
    const auto stop = task.template operand<4>();
    bool is_stop = false;
#pragma unroll 1
    for (i32 i = task.thread % 32; i < stop.size[1]; i += 32) {
      is_stop = is_stop || i32(ptx::load4_l2(u64(stop.at(row, i)))) == token;
    }
    return __any_sync(~0u, is_stop);
  }
};

template <class Task>
struct best_on_rank {
  ETC_DEVICE static void run(const Task& task) {
    BestOfTiles<Task>::each_row(task, [&](i32 row, i32 lane, const Best& best) {
      if (lane != 0) return;
      *task.template operand<2>().at(row) = best.value;
      *task.template operand<3>().at(row) = best.column + Task::number_first(task.g);
    });
  }
};

}  // namespace etc
