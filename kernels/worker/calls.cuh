// The calls of a lane, in order, as a generated list of types.
#pragma once
#include "common/types.cuh"

namespace etc {

// Whether the units of a call come from a queue, once all their waits are met.
template <class Call>
constexpr bool kIsQueued = Call::kQueued != 0;

// The tasks of a call that become ready together, or those of a turn of the loops around it.
struct Group {
  i32 tasks;
  Divisor by_units;
};

template <class Call, class Args>
ETC_DEVICE i32 group_units(const Args& g) {
  return Call::group(g).tasks;
}
// Groups are numbered row-major over the axes that distinguish them.
template <class Call, class Args>
ETC_DEVICE i32 num_groups(const Args& g) {
  i32 count = 1;
#pragma unroll
  for (int axis = 0; axis < Call::kGating; ++axis) count *= Call::extent(g, axis);
  return count;
}

template <i32 n, class First, class... Rest>
struct NthType : NthType<n - 1, Rest...> {};
template <class First, class... Rest>
struct NthType<0, First, Rest...> {
  using Type = First;
};
template <i32 n, class... Types>
using NthOf = typename NthType<n, Types...>::Type;
// The position of a type among others.
template <class Type, class... Types>
ETC_DEVICE constexpr u32 position_of() {
  u32 n = 0;
  (void)((kIsSame<Types, Type> || (++n, false)) || ...);
  return n;
}

template <class... Calls>
struct CallList {
  static constexpr int kCount = sizeof...(Calls);
  static constexpr bool kHasLoops = false;
  // The roles of all calls together.
  static constexpr u32 kRoles = (0u | ... | u32(Calls::kRoles));

  template <class Args>
  ETC_DEVICE static i32 units(const Args& g) {
    return (0 + ... + Calls::units(g));
  }

  // Whether p(Call{}) is true for any call.
  template <class P>
  ETC_DEVICE static constexpr bool any(P f) {
    return (false || ... || f(Calls{}));
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
    if constexpr (kCount > 0) f(NthOf<0, Calls...>{});
  }

  // Calls f(Call{}, unit within the call) for the call that `unit` of the lane belongs to.
  template <class Args, class F>
  ETC_DEVICE static void visit(const Args& g, i32 unit, F&& f) {
    bool is_found = false;
    ((is_found || !in_call<Calls>(g, unit) ? false : (is_found = true, f(Calls{}, unit), true)),
     ...);
  }

  // The units of a call from `unit` of it on.
  template <class Call, class Args>
  ETC_DEVICE static i32 left(const Args& g, i32 unit) {
    return Call::units(g) - unit;
  }

  // The position of a call.
  template <class Call>
  ETC_DEVICE static constexpr i32 index() {
    return i32(position_of<Call, Calls...>());
  }
  // Calls f(Call{}) for the call at position `call_idx`, one of [kFirst, kEnd), by halving.
  template <i32 kFirst, i32 kEnd, class F>
  ETC_DEVICE static void select(i32 call_idx, F f) {
    if constexpr (kEnd - kFirst == 1) {
      f(NthOf<kFirst, Calls...>{});
    } else if constexpr (kEnd > kFirst) {
      constexpr i32 kMiddle = (kFirst + kEnd) / 2;
      if (call_idx < kMiddle) {
        select<kFirst, kMiddle>(call_idx, f);
      } else {
        select<kMiddle, kEnd>(call_idx, f);
      }
    }
  }

 private:
  template <class Call, class Args>
  ETC_DEVICE static bool in_call(const Args& g, i32& unit) {
    const i32 num_units = Call::units(g);
    if (unit < num_units) return true;
    unit -= num_units;
    return false;
  }
};

// The turns of a loop: their number, and the units of each.
struct Turns {
  i32 num_turns, num_units;
  Divisor by_units;
};

// A loop of a lane over `Items`, calls and loops: in each turn the units of the first item, then
// those of the second, and so on. `Own` is generated: Own::turns(g).
template <class Own, class... Items>
struct Loop {
  template <class Args>
  ETC_DEVICE static i32 units(const Args& g) {
    return Own::turns(g).num_turns * Own::turns(g).num_units;
  }
};

// The calls of calls and loops.
template <class... First, class... Second>
ETC_DEVICE constexpr auto operator+(CallList<First...>, CallList<Second...>) {
  return CallList<First..., Second...>{};
}
template <class Call>
struct CallsOf {
  using List = CallList<Call>;
};
template <class... Items>
using CallsIn = decltype((CallList<>{} + ... + typename CallsOf<Items>::List{}));
template <class Own, class... Items>
struct CallsOf<Loop<Own, Items...>> {
  using List = CallsIn<Items...>;
};

// The calls of a lane that has loops; Call::units are those of one turn.
template <class... Items>
struct LoopedCalls : CallsIn<Items...> {
  static constexpr bool kHasLoops = true;

  template <class Args>
  ETC_DEVICE static i32 units(const Args& g) {
    return (0 + ... + Items::units(g));
  }

  // As visit() of CallList; the units of a call are numbered turn by turn. The last units of a turn
  // may belong to no call.
  template <class Args, class F>
  ETC_DEVICE static void visit(const Args& g, i32 unit, F&& f) {
    visit_items<Items...>(g, unit, 0, f);
  }
  // As left() of CallList, of the same turn.
  template <class Call, class Args>
  ETC_DEVICE static i32 left(const Args& g, i32 unit) {
    const i32 num_units = Call::units(g);
    return num_units - mod_by(unit, num_units, Call::group(g).by_units);
  }

 private:
  // The unit of one turn of these items; `turn` counts the turns of all loops around them.
  template <class... Inner, class Args, class F>
  ETC_DEVICE static void visit_items(const Args& g, i32 unit, i32 turn, F& f) {
    bool is_found = false;
    ((is_found || !in_item<Inner>(g, unit) ? void()
                                           : (is_found = true, enter(Inner{}, g, unit, turn, f))),
     ...);
  }
  template <class Call, class Args, class F>
  ETC_DEVICE static void enter(Call call, const Args& g, i32 unit, i32 turn, F& f) {
    f(call, turn * Call::units(g) + unit);
  }
  template <class Own, class... Inner, class Args, class F>
  ETC_DEVICE static void enter(
      Loop<Own, Inner...>, const Args& g, i32 unit, i32 turn, F& f) {
    const Turns turns = Own::turns(g);
    const i32 inner = div_by(unit, turns.by_units);
    visit_items<Inner...>(g, unit - inner * turns.num_units, turn * turns.num_turns + inner, f);
  }
  template <class Item, class Args>
  ETC_DEVICE static bool in_item(const Args& g, i32& unit) {
    const i32 num_units = Item::units(g);
    if (unit < num_units) return true;
    unit -= num_units;
    return false;
  }
};

}  // namespace etc
