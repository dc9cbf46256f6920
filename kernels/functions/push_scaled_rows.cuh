// Copies rows of codes, and their scales.
#pragma once
#include "functions/push_rows.cuh"

namespace etc {

template <class Task>
struct push_scaled_rows {
  ETC_DEVICE static void run(const Task& task) {
    push_region<0, 2>(task);
    push_region<1, 3>(task);
  }
};

}  // namespace etc
