// Operands and events of a task, as the generated index maps return them.
#pragma once
#include "common/types.cuh"

namespace etc {

// 128 opaque bytes that the driver fills; <cuda.h> is not available to NVRTC.
struct __align__(128) TensorMap {
  u64 opaque[16];
};

// A region of a tensor on `rank`: per axis start, clipped size and stride in elements.
template <class T, int R>
struct Tile {
  static constexpr int kRank = R;
  T* base;
  i32 rank;
  i32 start[R];
  i32 size[R];
  i64 stride[R];

  // Elements of the region.
  ETC_DEVICE u64 count() const {
    u64 elements = 1;
#pragma unroll
    for (int axis = 0; axis < R; ++axis) elements *= u64(size[axis]);
    return elements;
  }

  // Address of the region's element at the given offsets (missing ones are zero).
  template <class... I>
  ETC_DEVICE T* at(I... offset) const {
    const i32 given[R] = {i32(offset)...};
    i64 linear = 0;
#pragma unroll
    for (int axis = 0; axis < R; ++axis) linear += i64(start[axis] + given[axis]) * stride[axis];
    return base + linear;
  }
};

template <class T, int R>
ETC_DEVICE Tile<T, R> make_tile(
    u64 base, i32 rank, const i32 (&shape)[R], const i32 (&start)[R], const i32 (&size)[R]) {
  Tile<T, R> tile;
  tile.base = reinterpret_cast<T*>(base);
  tile.rank = rank;
  i64 stride = 1;
#pragma unroll
  for (int axis = R - 1; axis >= 0; --axis) {
    tile.start[axis] = start[axis];
    tile.size[axis] = maximum(0, minimum(size[axis], shape[axis] - start[axis]));
    tile.stride[axis] = stride;
    stride *= shape[axis];
  }
  return tile;
}

// The origin of a bulk tensor copy: innermost coordinate first.
struct Box {
  const TensorMap* map;
  i32 x, y, z;
};

// How long L2 keeps what a bulk copy reads, as `createpolicy` encodes it.
enum CachePolicy : u64 { kEvictFirst = 0x12F0000000000000, kEvictLast = 0x14F0000000000000 };

// An element of the event counters of `rank`; `target` is the count that meets it.
// `cross_rank` selects the memory scope; it is a constant once the map is inlined.
struct EventRef {
  i32 rank;
  u32 index;
  u32 target;
  bool cross_rank;
};

// NOTE: a plain load, so that the compiler reads an element once for all maps of a task. It is
// not moved before the acquire loads of the waits for its events, since these clobber memory.
ETC_DEVICE i32 load_index(u64 tensor, i32 offset) {
  return reinterpret_cast<const i32*>(tensor)[offset];
}

}  // namespace etc
