// The shape of a matrix multiplication's tiles, and the place of a tile in y.
#pragma once
#include "worker/task.cuh"

namespace etc {

// A shape as the host packs it. number: of its mainloop in the program. depth: boxes of x in a
// stage, 128 bytes of each row; in Python elements of k. loaded: the rows of x that are loaded, at
// most `rows`: of all tasks of a launch, or of one.
struct TileShape {
  u32 number, is_swapped, depth, rows, columns, num_loaded;

  ETC_DEVICE static constexpr TileShape of(u32 packed) {
    return {packed & 255,            packed >> 8 & 1,         packed >> 9 & 7,
            (packed >> 12 & 63) * 8, (packed >> 18 & 63) * 8, (packed >> 24 & 63) * 8};
  }
  // The packed shape with another number of rows that are loaded.
  ETC_DEVICE static constexpr u32 with_loaded(u32 packed, u32 num_loaded) {
    return (packed & 0xffffffu) | num_loaded / 8 << 24;
  }
  // Whether each task has its own number of rows of x.
  ETC_DEVICE constexpr bool is_wide() const { return is_swapped != 0 && columns > 128; }
  ETC_DEVICE constexpr u32 box_x() const { return rows * 128; }
  // kRowBytes: of a row of w in a box.
  template <u32 kRowBytes = 128>
  ETC_DEVICE constexpr u32 box_w() const {
    return columns * kRowBytes;
  }
  // The bytes of a stage in shared memory: boxes of w, then boxes of x.
  template <u32 kRowBytes = 128>
  ETC_DEVICE constexpr u32 bytes() const {
    return depth * (box_x() + box_w<kRowBytes>());
  }
  template <u32 kRowBytes = 128>
  ETC_DEVICE constexpr u32 loaded_bytes() const {
    return depth * (num_loaded * 128 + box_w<kRowBytes>());
  }
  // Of a swapped tile: 0 if the warpgroups multiply alternate boxes along k, 1 if each has half of
  // the columns.
  // NOTE: without comparisons, for which the compiler would duplicate the code.
  ETC_DEVICE constexpr u32 halves() const { return (columns - 1) >> 6; }
  ETC_DEVICE constexpr u32 warpgroup_columns() const { return columns >> halves(); }
  // The boxes of a stage that a warpgroup multiplies.
  ETC_DEVICE constexpr u32 warpgroup_boxes() const { return depth >> (1 - halves()); }
};

// The packed shape of a work item, at a shared address.
// NOTE: the result is warp-uniform, so that descriptors stay in uniform registers. Callers read it
// again after the mainloop: otherwise the compiler copies the mainloop for each later branch.
ETC_DEVICE TileShape read_shape(u32 shared) {
  return TileShape::of(__shfl_sync(~0u, ptx::load_shared(shared), 0));
}

// The tile shapes [kBegin, kEnd) of a program.
template <class All, u32 kBegin, u32 kEnd>
struct TileRange {
  static constexpr TileShape kFirst = TileShape::of(All::kAll[kBegin]);

  // Whether f(shape) holds for any of them.
  template <class F>
  ETC_DEVICE static constexpr bool any(F f) {
    for (u32 n = kBegin; n < kEnd; ++n) {
      if (f(TileShape::of(All::kAll[n]))) return true;
    }
    return false;
  }
  ETC_DEVICE static constexpr u32 most_columns() {
    u32 most = 0;
    for (u32 n = kBegin; n < kEnd; ++n) {
      const u32 columns = TileShape::of(All::kAll[n]).columns;
      most = columns > most ? columns : most;
    }
    return most;
  }
  // Calls f(Number<packed>{}) for shape `shape_idx`.
  template <class F>
  ETC_DEVICE static void with(u32 shape_idx, F f) {
    with_number<kEnd - kBegin, kBegin>(
        shape_idx, [&](auto n) ETC_INLINE { f(Number<All::kAll[decltype(n)::value]>{}); });
  }
};

// The size of a task's tile of y, clipped at the edges of y.
struct TileSize {
  i32 rows, columns;
};

// A bit for each rank that gets a copy of a task's y.
template <class Call, int n = 1, class Program>
ETC_DEVICE u32 peers_of(const Run<Program>& run, const typename Call::Coord& c) {
  if constexpr (n == Call::kWrites) {
    return 0;
  } else {
    const i32 rank = Call::template operand<Call::kReads + n>(run.g, c).rank;
    return 1u << rank | peers_of<Call, n + 1>(run, c);
  }
}

// The address of a tile in y, its size, and the peers that get a copy at the same place. It is
// passed to the compute warps in the words of a work item.
template <bool kHasPeers>
struct TilePlace {
  static constexpr int kWords = kHasPeers ? 5 : 4;
  u64 at;
  u32 row_bytes;
  i32 rows, columns;  // clipped at the edges of y
  u32 peer_bits;      // a bit for each rank

  ETC_DEVICE void write(u32* words) const {
    words[0] = u32(at), words[1] = u32(at >> 32), words[2] = row_bytes;
    words[3] = u32(rows) | u32(columns) << 16;
    if constexpr (kHasPeers) words[4] = peer_bits;
  }
  ETC_DEVICE static TilePlace read(u32 shared) {
    const uint4 words = ptx::load_shared16(shared);
    const u32 peer_bits = kHasPeers ? ptx::load_shared(shared + 16) : 0;
    return {u64(words.x) | u64(words.y) << 32, words.z, i32(words.w & 0xffffu),
            i32(words.w >> 16), peer_bits};
  }

  // Calls f(place) for each peer, then for the own rank. The next rank comes first, so that each
  // rank receives from one at a time. `words`: the shared address of the words.
  // NOTE: the words are read again for each rank, so that they occupy no registers in between.
  template <class Program, class F>
  ETC_DEVICE void each_rank(const Run<Program>& run, u32 words, F f) const {
    if constexpr (kHasPeers) {
      TilePlace place = read(words);
#pragma unroll 1
      for (i32 n = place.peer_bits != 0 ? 1 - Program::kWorld : 0;; ++n, place = read(words)) {
        const i32 before = run.g.rank + n, rank = before < 0 ? before + Program::kWorld : before;
        if (n < 0) place.at += run.g.peer[rank] - run.self();
        if (n == 0 || (place.peer_bits >> rank & 1) != 0) f(place);
        if (n == 0) break;
      }
    } else {
      f(*this);
    }
  }
};

}  // namespace etc
