// A body that does not compile.
#pragma once
#include "worker/task.cuh"

namespace etc {

template <class Task>
struct unknown_function {
  ETC_DEVICE static void run(const Task&) { no_such_function(); }
};

}  // namespace etc
