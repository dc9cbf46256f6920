// Copies the rows of a step, and looks for requests, positions, pages and tokens that are out of
// range.
#pragma once
#include "worker/task.cuh"

namespace etc {

// NOTE: of several wrong numbers of a kind, the largest by its bits is reported, always the same.
template <class Task>
struct check_rows {
  ETC_DEVICE static void run(const Task& task) {
    const auto table = task.template operand<1>();
    const i32 rows = task.template operand<2>().size[0];
    // NOTE: the given rows may be in the host's memory: read once, all at the same time.
    for (i32 row = task.thread; row < rows; row += Task::threads) {
      const u32 request = given<2>(task, row), position = given<3>(task, row);
      const u32 end = given<4>(task, row), id = given<5>(task, row);
      place<7>(task, row) = i32(request);
      place<8>(task, row) = i32(position);
      place<9>(task, row) = i32(end);
      place<10>(task, row) = i32(id);
    }
    task.sync();
    const i32 positions = task.template operand<0>().size[0], pages = task.number_pages(task.g);
    const i32 lane = task.thread % 32, warp = task.thread / 32;
    u32 worst[kKinds] = {};
#pragma unroll 1
    for (i32 row = warp; row < rows; row += kWarps) {
      const i32 request = copy<7>(task, row), begin = copy<8>(task, row);
      if (begin < 0) continue;
      const i32 position = maximum(begin, copy<9>(task, row) - 1);
      const i32 last = position / Task::kPageSize;
      compare(worst[0], request, table.size[0]);
      compare(worst[1], position, positions);
      compare(worst[2], last, table.size[1]);
      compare(worst[4], copy<10>(task, row), task.number_vocabulary(task.g));
      if (u32(request) >= u32(table.size[0])) continue;
#pragma unroll 4
      for (i32 i = lane; i < minimum(last + 1, table.size[1]); i += 32) {
        compare(worst[3], i32(ptx::load4_l2(u64(table.at(request, i)))), pages);
      }
    }
#pragma unroll
    for (int kind = 0; kind < kKinds; ++kind) {
      worst[kind] = ptx::warp_max(worst[kind]);
      if (lane == 0) task.scratch[warp * kKinds + kind] = worst[kind];
    }
    task.sync();
    if (task.thread < kKinds) {
      u32 most = 0;
      for (i32 w = 0; w < kWarps; ++w) {
        const u32 one = task.scratch[w * kKinds + task.thread];
        most = most < one ? one : most;
      }
      *task.template operand<6>().at(task.thread) = i32(most);
    }
  }

 private:
  static constexpr i32 kKinds = 5, kWarps = Task::threads / 32;

  template <int kOperand>
  ETC_DEVICE static auto& place(const Task& task, i32 row) {
    return task.template operand<kOperand>().at()[row];
  }
  template <int kOperand>
  ETC_DEVICE static u32 given(const Task& task, i32 row) {
    return ptx::load_relaxed(u64(&place<kOperand>(task, row)));
  }
  template <int kOperand>
  ETC_DEVICE static i32 copy(const Task& task, i32 row) {
    return i32(ptx::load4_l2(u64(&place<kOperand>(task, row))));
  }
  ETC_DEVICE static void compare(u32& worst, i32 value, i32 limit) {
    if (u32(value) >= u32(limit) && u32(value) > worst) worst = u32(value);
  }
};

template <class Task>
struct expect_in_range {
  ETC_DEVICE static void run(const Task&) {}
};

}  // namespace etc
