// The epilogue of a matrix multiplication: what a task stores of the sums of its tile.
//
// An epilogue is a struct `template <class Task> struct Name : Epilogue`, with the name of its
// NumPy half, in a file that includes this one. Its static members replace those of Epilogue. All
// take sums in fp32, in registers. `row` and `column` count from the beginning of the task's
// regions, and `column` is a multiple of 8. Elements beyond the edges of y are not given.
//
//   combine(gate, up)                    gated: one value of the sums of an element of x @ gate.T
//                                        and x @ up.T
//   apply(task, row, column, values)     changes eight neighbouring columns of a row
//
// With a "per row" result, the epilogue reduces what apply() leaves, for each row of a strip:
//
//   measure(value)                       what an element contributes
//   reduce(a, b)                         of two contributions or results, in any order
//   kIdentity                            reduce(kIdentity, a) is a
//   store_row(task, strip, row, result)  one thread for each row: stores the result
//   finish(task, row, column, values, result)
//                                        changes eight columns once more; optional. With it,
//                                        apply() is called twice for each eight, with the same
//                                        sums.
//
// The strips of a tile are counted from 0. Then `values` are rounded to the elements of y and
// stored (fp8: numbers beyond 448 as 448).
//
//   task.template operand<n>()           the region of array n of the NumPy half, after the tiles,
//                                        with its own one or two axes
//   load_eight(region.at(row, column), x)  eight numbers of a region as float
#pragma once
#include "common/eight.cuh"
#include "common/operand.cuh"

namespace etc {

struct Epilogue {
  // Whether nothing is left to do but combine(), and to round to the elements of x: then the sums
  // are rounded before they are rearranged into rows. Further results are y in a peer's memory.
  static constexpr bool kOnlyRounds = false;
  static constexpr float kIdentity = 0;
  // Whether swapped tiles, in which a warpgroup has all boxes along k, add every other box to a second
  // sum.
  static constexpr bool kHasTwoSums = false;

  template <class Task>
  ETC_DEVICE static void apply(const Task&, i32, i32, float (&)[8]) {}
};

// A task as its epilogue gets it.
template <class Args, class Call>
struct EpilogueTask : Call {
  const Args& g;
  typename Call::Coord c;

  ETC_DEVICE EpilogueTask(const Args& args, const typename Call::Coord& coord)
      : g(args), c(coord) {}

  template <int n>
  ETC_DEVICE auto operand() const {
    // After x, the weights and all scales.
    constexpr int kScales = Call::kScaleBits == 0 ? 0 : int(Call::kWeights) + Call::kQuantizes;
    constexpr int kPosition = 1 + Call::kWeights + kScales + n;
    static_assert(
        n >= 0 && kPosition < Call::kReads + Call::kWrites, "the epilogue has fewer arrays");
    return last_axes<Call::kAxes[n]>(Call::template operand<kPosition>(g, c));
  }
};

}  // namespace etc
