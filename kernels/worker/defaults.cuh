// What the generated structs of a program inherit: their text has only what differs.
#pragma once
#include "common/operand.cuh"
#include "worker/calls.cuh"

namespace etc {

// What generated text consists of. ETC_TENSOR(x, bf16, 2, ...) is tensor_x(g), a row-major tensor
// with these 2 extents, and ETC_EVENT(done, place, ...) is event_done with these parameters: an
// element of an event tensor, at this place in it. Those that all ranks have take the rank after g.
#define ETC_TENSOR(name, type, axes, ...)                                            \
  ETC_DEVICE auto tensor_##name(const Args& g) {                                     \
    return Tensor<type, axes>{g.rank, g.address_##name, {__VA_ARGS__}};              \
  }
#define ETC_SYMMETRIC(name, type, axes, ...)                                         \
  ETC_DEVICE auto tensor_##name(const Args& g, i32 rank) {                           \
    return Tensor<type, axes>{rank, g.peer[rank] + g.address_##name, {__VA_ARGS__}}; \
  }
#define ETC_EVENT(name, place, ...)                                                  \
  ETC_DEVICE EventRef event_##name(__VA_ARGS__) {                                    \
    return local_event(g.rank, g.events_##name + (place));                           \
  }
#define ETC_CROSS_RANK_EVENT(name, place, ...)                                       \
  ETC_DEVICE EventRef event_##name(__VA_ARGS__) {                                    \
    return cross_rank_event(rank, g.events_##name + (place));                        \
  }
// In the struct of a call: a number for its body, a function of a task's index t or coordinate c, its
// rows of events or ranks, and a table whose rows have types of their own.
#define ETC_NUMBER(name, ...) \
  ETC_DEVICE static i32 number_##name(const Args& g) { return __VA_ARGS__; }
#define ETC_OF_INDEX(type, name) ETC_DEVICE static type name(const Args& g, i32 t)
#define ETC_OF_TASK(type, name) ETC_DEVICE static type name(const Args& g, Coord c)
#define ETC_ROWS(type, name) ETC_DEVICE static type name(const Args& g, Coord c, int n)
#define ETC_TABLE(name) template <int n> ETC_DEVICE static auto name(const Args& g, Coord c)
#define ETC_NUMBERS(name) template <int n> ETC_DEVICE static i32 name(const Args& g, Coord c)
#define ETC_ROW(number) if constexpr (n == number) return

// Constants of device functions with variants, which few calls have.
struct VariantDefaults {
  static constexpr int kIsHalf = 0;
  static constexpr int kGated = 0;
  static constexpr int kReduces = 0;
  static constexpr int kWeights = 1;
  static constexpr int kWeightIsKN = 0;
  static constexpr int kIsPart = 0;
  static constexpr int kSplit = 0;
  static constexpr int kIsBiased = 0;
  static constexpr int kHasCorrection = 0;
  static constexpr int kHasPosition = 0;
  static constexpr int kHasBias = 0;
  static constexpr int kBlockRows = 0;
  static constexpr int kHasSpan = 0;
  static constexpr int kHasSinks = 0;
  static constexpr float kScoreCap = 0.0f;
  static constexpr int kKeeps = 0;
  static constexpr int kGainOffset = 0;
  static constexpr int kNormalizesRotated = 0;
  static constexpr float kEmbeddingScale = 1.0f;
  static constexpr int kTables = 1;
  static constexpr int kShared = 0;
  static constexpr int kMayHaveNoRows = 0;
  static constexpr int kOwnRows = 0;     // whether a tile has as many rows of x as its task
  static constexpr int kStageBytes = 0;  // of each stage of the program's functions, if it is known
  static constexpr int kHasPeers = 0;  // whether tiles of the program may be stored on peers
  static constexpr int kFills = 0;
  static constexpr int kHasCount = 0;
  static constexpr int kHasNone = 0;
  static constexpr int kHasOwn = 0;
  static constexpr int kOwnExperts = 0;  // 0: all experts are on each rank
  static constexpr int kScaleBits = 0;  // of an element of scales; 0: weights have none
  static constexpr int kScaleShift = 0;
  static constexpr int kScaleHasBlocks = 0;
  static constexpr int kQuantizes = 0;  // whether x has codes and scales, too
};

// Call kNumber of a graph. A derived struct has `Function`, `Coord` and `at(g, t)`, the coordinate
// of task t, and for an `Epilogue` that of its tiles. What it declares replaces members of this one:
// as many rows of operand(), wait(), notify() and peer() as it has constants for.
template <class Args, int kNumber, class LaneQueue = void>
struct CallDefaults : VariantDefaults {
  using Defaults = CallDefaults;
  using Queue = LaneQueue;  // of a dynamic program: see queue/README.md
  static constexpr int kCall = kNumber;
  static constexpr int kWorld = Args::kWorld;
  static constexpr u32 kRoles = 0;
  static constexpr int kReads = 0;
  static constexpr int kWrites = 0;
  static constexpr int kWaits = 0;
  static constexpr int kFreeWaits = 0;  // the first waits, which load nothing
  static constexpr int kNotifies = 0;
  static constexpr int kPeers = 0;  // ranks that a task writes to or notifies
  static constexpr int kLoads = 0;  // whether data selects what a task accesses or waits for
  static constexpr int kLimit = 0;  // a number for the tensor with the count of the tasks, or 0
  static constexpr int kCountIsGiven = 0;  // whether that count is known without a wait
  static constexpr int kMayBeIdle = 0;     // whether all regions that a task writes may be empty
  static constexpr int kLoadsAhead = 0;    // whether streams may be loaded before the waits are met
  static constexpr int kWaitsAhead = 0;    // but for the first ones, so many
  static constexpr int kReadsBeforeWait = 0;
  static constexpr int kNotifiesPeers = 0;
  static constexpr int kNotifiesRanks = 0;  // whether all notify one element, on several ranks
  static constexpr int kNotifiesWhen = 0;   // whether some notifications have conditions
  static constexpr int kFar = 0;            // whether a task may send to a rank of another host
  static constexpr int kQueued = 0;
  static constexpr int kGating = 0;
  static constexpr int kMaybeZero = 0;
  static constexpr int kWaitsForPeers = 0;
  static constexpr int kHasFlags = 0;   // whether it accesses flagged tensors
  static constexpr int kFlagWaits = 0;  // the events that these carry, which its body waits for

