// The shares of a task of attention, and the loads of its stages: see functions/attend.py.
#pragma once
#include "functions/paged_rows.cuh"

namespace etc {

// The operands of a call, and its shares.
template <class Call>
struct AttendCall {
  static constexpr int kGain = 1 + Call::kHasBias, kSpan = kGain + Call::kNormalizes;
  static constexpr int kSinks = kSpan + Call::kHasSpan, kCosSin = kSinks + Call::kHasSinks;
  static constexpr int kTable = kCosSin + 1;
  static constexpr int kCache = kTable + 1, kExtents = kCache + 1;
  static constexpr int kBounds = kExtents + 1, kSums = kBounds + 1, kStats = kSums + 1;
  static constexpr int kY = kStats + 1;
  static constexpr i32 kDim = Call::kHeadDim, kStage = Call::kStage, kBlock = 16;
  static constexpr i32 kBlocks = kStage / kBlock;
  static constexpr u32 kRowBytes = kDim * 2, kValues = kStage * kRowBytes;  // values follow keys
  static constexpr u32 kStageBytes = 2 * kValues, kMostStages = Call::kMostBytes / kStageBytes;

  // The positions that a row attends to: from `begin` to before `end`.
  struct Positions {
    i32 begin, end;

    ETC_DEVICE i32 first_stage() const { return Call::kHasSpan ? begin / kStage : 0; }
    ETC_DEVICE i32 stages() const { return (end + kStage - 1) / kStage - first_stage(); }
  };
  // The row and the stage of it at which a share begins, and the stages of all rows before.
  struct Bound {
    i32 row, stage;
    u32 before;
  };
  // Of one worker: where its two lists begin, and the second one ends.
  struct Lists {
    Bound first, second, end;

    // The stages of each list, and of both while both last.
    ETC_DEVICE u32 count0() const { return second.before - first.before; }
    ETC_DEVICE u32 count1() const { return end.before - second.before; }
    ETC_DEVICE u32 both() const { return 2 * (count0() < count1() ? count0() : count1()); }
  };
  // What the compute threads get to know of a task, as words of its WorkItem.
  struct Words {
    typename Call::Coord c;
    Lists lists;
    Positions positions[2];  // of the row with which each list begins
  };

  // The first share of a task.
  template <class Program>
  ETC_DEVICE static i32 first_share(const Run<Program>& run, const typename Call::Coord& c) {
    return c.axis_j * num_lists(run);
  }
  template <class Program>
  ETC_DEVICE static i32 num_lists(const Run<Program>& run) {
    return Call::number_shares_of_task(run.g);
  }
  template <class Program>
  ETC_DEVICE static Lists lists(const Run<Program>& run, const typename Call::Coord& c) {
    const auto bounds = last_axes<2>(Call::template operand<kBounds>(run.g, c));
    const i32 share = first_share(run, c);
    const auto bound = [&](i32 share_idx) ETC_INLINE {
      const uint4 words = ptx::load16_l2(u64(bounds.at(share_idx)));
      return Bound{i32(words.x), i32(words.y), words.z};
    };
    return {bound(share), bound(share + 1), bound(share + num_lists(run))};
  }
};

// What a worker reads.
template <class Call>
struct AttendSource {
  using Of = AttendCall<Call>;
  Pages<Call::kHeadDim> pages;
  u64 extents, table;
  u32 table_bytes;  // of a request
  i32 rows;

  // A row: its positions, how many of them earlier steps stored, and its request.
  struct Row {
    typename Of::Positions positions;
    i32 num_stored;
    u32 request;
  };

  template <class Program>
  ETC_DEVICE AttendSource(const Run<Program>& run, const typename Call::Coord& c)
      : pages(Call::template operand<Of::kCache>(run.g, c)) {
    const auto of_rows = last_axes<2>(Call::template operand<Of::kExtents>(run.g, c));
    const auto numbers = Call::template operand<Of::kTable>(run.g, c);
    extents = u64(of_rows.at()), rows = of_rows.size[0];
    table = u64(numbers.at()), table_bytes = u32(numbers.stride[0]) * 4;
  }
  // The last row for one that does not exist.
  ETC_DEVICE Row row(i32 row_idx) const {
    const uint4 words = ptx::load16_l2(extents + minimum(row_idx, rows - 1) * 16);
    return {{i32(words.x), i32(words.y)}, i32(words.z), words.w};
  }
};

// The stages of a list that are still to be loaded. kKeeps: how L2 keeps them.
template <class Call, CachePolicy kKeeps = kEvictFirst>
struct AttendFeed {
  using Of = AttendCall<Call>;
  using Source = AttendSource<Call>;
  static constexpr i32 kStage = Of::kStage, kBlock = Of::kBlock;
  static constexpr u32 kRowBytes = Of::kRowBytes;
  static constexpr i32 kRun = Call::kPageSize < kStage ? Call::kPageSize : kStage;
  static constexpr i32 kPages = kStage / kRun, kRunBlocks = kRun / kBlock;
  // NOTE: an access takes longer than a stage. So page numbers are loaded in groups, one ahead.
  // For larger ones, a thread has no registers.
  static constexpr i32 kGroup = 4;
  u32 num_left;
  i32 row, stage;   // the next stage, from position 0 on
  i32 end, num_stored;  // positions of the row: all, and those of earlier steps
  u64 numbers;      // the address of the page numbers of its request
  typename Source::Row next;
  u32 page[kGroup], ahead[kGroup];  // of the next stage and others, and those that follow

