// The distinct Compute structs of a program's tensor lane: see worker/roles.cuh.
#pragma once
#include "worker/calls.cuh"
#include "worker/roles.cuh"
#include "worker/shared.cuh"

namespace etc {

template <class Call>
using FunctionOf = typename Call::template Function<Call>;
template <class Call>
using ComputeOf = typename FunctionOf<Call>::Compute;

template <class Compute, class Call>
constexpr bool uses_compute() {
  if constexpr (has_role<Call>(kComputeRole)) return kIsSame<ComputeOf<Call>, Compute>;
  return false;
}

template <class Compute>
struct CountersOf {
  typename Compute::Counters counters{};
};

template <class... Computes>
struct ComputeList {
  static constexpr u32 kCount = sizeof...(Computes);

  // The counters of one role, for each Compute.
  struct Counters : CountersOf<Computes>... {
    template <class Compute>
    ETC_DEVICE typename Compute::Counters& of() {
      return static_cast<CountersOf<Compute>&>(*this).counters;
    }
  };

  template <class Compute>
  ETC_DEVICE static constexpr u32 index() {
    return position_of<Compute, Computes...>();
  }
  // The control bytes of all before `end`.
  ETC_DEVICE static constexpr u32 control_bytes(u32 end) {
    u32 n = 0, bytes = 0;
    ((bytes += n++ < end ? (Computes::kControlBytes + 7) / 8 * 8 : 0), ...);
    return bytes;
  }
  template <class Program, class Compute>
  ETC_DEVICE static Compute make(u32 base) {
    constexpr u32 kControl = Shared::kControlOffset + control_bytes(index<Compute>());
    Compute compute;
    compute.control = base + kControl, compute.buffer = base + kBufferOffset<Program>;
    return compute;
  }

  // Calls f(Compute object), for each one, while it returns true.
  template <class Program, class F>
  ETC_DEVICE static bool each(u32 base, F f) {
    return (true && ... && f(make<Program, Computes>(base)));
  }
  // Calls f(Compute object) of the n-th one.
  template <class Program, class F>
  ETC_DEVICE static void visit(u32 base, u32 n, F f) {
    if constexpr (kCount == 1) {
      (f(make<Program, Computes>(base)), ...);
    } else {
      ((n == index<Computes>() ? f(make<Program, Computes>(base)) : void()), ...);
    }
  }
};

// For CallList::sum(): appends the Compute of a call unless the list has it.
template <class... Computes, class Call>
ETC_DEVICE constexpr auto operator+(ComputeList<Computes...> list, Call) {
  if constexpr (!has_role<Call>(kComputeRole)) {
    return list;
  } else if constexpr ((false || ... || kIsSame<Computes, ComputeOf<Call>>)) {
    return list;
  } else {
    return ComputeList<Computes..., ComputeOf<Call>>{};
  }
}
template <class Calls>
using ComputesOf = decltype(Calls::sum(ComputeList<>{}));

// kVariant of all calls that have this Compute.
template <class Compute, class... Calls>
ETC_DEVICE constexpr u32 variants(CallList<Calls...>) {
  u32 all = 0;
  const auto add = [&](auto call) {
    using Call = decltype(call);
    if constexpr (uses_compute<Compute, Call>()) all |= FunctionOf<Call>::kVariant;
  };
  (add(Calls{}), ...);
  return all;
}

// The words that work items carry, at most.
template <class... Calls>
ETC_DEVICE constexpr i32 data_words(CallList<Calls...>) {
  i32 most = 0;
  const auto count = [&](auto call) {
    using Call = decltype(call);
    if constexpr (has_role<Call>(kComputeRole)) {
      most = maximum(most, i32(FunctionOf<Call>::kDataWords));
    }
  };
  (count(Calls{}), ...);
  return most;
}

// Offsets in a worker's shared memory that depend on the program. The host only assumes that
// kStageOffset is at most MOST_STAGE_OFFSET in codegen/layout.py.
template <class Program>
struct SharedOf {
  using Calls = typename Program::TensorCalls;
  using Computes = ComputesOf<Calls>;
  static constexpr u32 kAlignment = 1024;  // of the ring of stages
  // Words of a work item, padded so that compute threads can load 16 bytes at once.
  static constexpr u32 kDataWords = (u32(data_words(Calls{})) + 3) / 4 * 4;
  static_assert(kDataWords <= Shared::kMostDataWords);
  static constexpr u32 kDataOffset =
      (Shared::kControlOffset + Computes::control_bytes(Computes::kCount) + 15) / 16 * 16;
  static constexpr u32 kDataEnd = kDataOffset + Shared::kWorkItems * 4 * kDataWords;
  static constexpr u32 kStageOffset = (kDataEnd + kAlignment - 1) / kAlignment * kAlignment;
};

}  // namespace etc
