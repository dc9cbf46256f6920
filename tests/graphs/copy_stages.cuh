// Copies tiles of 64 columns through ring stages of kRows rows, without a store role.
#pragma once
#include "ptx/bulk_copy.cuh"
#include "worker/computes.cuh"
#include "worker/stage_ring.cuh"

namespace etc {

template <u32 kRows>
struct StageCopy {
  static constexpr u32 kStageBytes = kRows * 128;

  u32 control, buffer;
  static constexpr u32 kControlBytes = 0;
  struct Counters {};

  ETC_DEVICE void init() const {}

  template <u32, class Program>
  ETC_DEVICE bool compute(
      const Run<Program>& run, StageReader<Program>& stages, const Work& work, Counters&) const {
    static_assert(StageRing<Program>::kBytes == 20 * 1024, "RING_BYTES in stages.py");
    const uint2 place = ptx::load_shared8(work.data);
    const u64 to = u64(place.y) << 32 | place.x;
    bool lost = false;
    for (u32 first = 0; first < work.size; first += kRows) {
      const u32 from = stages.address(stages.next(kStageBytes));
      lost = __any_sync(~0u, lost || !stages.wait_full(run));
      for (u32 i = ptx::thread(); i < kRows * 8; i += 256) {
        const u32 row = i / 8, unit = i % 8;
        if (lost || first + row >= work.size) continue;
        const uint4 v = ptx::load_shared16(from + row * 128 + ((unit ^ row % 8) << 4));
        ptx::store16(to + (first + row) * 128 + unit * 16, v);
      }
      __syncwarp();
      if (!lost) stages.release(stages.count() - 1);
    }
    return !ptx::named_barrier_any<128>(2 + ptx::thread() / 128, lost);
  }
};

template <class Call>
struct copy_stages : Roles {
  using Compute = StageCopy<Call::kRows>;
  using Coord = typename Call::Coord;
  static constexpr u32 kDataWords = 2;

  template <class Program>
  ETC_DEVICE static u32 size(const Run<Program>& run, const Coord& c) {
    return u32(Call::template operand<0>(run.g, c).size[0]);
  }
  template <class Program>
  ETC_DEVICE static RingStages stages(const Run<Program>&, u32 rows) {
    return {(rows + Call::kRows - 1) / Call::kRows, Compute::kStageBytes};
  }
  template <class Program>
  ETC_DEVICE static void data(const Run<Program>& run, const Coord& c, u32, u32 (&words)[2]) {
    const u64 to = u64(Call::template operand<1>(run.g, c).at());
    words[0] = u32(to), words[1] = u32(to >> 32);
  }
  template <class Program, class Publish, class Loaded>
  ETC_DEVICE static bool load(
      const Run<Program>& run, StageLoader<Program>& stages, const Coord& c, u32 rows,
      Publish publish, Loaded loaded) {
    publish();
    const Box x = Call::template operand<0>(run.g, c).box();
    for (u32 n = 0; n * Call::kRows < rows; ++n) {
      Stage stage;
      if (!stages.begin(run, Compute::kStageBytes, Compute::kStageBytes, false, stage)) return false;
      for (u32 i = 0; i < Call::kRows; i += 8) {
        const Box box = {x.map, x.x, x.y + i32(n * Call::kRows + i), x.z};
        ptx::load_box(stage.at + i * 128, box, stage.full);
      }
      loaded(n + 1);
    }
    return true;
  }
};

}  // namespace etc