  // Units in one turn of the loops around the call; nanoseconds per task.
  ETC_DEVICE static i32 units(const Args& g) { return g.units[kCall]; }
  ETC_DEVICE static i32 pace(const Args&) { return 0; }
  // In a dynamic program, the lane's number of the first unit.
  ETC_DEVICE static i32 first_unit(const Args& g) { return g.first_units[kCall]; }

  template <class Coord>
  ETC_DEVICE static EventRef wait(const Args&, const Coord&, int) {
    return {};
  }
  template <class Coord>
  ETC_DEVICE static EventRef notify(const Args&, const Coord&, int) {
    return {};
  }
  template <class Coord>
  ETC_DEVICE static i32 peer(const Args&, const Coord&, int) {
    return 0;
  }
  ETC_DEVICE static i32 extent(const Args&, int) { return 1; }
  template <int n, class Coord, class F>
  ETC_DEVICE static void notified(const Args&, const Coord&, F&&) {}
  // Whether what the waits load is in range; the same of accesses and notifications.
  template <class Coord>
  ETC_DEVICE static bool waits_in_range(const Args&, const Coord&) {
    return true;
  }
  template <class Coord>
  ETC_DEVICE static bool in_range(const Args&, const Coord&) {
    return true;
  }
};

template <class ProgramArgs>
struct ProgramDefaults {
  using Args = ProgramArgs;
  using TensorCalls = CallList<>;
  using TransferCalls = CallList<>;
  static constexpr int kWorld = Args::kWorld;
  static constexpr int kTensorTickets = 0;  // whether its units are claimed by tickets
  static constexpr int kDynamic = 0;
  static constexpr int kLimits = 0;  // tensors with counts of tasks
  static constexpr int kTrace = 0;
};

}  // namespace etc
