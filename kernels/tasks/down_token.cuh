// Some columns of the result of one token: the weighted sum over the experts that it picks, in
// float.
#pragma once
#include "tasks/best_experts.cuh"
#include "tasks/row_pairs.cuh"

namespace etc {

template <class Task>
struct down_token {
  using Best = typename BestExperts<Task::kExperts, Task::kTopK, Task::kNormalize>::OneToken;

  // activated(): the activations are there. Until then the first weights are sent for.
  template <class Activated>
  ETC_DEVICE static void run(const Task& task, Activated activated) {
    const auto active = task.template operand<1>();
    const auto down = task.template operand<2>();
    const auto y = task.template operand<3>();
    Best best(u64(task.template operand<0>().at()));
    const i32 inner = active.size[2], each = RowPairs::steps_of(inner);
    const u64 row = u64(inner) * 2;
    RowPairs pairs{
        .first = u64(down.at()),
        .apart = row,
        .next = 2 * row,
        .by_pair = 0,
        .pairs = down.size[1] / 2,
        .of_expert = down.size[1],
        .by_step = u64(down.stride[0]) * 2,
        .columns = inner,
        .each = each,
        .steps = Task::kTopK * each,
        .vector = u64(active.at()),
        .by_vector = u64(active.stride[1]) * 2,
        .picked = 0,
        .weight = 0.0f};
    const auto finish = [&](i32 pair, float first, float second) {
      *y.at(0, 2 * pair) = y.base->from(first);
      *y.at(0, 2 * pair + 1) = y.base->from(second);
    };
    best.pick_first(pairs.first_experts());
    pairs.picked = best.expert();
    const auto arrived = [&] {
      best.pick_others();
      pairs.picked = best.expert(), pairs.weight = best.weight();
      return activated();
    };
    pairs.multiply(task, arrived, finish);
  }
};

}  // namespace etc
