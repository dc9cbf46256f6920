// Some columns of the result of one token: the weighted sum over the experts that it picks, in
// float. The scales of weights, if they have any, are operand 4. With kAdds, the last read is added
// to the sum.
#pragma once
#include "functions/row_pairs.cuh"

namespace etc {

template <class Task>
struct down_token {
  // activated(): the activations are there. Before, the first weights are loaded, and rows of some
  // experts prefetched.
  template <class Activated>
  ETC_DEVICE static void run(const Task& task, Activated activated) {
    const auto active = task.template operand<2>();
    const auto down = task.template operand<3>();
    // Indices after the last choice read it again.
    const i32 k = minimum(task.thread % 32, Task::kTopK - 1);
    const u32 id = ptx::load4_l2(u64(task.template operand<0>().at() + k));
    const u32 weight = ptx::load4_l2(u64(task.template operand<1>().at() + k));
    const u32 picked = u32(maximum(i32(id), 0));
    using Weights = typename PairsOf<Task>::Type;
    using Pairs = RowPairs<Weights, true>;
    const i32 inner = active.size[2];
    const u32 row = u32(inner) * Weights::kBytes;
    const Pairs pairs{
        .first = u64(down.at()),
        .apart = row,
        .next = 2 * row,
        .by_expert = u32(down.stride[0]) * Weights::kBytes,
        .num_experts = Task::kTopK,
        .num_pairs = down.size[1] / 2,
        .of_expert = 0,
        .columns = inner,
        .num_steps = Pairs::steps_of(inner),
        .vector = u64(active.at()),
        .by_vector = u32(inner) * 2,
        .picked = picked,
        .weight = __uint_as_float(weight),
        .scales = pair_scales<Task, 4>(task, down.start[1], down.start[1] + 1, 2)};
    const auto finish = [&](i32 pair, float first, float second) {
      if constexpr (Task::kAdds) {
        const auto addend = task.template operand<Task::kReads - 1>();
        const float2 more = unpack<Task::kIsHalf>(ptx::load4_l2(u64(addend.at(0, 2 * pair))));
        first += more.x, second += more.y;
      }
      const auto y = task.template operand<Task::kReads>();
      ptx::store4(u64(y.at(0, 2 * pair)), pack<Task::kIsHalf>(first, second));
    };
    const auto is_complete = [&] {
      const bool is_needed = task.thread >= kPrefetchedFirst<Task> && task.thread < Task::kTopK;
      prefetch_rows(is_needed, down, picked);
      return activated();
    };
    pairs.multiply(task, is_complete, finish);
  }
};

}  // namespace etc
