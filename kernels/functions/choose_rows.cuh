// The top-k experts of up to 8 rows and their weights, one warp per row.
#pragma once
#include "functions/row_choices.cuh"

namespace etc {

template <class Task>
struct choose_rows {
  ETC_DEVICE static void run(const Task& task) {
    run(task, [] { return true; });
  }
  // ready() waits for the logits; false after an abort.
  template <class Ready>
  ETC_DEVICE static void run(const Task& task, Ready ready) {
    if (!ready()) return;
    RowChoices<Task>::template choose<1>(
        task, task.template operand<0>(), task.template operand<1>(), task.template operand<2>(),
        task.template operand<3>(), [](i32, i32, i32) {});
  }
};

}  // namespace etc
