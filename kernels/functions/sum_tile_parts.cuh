// The final reduction of split-K: adds the parts of a slice of a tile, and applies the epilogue of
// tile_matmul. See functions/tile_parts.cuh. Operands: the parts [parts, words] of the slice, of a
// gated tile those of gate and those of up; then y, on this rank and on others.
#pragma once
#include "functions/tile_matmul.cuh"

namespace etc {

template <class Call>
struct sum_tile_parts : Roles {
  using Compute = typename FamilyOf<Call, sizeof(Call::kTiles) / sizeof(int)>::Family;
  using Place = typename EpilogueOf<Call>::Type::Place;
  static constexpr u32 kVariant = Call::kGated * kGatedTile | kSumOfParts;
  // The place of y, the shape, and the addresses of the parts.
  static constexpr u32 kDataWords = Place::kWords + 1 + TileParts::kWords;
  static constexpr bool kWritesPeers = Call::kWrites > 1;

  template <class Program>
  ETC_DEVICE static u32 size(const Run<Program>& run, const typename Call::Coord& c) {
    return u32(last_axes<2>(Call::template operand<0>(run.g, c)).size[0]);  // parts
  }
  template <class Program>
  ETC_DEVICE static RingStages stages(const Run<Program>&, u32) {
    return {0, 0};  // the compute warps load parts into registers
  }
  template <class Program>
  ETC_DEVICE static void data(
      const Run<Program>& run, const typename Call::Coord& c, u32, u32 (&words)[kDataWords]) {
    const auto parts = last_axes<2>(Call::template operand<0>(run.g, c));
    const auto y = last_axes<2>(Call::template operand<Call::kReads>(run.g, c));
    const u64 first = u64(parts.at(0, 0));
    u64 up = first;
    if constexpr (Call::kGated) up = u64(last_axes<2>(Call::template operand<1>(run.g, c)).at(0, 0));
    const u32 row_bytes = u32(y.stride[0]) * 2, peer_bits = peers_of<Call>(run, c);
    Place{u64(y.at(0, 0)), row_bytes, y.size[0], y.size[1], peer_bits}.write(words);
    words[Place::kWords] = u32(Call::number_packed_tile(run.g));
    TileParts{first, u32(parts.stride[0]) * 4, u32(up - first)}.write(words + Place::kWords + 1);
  }
  template <class Program, class Publish, class Loaded>
  ETC_DEVICE static bool load(
      const Run<Program>& run, StageLoader<Program>& loader, const typename Call::Coord& c,
      u32 size, Publish publish, Loaded loaded) {
    return load(run, loader, c, size, publish, [] { return true; }, loaded);
  }
  template <class Program, class Publish, class Started, class Loaded>
  ETC_DEVICE static bool load(
      const Run<Program>&, StageLoader<Program>&, const typename Call::Coord&, u32,
      Publish publish, Started started, Loaded) {
    if (!started()) return false;
    publish();
    return true;
  }
};

}  // namespace etc
