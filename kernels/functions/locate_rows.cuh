// Locates the rows of 32 tokens: one row for each expert that a token chose. kSplit: only rows of
// this rank's experts; their first index is the extent of operand 4. -1 for the others, and with
// kHasNone for ids that are not experts.
#pragma once
#include "worker/task.cuh"

namespace etc {

template <class Task>
struct locate_rows {
  static constexpr int kTopK = Task::kTopK, kMost = Task::kSplit ? 4 : 8;
  static constexpr int kAtOnce = kTopK < kMost ? kTopK : kMost;  // choices per lane
  static_assert(Task::threads == 32);

  ETC_DEVICE static void run(const Task& task) {
    const i32 num_choices = task.template operand<0>().size[0] * kTopK;
    if (num_choices <= 32) {
      locate<1>(task, 0, num_choices);
    } else {
#pragma unroll 1
      for (i32 first = 0; first < num_choices; first += 32 * kAtOnce) {
        locate<kAtOnce>(task, first, num_choices);
      }
    }
  }

 private:
  // kEach choices per lane; indices after the last choice repeat it.
  template <int kEach>
  ETC_DEVICE static void locate(const Task& task, i32 first, i32 num_choices) {
    const auto ids = task.template operand<0>();
    const auto choice_bits = task.template operand<1>();
    const auto before = task.template operand<2>();
    const auto expert_row = task.template operand<3>();
    const auto place = task.template operand<Task::kReads>();
    i32 lower = 0;
    if constexpr (Task::kSplit) lower = task.template operand<4>().size[0];
    const auto choice = [&](int n) {
      return minimum(first + n * 32 + task.thread, num_choices - 1);
    };
    i32 expert[kEach];
#pragma unroll
    for (int n = 0; n < kEach; ++n) {
      const u64 source = u64(ids.at(choice(n) / kTopK, choice(n) % kTopK));
      expert[n] = i32(ptx::load4_l2(source)) - lower;
    }
    u32 bits[kEach], rank[kEach], row[kEach];
#pragma unroll
    for (int n = 0; n < kEach; ++n) {
      const i32 own_expert = is_own(expert[n]) ? expert[n] : 0;
      bits[n] = ptx::load4_l2(u64(choice_bits.at(own_expert)));
      rank[n] = ptx::load4_l2(u64(before.at(own_expert)));
      row[n] = ptx::load4_l2(u64(expert_row.at(own_expert)));
    }
#pragma unroll
    for (int n = 0; n < kEach; ++n) {
      const i32 token = choice(n) / kTopK;
      const u32 earlier = bits[n] & ((1u << token) - 1);
      const i32 own_row = i32(row[n] + rank[n] + __popc(earlier));
      *place.at(token, choice(n) % kTopK) = is_own(expert[n]) ? own_row : -1;
    }
  }

  ETC_DEVICE static bool is_own(i32 expert) {
    return !(Task::kSplit || Task::kHasNone) || u32(expert) < u32(Task::kExperts);
  }
};

}  // namespace etc
