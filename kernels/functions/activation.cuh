// The activation of an expert: f(gate) * (up + shift), of clamped sums. Numbers are given by their
// bits; a limit of 0 is none.
#pragma once
#include "common/types.cuh"

namespace etc {

template <int kFunction, int kAlphaBits, int kLimitBits, int kShiftBits>
struct Activation {
  enum { kSilu, kGeluTanh };
  static constexpr int kOneBits = 0x3f800000;

  ETC_DEVICE static float apply(float gate, float up) {
    if constexpr (kLimitBits != 0) {
      // NOTE: comparisons keep NaN, minima would not.
      const float limit = __int_as_float(kLimitBits);
      gate = gate > limit ? limit : gate;
      up = up > limit ? limit : up < -limit ? -limit : up;
    }
    if constexpr (kShiftBits != 0) up += __int_as_float(kShiftBits);
    return active(gate) * up;
  }

 private:
  // gate times the sigmoid of a number, as in silu().
  ETC_DEVICE static float active(float gate) {
    if constexpr (kFunction == kSilu && kAlphaBits == kOneBits) return silu(gate);
    float scaled = gate * __int_as_float(kAlphaBits);
    if constexpr (kFunction == kGeluTanh) {
      scaled = 1.5957691216f * __fmaf_rn(0.044715f * gate * gate, gate, gate);
    }
    return __fdividef(gate, 1.0f + ptx::exp2(scaled * -1.4426950408889634f));
  }
};

using SwigluActivation = Activation<0, 0x3f800000, 0, 0>;
template <class Call>
using ActivationOf = Activation<
    Call::kActivation, Call::kAlphaBits, Call::kLimitBits, Call::kShiftBits>;

}  // namespace etc
