// The top-k experts of each of 32 tokens, their weights, and for each expert a word with one bit
// for each token that chose it.
#pragma once
#include "functions/best_experts.cuh"
#include "worker/task.cuh"

namespace etc {

template <class Task>
struct choose_experts {
  static constexpr int kTopK = Task::kTopK, kExperts = Task::kExperts;
  static constexpr int kWarps = Task::threads / 32, kMost = 32 / kWarps;
  using Best = BestExperts<kExperts, kTopK, Task::kNormalize>;

  ETC_DEVICE static void run(const Task& task) {
    static_assert(kExperts <= Task::threads);
    task.scratch[task.thread] = 0;
    if (task.template operand<0>().size[0] > kWarps) {
      choose<kMost>(task);
    } else {
      choose<1>(task);
    }
    task.sync();
    if (task.thread < kExperts) {
      *task.template operand<3>().at(task.thread) = i32(task.scratch[task.thread]);
    }
  }

 private:
  // A warp chooses for kTokens tokens in parallel.
  template <int kTokens>
  ETC_DEVICE static void choose(const Task& task) {
    const auto logits = task.template operand<0>();
    const u32 lane = task.thread % 32, warp = task.thread / 32;
    typename Best::template Picks<kTokens> picks = {};
    float all[kTokens] = {};
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      // Indices after the last token read the last token again.
      const i32 token = minimum(warp + t * kWarps, logits.size[0] - 1);
      Best::read(u64(logits.at(token, lane * Best::kEach)), lane, picks.keys[t]);
    }
#pragma unroll
    for (int t = 0; t < kTokens; ++t) all[t] = Best::sum_all(picks.keys[t]);
    picks.sort_keys();
    picks.pick(lane, 0, kTopK);
    task.sync();  // scratch is cleared
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      write(task, lane, warp + t * kWarps, picks.chosen[t],
            Best::weight(picks.logit[t], all[t]));
    }
  }

  // Each lane has one choice.
  ETC_DEVICE static void write(const Task& task, u32 lane, i32 token, u32 expert, float weight) {
    if (lane < kTopK && token < task.template operand<0>().size[0]) {
      *task.template operand<1>().at(token, lane) = i32(expert);
      *task.template operand<2>().at(token, lane) = weight;
      atomicOr(&task.scratch[expert], 1u << token);
    }
  }
};

}  // namespace etc
