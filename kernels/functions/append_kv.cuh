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
    const Pages<Task::kHeadDim> pages(task.template operand<Rows::kEnd>());
    const i32 c = task.thread % 4, rows = k.size[0];
    const i32 in_warp = task.thread % 32 / 4;
    Place here = place(task, i32(ptx::warp()) * 8 + in_warp, rows);
    // Whole warps take part, since lanes exchange values.
#pragma unroll 1
    for (i32 first = i32(ptx::warp()) * 8; first < rows; first += Task::threads / 4) {
      const i32 row_idx = first + in_warp, next_idx = row_idx + Task::threads / 4;
      const bool has_row = row_idx < rows, is_in_range = here.position >= 0;
      if (!__any_sync(~0u, is_in_range)) {
        here = place(task, next_idx, rows);
        continue;
      }
      const Turn<Task::kHeadDim, Task::kNormalizes != 0> turn(
          Rows::gain(task), Rows::cos_sin(task, is_in_range ? here.position : 0), c, is_in_range);
      if (!ready()) return;
      Vector key, value;
      key.load(u64(k.at(has_row ? row_idx : 0)), c, has_row);
      value.load(u64(v.at(has_row ? row_idx : 0)), c, has_row);
      // NOTE: after these loads, since it waits for its own ones.
      const Place next = place(task, next_idx, rows);
      if constexpr (Task::kHasBias) {
        Vector bias;
        bias.load(u64(task.template operand<2>().at()), c, has_row);
        key.add(bias);
        bias.load(u64(task.template operand<3>().at()), c, has_row);
        value.add(bias);
      }
      key.template rotate<Task::kNormalizes != 0, Task::kGainOffset, Task::kNormalizesRotated != 0>(
          turn, Task::kEps);
      if (here.page < pages.count) {
        const i32 slot = here.position % Task::kPageSize;
        const u64 key_address = pages.key(here.page, slot - Slots(task).first);
#pragma unroll
        for (int i = 0; i < Vector::kVectors; ++i) {
          const u64 address = key_address + u32(pages.chunk(c + 4 * i, slot));
          ptx::store16(address, key.vector[i]);
          ptx::store16(address + pages.value_bytes, value.vector[i]);
        }
      }
      here = next;
    }
  }

 private:
  // The slots of each page that the task stores.
  struct Slots {
    i32 first, count;
    ETC_DEVICE explicit Slots(const Task& task) {
      const auto cache = task.template operand<Rows::kEnd>();
      constexpr int kAxis = decltype(cache)::kRank - 2;
      first = cache.start[kAxis], count = cache.size[kAxis];
    }
  };
  // -1 if the row does not exist, is out of range, or is of another task.
  struct Place {
    i32 position;
    u32 page;
  };
  ETC_DEVICE static Place place(const Task& task, i32 row_idx, i32 rows) {
    typename Rows::Row row{};
    if (row_idx < rows) row = Rows::row(task, row_idx);
    const Slots slots(task);
    const i32 own_slot = row.position % Task::kPageSize - slots.first;
    if (row.length == 0 || u32(own_slot) >= u32(slots.count)) return {-1, ~0u};
    const u64 pages = Rows::pages(task, row.request);
    return {row.position, ptx::load4_l2(pages + row.position / Task::kPageSize * 4)};
  }
};

}  // namespace etc