  ETC_DEVICE AttendFeed(
      const Source& source, const typename Of::Bound& begin, u32 count,
      const typename Source::Row& first)
      : num_left(count), row(begin.row), stage(begin.stage), next(first) {
    if (num_left == 0) return;
    stage += next.positions.first_stage();
    begin_row(source);
  }
  ETC_DEVICE u32 bytes() const {
    return num_left == 0 ? 0 : u32(own_blocks()) * (2 * kBlock * kRowBytes);
  }
  // Whether earlier steps stored all positions of the next stage.
  ETC_DEVICE bool is_stored() const { return num_left == 0 || (stage + 1) * kStage <= num_stored; }
  // Fetches the next stage into L2.
  ETC_DEVICE void prefetch(const Source& source) const {
    if (num_left == 0) return;
    each_run(source, [&](i32, u64 key, u32 size) ETC_INLINE {
      ptx::prefetch_l2(key, size);
      ptx::prefetch_l2(key + source.pages.value_bytes, size);
    });
  }
  ETC_DEVICE void load(const Source& source, const Stage& target) {
    if (num_left == 0) return;
    each_run(source, [&](i32 n, u64 key, u32 size) ETC_INLINE {
      const u32 place = target.at + u32(n * kRun) * kRowBytes;
      ptx::load_bytes(place, key, size, target.full, kKeeps);
      ptx::load_bytes(
          place + Of::kValues, key + source.pages.value_bytes, size, target.full, kKeeps);
    });
    ++stage;
    if (--num_left > 0) find_stage(source);
  }

 private:
  // Calls f(its number, its first key, bytes) for each run of the next stage.
  template <class F>
  ETC_DEVICE void each_run(const Source& source, F f) const {
    const i32 count = own_blocks(), slot = stage * kStage % Call::kPageSize;
#pragma unroll
    for (i32 n = 0; n < kPages; ++n) {
      const i32 in_run = minimum(count - n * kRunBlocks, kRunBlocks);
      if (in_run <= 0) break;
      // Before the window of a row, pages may be out of range.
      const u32 page_idx = page_of(n);
      const bool is_page = !Call::kHasSpan || page_idx < source.pages.count;
      f(n, source.pages.key(is_page ? page_idx : 0, slot), u32(in_run * kBlock) * kRowBytes);
    }
  }
  ETC_DEVICE i32 blocks() const { return (end + kBlock - 1) / kBlock; }
  ETC_DEVICE i32 own_blocks() const {
    return minimum(blocks() - stage * Of::kBlocks, Of::kBlocks);
  }
  ETC_DEVICE i32 first_page() const { return i32(u32(stage * kStage) / Call::kPageSize); }
  ETC_DEVICE u32 page_of(i32 n) const {
    const i32 first = first_page() % kGroup;
    u32 page_id = page[n];
#pragma unroll
    for (i32 i = kPages; i < kGroup; i += kPages) {
      if (first == i) page_id = page[i + n];
    }
    return page_id;
  }
  // NOTE: the next row is loaded a row ahead, so that nothing waits for it.
  ETC_DEVICE void begin_row(const Source& source) {
    end = next.positions.end, num_stored = next.num_stored;
    numbers = source.table + u64(next.request) * source.table_bytes;
    next = source.row(row + 1);
    const i32 group = first_page() / kGroup;
    load_pages(page, group);
    load_pages(ahead, group + 1);
  }
  ETC_DEVICE void load_pages(u32 (&page_ids)[kGroup], i32 group) const {
    const i32 num_used = (end + Call::kPageSize - 1) / Call::kPageSize - group * kGroup;
#pragma unroll
    for (i32 n = 0; n < kGroup; ++n) {
      page_ids[n] = ptx::load4_l2_if(n < num_used, numbers + u32(group * kGroup + n) * 4);
    }
  }
  ETC_DEVICE void find_stage(const Source& source) {
    if (stage * Of::kBlocks < blocks()) {
      if (stage * kStage % (kGroup * Call::kPageSize) != 0) return;
#pragma unroll
      for (i32 n = 0; n < kGroup; ++n) page[n] = ahead[n];
      load_pages(ahead, first_page() / kGroup + 1);
      return;
    }
#pragma unroll 1
    do {
      ++row, stage = next.positions.first_stage();
      begin_row(source);
    } while (stage * Of::kBlocks >= blocks());
  }
};

// What the roles of tasks that attend share: `Prepared` has the number of stages, `count`, and what
// the compute threads get to know, `words`.
template <class Call, class Words>
struct AttendRoles : Roles {
  static constexpr u32 kUniformStageBytes = AttendCall<Call>::kStageBytes;
  static constexpr u32 kDataWords = sizeof(Words) / 4;

  template <class Program, class Prepared>
  ETC_DEVICE static u32 size(const Run<Program>&, const Prepared& prepared) {
    return prepared.count + 1;
  }
  template <class Program>
  ETC_DEVICE static RingStages stages(const Run<Program>&, u32 size) {
    return {size > 0 ? size - 1 : 0, kUniformStageBytes};
  }
  template <class Program, class Prepared>
  ETC_DEVICE static void data(
      const Run<Program>&, const Prepared& prepared, u32, u32 (&words)[kDataWords]) {
#pragma unroll
    for (u32 n = 0; n < kDataWords; ++n) {
      words[n] = reinterpret_cast<const u32*>(&prepared.words)[n];
    }
  }
};

}  // namespace etc
