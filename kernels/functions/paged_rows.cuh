// Rows of a step and their places in a paged cache.
#pragma once
#include "worker/task.cuh"

namespace etc {

// kFirst: the operand `gain`, if heads are normalized. Then follow cos_sin [positions, kHeadDim],
// request [rows], position [(step,) rows], table [requests, most pages].
template <class Task, int kFirst>
struct PagedRows {
  static constexpr int kCosSin = kFirst + (Task::kNormalizes ? 1 : 0);
  static constexpr int kEnd = kCosSin + 4;  // the next operand

  // A row's length is the number of positions up to its own, or 0 if it is out of range.
  struct Row {
    i32 request, position, length;
  };

  ETC_DEVICE static Row row(const Task& task, i32 n) {
    const auto table = task.template operand<kCosSin + 3>();
    const i32 positions = task.template operand<kCosSin>().size[0];
    Row row;
    row.request = i32(ptx::load4_l2(u64(task.template operand<kCosSin + 1>().at(n))));
    row.position = i32(ptx::load4_l2(u64(task.template operand<kCosSin + 2>().at() + n)));
    const i32 pages = (row.position + 1 + Task::kPageSize - 1) / Task::kPageSize;
    const bool is_in_range = u32(row.request) < u32(table.size[0]) &&
                             u32(row.position) < u32(positions) && pages <= table.size[1];
    row.length = is_in_range ? row.position + 1 : 0;
    return row;
  }
  ETC_DEVICE static u64 gain(const Task& task) {
    return Task::kNormalizes ? u64(task.template operand<kFirst>().at()) : 0;
  }
  ETC_DEVICE static u64 cos_sin(const Task& task, i32 position) {
    return u64(task.template operand<kCosSin>().at(position));
  }
  // The address of a request's pages, whose numbers may be out of range.
  ETC_DEVICE static u64 pages(const Task& task, i32 request) {
    return u64(task.template operand<kCosSin + 3>().at(request));
  }
};

// All pages of the first head: the last five axes are pages, 2, heads, kPageSize, kHeadDim.
template <class Task, int kOperand>
struct Pages {
  u64 base, page_bytes, value_bytes;  // between pages; from a key to its value
  u32 count, head_bytes;
  i32 heads;

  ETC_DEVICE explicit Pages(const Task& task) {
    const auto cache = task.template operand<kOperand>();
    constexpr int kAxis = decltype(cache)::kRank - 5;
    base = u64(cache.at());
    page_bytes = u64(cache.stride[kAxis]) * 2;
    value_bytes = u64(cache.stride[kAxis + 1]) * 2;
    count = u32(cache.size[kAxis]);
    heads = cache.size[kAxis + 2];
    head_bytes = u32(cache.stride[kAxis + 2]) * 2;
  }
  ETC_DEVICE u64 key(u32 page, i32 slot) const {
    return base + page * page_bytes + u32(slot) * u64(Task::kHeadDim * 2);
  }
};

}  // namespace etc
