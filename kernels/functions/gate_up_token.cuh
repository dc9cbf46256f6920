// Some columns of the activations of one token, for each expert that it picks. Rows of down
// of some experts are prefetched into L2 after all loads of gate and up.
#pragma once
#include "functions/activation.cuh"
#include "functions/router.cuh"
#include "functions/row_pairs.cuh"

namespace etc {

template <class Task>
struct gate_up_token {
  using Best = typename ExpertChoice<Task>::OneToken;

  // routed(): the logits are there. What does not need them is worked out before.
  template <class Routed>
  ETC_DEVICE static void run(const Task& task, Routed routed) {
    const auto x = task.template operand<0>();
    const auto gate = task.template operand<2>();
    const auto up = task.template operand<3>();
    const auto down = task.template operand<4>();
    const auto active = task.template operand<Task::kReads>();
    const u64 logits = u64(task.template operand<1>().at());
    using Weights = typename PairsOf<Task>::Type;
    using Pairs = RowPairs<Weights, false>;
    const i32 columns = gate.size[1];
    Pairs pairs{
        .first = u64(gate.at()),
        .apart = u64(up.at()) - u64(gate.at()),
        .next = u32(gate.stride[1]) * Weights::kBytes,
        .by_expert = u32(gate.stride[0]) * Weights::kBytes,
        .num_experts = Task::kTopK,
        .num_pairs = Task::kTopK * columns,
        .of_expert = columns,
        .columns = x.size[1],
        .num_steps = Pairs::steps_of(x.size[1]),
        .vector = u64(x.at()),
        .by_vector = 0,
        .picked = 0,
        .weight = 1.0f,
        .scales = pair_scales<Task, 5>(task, gate.start[1], up.start[1], 1)};
    const auto finish = [&](i32 pair, float gate, float up) {
      auto* target = active.at(0, pair / columns, pair % columns);
      *target = target->from(ActivationOf<Task>::apply(gate, up));
    };
    const i32 first = pairs.first_experts();
    if (!routed()) return;
    Best best(task, logits);
    best.pick_first(first);
    pairs.picked = best.expert();
    const auto pick_others = [&] {
      best.pick_others();
      pairs.picked = best.expert();
      return true;
    };
    pairs.multiply(task, pick_others, finish);
    prefetch_rows(task.thread < kPrefetchedFirst<Task>, down, best.expert());
  }
};

}  // namespace etc
