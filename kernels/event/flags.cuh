// Flagged words: 4 bytes of data, and the epoch in which they were written. A word is stored and
// loaded at once, so that data of an earlier epoch never have a new one.
//
// Epoch e has the area e % 2 of all flagged tensors. A rank writes it again in epoch e + 2, after
// its run e + 1, which has waited for each peer to which it writes: that peer has begun e + 1, so it
// has read all words of e. The proof shows this wait; so no handshake is needed. Words keep the
// epochs of earlier runs, and are never cleared.
#pragma once
#include "event/wait.cuh"

namespace etc {

template <class Program>
class Flags {
 public:
  ETC_DEVICE explicit Flags(const Run<Program>& run)
      : run_(run), area_(u64(run.epoch & 1) * u32(run.g.flag_bytes)) {}

  // Stores 16 bytes of data at the address of a flagged element.
  ETC_DEVICE void store16(u64 address, uint4 words) const {
    ptx::store_words(address + area_, {word(words.x), word(words.y)});
    ptx::store_words(address + area_ + 16, {word(words.z), word(words.w)});
  }

  // Loads 16 bytes of data from each of kCount addresses, `step` bytes apart, once all of them that
  // are `is_needed` are of this epoch. False if the program was aborted or the limit has passed.
  template <int kCount>
  ETC_DEVICE bool load16(
      u64 address, u64 step, const bool (&is_needed)[kCount], uint4 (&vectors)[kCount]) const {
    return spin<false>(run_, run_.g.wait_limit, [&] {
      // NOTE: all are loaded, without branches, so that the loads are in flight together.
      ptx::TwoWords low[kCount], high[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const u64 source = address + area_ + i * step;
        low[i] = ptx::load_words(source), high[i] = ptx::load_words(source + 16);
      }
      bool is_new = true;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const bool is_own = has_epoch(low[i]) & has_epoch(high[i]);
        is_new = is_new & (is_own | !is_needed[i]);
        vectors[i] = make_uint4(
            u32(low[i].first), u32(low[i].second), u32(high[i].first), u32(high[i].second));
      }
      return is_new;
    });
  }

 private:
  ETC_DEVICE u64 word(u32 data) const { return u64(run_.epoch) << 32 | data; }
  ETC_DEVICE bool has_epoch(const ptx::TwoWords& words) const {
    return (u32(words.first >> 32) == run_.epoch) & (u32(words.second >> 32) == run_.epoch);
  }

  const Run<Program>& run_;
  u64 area_;
};

}  // namespace etc
