// The queries of attention, and their scores.
#pragma once
#include "functions/attend_stages.cuh"
#include "functions/rotary.cuh"

namespace etc {

template <class Call>
struct AttendQuery {
  using Of = AttendCall<Call>;
  using Own = Head<Of::kDim, Call::kIsHalf>;
  using OwnTurn = Turn<Of::kDim, Call::kNormalizes != 0>;

  // A head is that of four neighbouring lanes, see Head. Its bias; first: the head's element of the
  // operand.
  template <class Program>
  ETC_DEVICE static void load_bias(
      const Run<Program>& run, const typename Call::Coord& c, i32 first, bool is_head, Own& bias) {
    if constexpr (Call::kHasBias) {
      const auto biases = last_axes<1>(Call::template operand<1>(run.g, c));
      bias.load(u64(biases.at(first)), i32(ptx::lane() % 4), is_head);
    }
  }
  // What turns the heads of a row with `length` positions up to its own.
  template <class Program>
  ETC_DEVICE static OwnTurn turn(
      const Run<Program>& run, const typename Call::Coord& c, i32 length) {
    const auto cos_sin = Call::template operand<Of::kCosSin>(run.g, c);
    u64 gain = 0;
    if constexpr (Call::kNormalizes) {
      gain = u64(last_axes<1>(Call::template operand<Of::kGain>(run.g, c)).at());
    }
    i32 place = length > 0 ? length - 1 : 0;
    if constexpr (Call::kTables > 1) {
      const auto span = last_axes<1>(Call::template operand<Of::kSpan>(run.g, c));
      place += i32(ptx::load4_l2(u64(span.at(1))));
    }
    return OwnTurn(gain, u64(cos_sin.at(place)), i32(ptx::lane() % 4), length > 0);
  }
  // Adds the bias, normalizes and rotates a head; by whole warps.
  ETC_DEVICE static void apply(Own& head, const Own& bias, const OwnTurn& turn) {
    if constexpr (Call::kHasBias) head.add(bias);
    head.template rotate<Call::kNormalizes != 0, Call::kGainOffset, Call::kNormalizesRotated != 0>(
        turn, Call::kEps);
  }

  ETC_DEVICE static float weight(float score, float most) {
    return most == minus_infinity() ? 0.0f : ptx::exp2(score - most);
  }
  // kScoreCap * tanh(score / kScoreCap), in units of log 2.
  ETC_DEVICE static float capped(float score) {
    if constexpr (Call::kScoreCap == 0.0f) {
      return score;
    } else {
      const float power = ptx::exp2(score * (2.8853900817779268f / Call::kScoreCap));
      return Call::kScoreCap * (1.0f - __fdividef(2.0f, 1.0f + power));
    }
  }
  ETC_DEVICE static bool is_among(i32 position, i32 begin, i32 end) {
    return (!Call::kHasSpan || position >= begin) && position < end;
  }
  // Two of mma's elements, of positions `position` and the next one, if these are among others; else
  // zeros. NOTE: at other positions the cache may contain NaNs.
  ETC_DEVICE static u32 mask(i32 position, i32 begin, i32 end) {
    return (is_among(position, begin, end) ? 0xffffu : 0u) |
           (is_among(position + 1, begin, end) ? 0xffff0000u : 0u);
  }
};

}  // namespace etc
