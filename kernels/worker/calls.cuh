// The calls of a lane, in order, as a generated list of types.
#pragma once
#include "common/types.cuh"

namespace etc {

template <class... Calls>
struct CallList {
  static constexpr int kCount = sizeof...(Calls);
  // The roles of all calls together.
  static constexpr u32 kRoles = (0u | ... | u32(Calls::kRoles));

  template <class Args>
  ETC_DEVICE static i32 units(const Args& g) {
    return (0 + ... + Calls::units(g));
  }

  // Whether p(Call{}) is true for any call.
  template <class P>
  ETC_DEVICE static constexpr bool any(P p) {
    return (false || ... || p(Calls{}));
  }

  // start + Call{} for every call, from left to right.
  template <class Start>
  ETC_DEVICE static constexpr auto sum(Start start) {
    return (start + ... + Calls{});
  }

  // Calls f(Call{}) for every call.
  template <class F>
  ETC_DEVICE static void each(F f) {
    (f(Calls{}), ...);
  }

  // Calls f(Call{}) for the first call, if there is any.
  template <class F>
  ETC_DEVICE static void first(F f) {
    bool called = false;
    ((called || (f(Calls{}), called = true)), ...);
  }

  // Calls f(Call{}, unit within the call) for the call that `unit` of the lane belongs to.
  template <class Args, class F>
  ETC_DEVICE static void visit(const Args& g, i32 unit, F&& f) {
    bool found = false;
    ((found || !in_call<Calls>(g, unit) ? false : (found = true, f(Calls{}, unit), true)), ...);
  }

 private:
  template <class Call, class Args>
  ETC_DEVICE static bool in_call(const Args& g, i32& unit) {
    const i32 n = Call::units(g);
    if (unit < n) return true;
    unit -= n;
    return false;
  }
};

}  // namespace etc
