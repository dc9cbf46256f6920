// Keys, normalized and rotated, and values of new positions into a paged cache: four threads a row.
#pragma once
#include "functions/paged_rows.cuh"
#include "functions/rotary.cuh"

namespace etc {

template <class Task>
struct append_kv {
  using Rows = PagedRows<Task, Task::kHasBias ? 4 : 2>;
  using Vector = Head<Task::kHeadDim, Task::kIsHalf>;

  ETC_DEVICE static void run(const Task& task) {
    run(task, [] { return true; });
  }
  // ready(): keys and values are there. What the rows are is loaded before.
  template <class Ready>
  ETC_DEVICE static void run(const Task& task, Ready ready) {
    const auto k = task.template operand<0>();
    const auto v = task.template operand<1>();
    const Pages<Task, Rows::kEnd> pages(task);
    const i32 c = task.thread % 4, rows = k.size[0];
    // Whole warps take part, since lanes exchange values.
#pragma unroll 1
    for (i32 first = i32(ptx::warp()) * 8; first < rows; first += Task::threads / 4) {
      const i32 n = first + task.thread % 32 / 4;
      const bool exists = n < rows;
      typename Rows::Row row{};
      if (exists) row = Rows::row(task, n);
      const bool is_in_range = row.length > 0;
      const u64 angles = Rows::cos_sin(task, is_in_range ? row.position : 0);
      u32 page = ~0u;
      if (is_in_range) {
        page = ptx::load4_l2(
            Rows::pages(task, row.request) + row.position / Task::kPageSize * 4);
      }
      if (!ready()) return;
      Vector key, value;
      key.load(u64(k.at(exists ? n : 0)), c, exists);
      value.load(u64(v.at(exists ? n : 0)), c, exists);
      if constexpr (Task::kHasBias) {
        Vector bias;
        bias.load(u64(task.template operand<2>().at()), c, exists);
        key.add(bias);
        bias.load(u64(task.template operand<3>().at()), c, exists);
        value.add(bias);
      }
      key.template rotate<Task::kNormalizes, Task::kGainOffset, Task::kNormalizesRotated != 0>(
          Rows::gain(task), Task::kEps, angles, c, is_in_range);
      if (page < pages.count) {
        const u64 to = pages.key(page, row.position % Task::kPageSize) + c * 16;
#pragma unroll
        for (int i = 0; i < Vector::kVectors; ++i) {
          ptx::store16(to + i * 64, key.vector[i]);
          ptx::store16(to + pages.value_bytes + i * 64, value.vector[i]);
        }
      }
    }
  }
};

}  // namespace etc
