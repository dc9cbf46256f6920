// Copies some columns of rows. NOTE: as in push_rows, eight accesses in flight per thread; those of
// short rows are in several rows.
#pragma once
#include "worker/task.cuh"

namespace etc {

template <class Task>
struct push_tile {
  static constexpr int kUnroll = 8;
  static constexpr i32 kStep = Task::threads * 16;

  ETC_DEVICE static void run(const Task& task) {
    const auto x = last_axes<2>(task.template operand<0>());
    const auto y = last_axes<2>(task.template operand<1>());
    const i32 rows = x.size[0], bytes = x.size[1] * i32(sizeof(*x.base));
    if (bytes == 0) return;
    Place place{0, 0};
    place.advance(i32(task.thread) * 16, bytes);
#pragma unroll 1
    while (place.row < rows) {
      uint4 vectors[kUnroll];
      Place next = place;
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        vectors[u] = ptx::load16_l2_if(next.row < rows, address(x, next));
        next.advance(kStep, bytes);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (place.row < rows) ptx::store16(address(y, place), vectors[u]);
        place.advance(kStep, bytes);
      }
    }
  }

 private:
  // A thread's next 16 bytes.
  struct Place {
    i32 row, begin;

    // By `step` bytes of rows of `bytes`.
    ETC_DEVICE void advance(i32 step, i32 bytes) {
      begin += step;
#pragma unroll 1
      while (begin >= bytes) {
        begin -= bytes;
        ++row;
      }
    }
  };

  template <class Operand>
  ETC_DEVICE static u64 address(const Operand& tile, const Place& place) {
    return u64(tile.at(place.row)) + place.begin;
  }
};

}  // namespace etc
