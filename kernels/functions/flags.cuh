// Sums over ranks by flagged words. Bodies return whether all words have come.
#pragma once
#include "event/flags.cuh"
#include "functions/rms_norm.cuh"

namespace etc {

template <class Task>
struct push_flagged {
  template <class Flags>
  ETC_DEVICE static bool run(const Task& task, const Flags& flags) {
    const auto x = task.template operand<0>();
    const i32 columns = i32(x.count());  // of a row, or none
    u64 targets[Task::kCopies];
    each_copy(task, targets);
#pragma unroll 1
    for (i32 column = task.thread * 8; column < columns; column += Task::threads * 8) {
      const uint4 words = ptx::load16_l2(u64(x.at()) + column * 2);
#pragma unroll
      for (int c = 0; c < Task::kCopies; ++c) flags.store16(targets[c] + column * 4, words);
    }
    return true;
  }

 private:
  template <int c = 0>
  ETC_DEVICE static void each_copy(const Task& task, u64 (&targets)[Task::kCopies]) {
    targets[c] = u64(task.template operand<1 + c>().at());
    if constexpr (c + 1 < Task::kCopies) each_copy<c + 1>(task, targets);
  }
};

template <class Task>
struct add_flagged {
  static constexpr int kWorld = Task::kWorld;

  template <class Flags>
  ETC_DEVICE static bool run(const Task& task, const Flags& flags) {
    const auto x = task.template operand<0>();
    const auto parts = task.template operand<1>();
    const auto y = task.template operand<2>();
    const i32 columns = y.size[decltype(y)::kRank - 1];
    const u64 step = u64(parts.stride[0]) * sizeof(*parts.base);
    bool is_needed[kWorld];
#pragma unroll
    for (int r = 0; r < kWorld; ++r) is_needed[r] = r != task.g.rank;
#pragma unroll 1
    for (i32 column = task.thread * 8; column < columns; column += Task::threads * 8) {
      const uint4 own_words = ptx::load16_l2(u64(x.at()) + column * 2);
      uint4 part[kWorld];
      if (!flags.template load16<kWorld>(u64(parts.at()) + column * 4, step, is_needed, part)) {
        return false;
      }
      Sum8<Task::kIsHalf> sum;
#pragma unroll
      for (int r = 0; r < kWorld; ++r) sum.add(is_needed[r] ? part[r] : own_words);
      ptx::store16(u64(y.at()) + column * 2, sum.rounded());
    }
    return true;
  }
};

// A task with its flagged words, and whether all that a thread has polled have come.
template <class Task, class Flags>
struct FlaggedTask : Task {
  const Flags& flags;
  bool& is_met;

  ETC_DEVICE FlaggedTask(const Task& task, const Flags& flags_, bool& is_met_)
      : Task(task), flags(flags_), is_met(is_met_) {}
};

// Adds the parts of all ranks, in their order.
template <class Task>
struct AddedWords {
  using Vectors = RowVectors<Task>;
  static constexpr int kWorld = Task::kWorld;
  const Task& task;
  u64 x, parts, step;

  ETC_DEVICE explicit AddedWords(const Task& task_) : task(task_) {
    const auto words = task.template operand<1>();
    x = u64(task.template operand<0>().at());
    parts = u64(words.at()), step = u64(words.stride[0]) * sizeof(*words.base);
  }
  // NOTE: after an abort all threads go on, to the barriers of the body.
  ETC_DEVICE void add(i32 column, i32 columns, typename Vectors::Sums& sums) const {
    bool is_needed[kWorld];
#pragma unroll
    for (int r = 0; r < kWorld; ++r) is_needed[r] = r != task.g.rank;
#pragma unroll
    for (int i = 0; i < Vectors::kAtOnce; ++i) {
      const i32 own_column = column + i * Vectors::kStep;
      if (own_column >= columns) break;
      const uint4 own_words = ptx::load16_l2(x + own_column * 2);
      uint4 part[kWorld] = {};
      if (task.is_met) {
        task.is_met =
            task.flags.template load16<kWorld>(parts + own_column * 4, step, is_needed, part);
      }
#pragma unroll
      for (int r = 0; r < kWorld; ++r) sums[i].add(is_needed[r] ? part[r] : own_words);
    }
  }
};

template <class Task>
struct add_flagged_norm {
  template <class Flags>
  ETC_DEVICE static bool run(const Task& task, const Flags& flags) {
    using Flagged = FlaggedTask<Task, Flags>;
    const auto y = task.template operand<Task::kReads>();
    bool is_met = true;
    if (y.size[decltype(y)::kRank - 2] == 0) return is_met;
    NormalizedRow<Flagged, AddedWords<Flagged>>::run(Flagged(task, flags, is_met));
    return is_met;
  }
};

}  // namespace etc
