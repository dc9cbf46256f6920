// Equal shares of the positions that the rows of a step attend to, by arithmetic.
#pragma once
#include "functions/paged_rows.cuh"
#include "ptx/warp.cuh"

namespace etc {

// Operands: those of PagedRows; extents [rows, 4], bounds [shares + 1, 4], combined [most, 3],
// num_combined [1]; with kBlockRows, blocks [1 + most, 2]. A row has a unit for its fixed time, and
// one for each stage.
template <class Task>
struct plan_shares {
  using Rows = PagedRows<Task, 0>;
  static constexpr i32 kThreads = Task::threads;

  ETC_DEVICE static void run(const Task& task) {
    const Layout layout(task.scratch);
    i32 rows = last_axes<2>(task.template operand<Rows::kEnd>()).size[0];
    const i32 num_shares = last_axes<2>(task.template operand<Rows::kEnd + 1>()).size[0] - 1;
    mark_written(task, layout, rows);
    task.sync();  // all are marked
    find_extents(task, layout, rows);
    task.sync();  // the stages of rows are known
    if constexpr (Task::kBlockRows > 0) rows = list_blocks(task, layout, rows);
    if (ptx::warp() == 0) add_stages(layout, rows);
    task.sync();  // so are those before them
    find_bounds(task, layout, rows, num_shares);
    task.sync();  // the bounds are known
    if (ptx::warp() == 0) list_combined(task, layout, rows, num_shares);
  }

 private:
  static constexpr i32 kStage = Task::kStage;

  // In scratch memory: the stages of each row, then those before it, after `add_stages`; of each
  // share, the row and the unit of it where the share begins, and the same where shares begin with
  // slices. Before: a bit for each page that a row writes to. At last, a bit for each row that begins
  // a run, and the number of rows of shares.
  struct Layout {
    i32 *before, *row, *unit, *rounded;
    u32 *written_pages, *begin_bits;
    i32* num_rows;
    ETC_DEVICE explicit Layout(u32* scratch)
        : before(reinterpret_cast<i32*>(scratch)),
          row(before + Task::kMostRows + 1),
          unit(row + Task::kMostShares + 1),
          rounded(unit + Task::kMostShares + 1),
          written_pages(reinterpret_cast<u32*>(row)),
          begin_bits(reinterpret_cast<u32*>(rounded + Task::kMostShares + 1)),
          num_rows(reinterpret_cast<i32*>(begin_bits + kBeginWords)) {}
    // After `add_stages`.
    ETC_DEVICE i32 stages(i32 row_idx) const { return before[row_idx + 1] - before[row_idx]; }
  };
  static constexpr i32 kBeginWords = Task::kMostRows / 32;
  static_assert(
      (Task::kMostRows + 1 + 3 * (Task::kMostShares + 1) + kBeginWords + 1) * 4 <=
      Shared::kScratchBytes);
  static_assert(Task::kMarks / 32 <= 3 * (Task::kMostShares + 1));

  ETC_DEVICE static void mark_written(const Task& task, const Layout& layout, i32 rows) {
#pragma unroll 1
    for (i32 n = task.thread; n < Task::kMarks / 32; n += kThreads) layout.written_pages[n] = 0;
    task.sync();  // no page is marked
#pragma unroll 1
    for (i32 r = task.thread; r < rows; r += kThreads) {
      const auto row = Rows::row(task, r);
      if (row.length == 0) continue;
      const u64 numbers = Rows::pages(task, row.request);
      const u32 page = ptx::load4_l2(numbers + row.position / Task::kPageSize * 4) % Task::kMarks;
      atomicOr(&layout.written_pages[page / 32], 1u << page % 32);
    }
  }
  // A warp per row: reads its page numbers.
  ETC_DEVICE static void find_extents(const Task& task, const Layout& layout, i32 rows) {
    const u32 num_cache_pages = u32(task.number_pages(task.g));
#pragma unroll 1
    for (i32 r = i32(ptx::warp()); r < rows; r += kThreads / 32) {
      const auto row = Rows::row(task, r);
      const i32 begin = Rows::begin(task, row.length);
      const u64 numbers = Rows::pages(task, row.length > 0 ? row.request : 0);
      const i32 num_pages = (row.length + Task::kPageSize - 1) / Task::kPageSize;
      bool is_out = false;
      i32 num_stored = num_pages;  // pages before the first one that a row writes to
#pragma unroll 4
      for (i32 n = begin / Task::kPageSize + task.thread % 32; n < num_pages; n += 32) {
        const u32 page = ptx::load4_l2(numbers + n * 4), mark = page % Task::kMarks;
        is_out = is_out || page >= num_cache_pages;
        const bool is_written = (layout.written_pages[mark / 32] >> mark % 32 & 1) != 0;
        if (is_written) num_stored = minimum(num_stored, n);
      }
      const bool is_there = !__any_sync(~0u, is_out) && row.length > 0;
      const u32 before = ~ptx::warp_max(~u32(num_stored)) * Task::kPageSize;
      if (task.thread % 32 == 0) {
        const u64 target = u64(last_axes<2>(task.template operand<Rows::kEnd>()).at(r));
        const uint4 extent = make_uint4(u32(begin), u32(row.length), before, u32(row.request));
        ptx::store16(target, is_there ? extent : make_uint4(0, 0, 0, 0));
        layout.before[r] = is_there ? (row.length + kStage - 1) / kStage - begin / kStage : 0;
      }
    }
  }

  // Lists blocks of the last rows. Returns the number of the rows before.
  ETC_DEVICE static i32 list_blocks(const Task& task, const Layout& layout, i32 rows) {
    const auto blocks = last_axes<2>(task.template operand<Rows::kEnd + 4>());
    if (blocks.size[0] == 1) {
      if (task.thread == 0) ptx::store8(u64(blocks.at()), 0, 0);
      return rows;
    }
#pragma unroll 1
    for (i32 n = task.thread; n < kBeginWords; n += kThreads) layout.begin_bits[n] = 0;
    task.sync();  // no row begins a run
    const u64 extents = u64(last_axes<2>(task.template operand<Rows::kEnd>()).at());
#pragma unroll 1
    for (i32 r = task.thread; r < rows; r += kThreads) {
      const uint4 extent = ptx::load16_l2(extents + u64(r) * 16);
      const uint4 before = ptx::load16_l2(extents + u64(maximum(r - 1, 0)) * 16);
      bool is_next = extent.y == 0 && before.y == 0;
      is_next = is_next || (before.y > 0 && extent.y == before.y + 1 && extent.w == before.w);
      if (r == 0 || !is_next) atomicOr(&layout.begin_bits[r / 32], 1u << r % 32);
    }
    task.sync();  // all runs are known
    if (ptx::warp() == 0) list_runs(layout, blocks, rows);
    task.sync();  // so are all blocks
    return *layout.num_rows;
  }
  // By one warp.
  template <class Blocks>
  ETC_DEVICE static void list_runs(const Layout& layout, const Blocks& blocks, i32 rows) {
    constexpr i32 kBlockRows = Task::kBlockRows;
    const i32 most = blocks.size[0] - 1, lane = i32(ptx::lane());
    i32 num_rows = rows, count = 0;
#pragma unroll 1
    while (num_rows > 0) {
      i32 word = (num_rows - 1) / 32;
      u32 bits = layout.begin_bits[word] & ~0u >> (31 - (num_rows - 1) % 32);
      while (bits == 0) bits = layout.begin_bits[--word];
      const i32 first = word * 32 + 31 - __clz(i32(bits)), size = num_rows - first;
      const i32 num_blocks = (size + kBlockRows - 1) / kBlockRows;
      const bool is_there = layout.before[first] > 0;
      const bool is_last = is_there ? size >= Task::kLeastRun : num_rows == rows;
      if (!is_last || count + num_blocks > most) break;
#pragma unroll 1
      for (i32 n = lane; n < num_blocks; n += 32) {
        const i32 begin = n * kBlockRows;
        ptx::store8(
            u64(blocks.at(1 + count + n)), u32(first + begin),
            u32(minimum(kBlockRows, size - begin)));
      }
      count += num_blocks, num_rows = first;
    }
#pragma unroll 1
    for (i32 n = count + lane; n < most; n += 32) ptx::store8(u64(blocks.at(1 + n)), 0, 0);
    __syncwarp();  // the stages have been read
    if (lane == 0) {
      ptx::store8(u64(blocks.at()), u32(count), 0);
      *layout.num_rows = num_rows;
      if (num_rows == 0) layout.before[0] = layout.before[1] = 0;  // for the bounds of shares
    }
  }

  // By one warp; each lane has adjacent rows.
  ETC_DEVICE static void add_stages(const Layout& layout, i32 rows) {
    const i32 rows_per_lane = (rows + 31) / 32, first = i32(ptx::lane()) * rows_per_lane;
    u32 sum = 0;
#pragma unroll 1
    for (i32 r = first; r < minimum(first + rows_per_lane, rows); ++r) sum += u32(layout.before[r]);
    i32 before = i32(ptx::warp_sum_before(sum));
#pragma unroll 1
    for (i32 r = first; r < minimum(first + rows_per_lane, rows); ++r) {
      const i32 stages = layout.before[r];
      layout.before[r] = before;
      before += stages;
    }
    if (first + rows_per_lane >= rows && first < rows) layout.before[rows] = before;
  }

  // Units before a row.
  ETC_DEVICE static i32 units(const Layout& layout, i32 row) { return layout.before[row] + row; }
  // The last row whose units begin at `unit` or before.
  ETC_DEVICE static i32 row_of(const Layout& layout, i32 rows, i32 unit) {
    i32 low = 0, high = rows - 1;
#pragma unroll 1
    while (low < high) {
      const i32 middle = (low + high + 1) / 2;
      if (units(layout, middle) <= unit) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }
  // The nearest end of a slice.
  ETC_DEVICE static i32 rounded_of(i32 unit, i32 stages, i32 num_cuts) {
    i32 first = 0, end = stages + 1;
    if (num_cuts > 0) {
      const i32 cut = cut_of<Task>(stages), slice = maximum(unit - 1, 0) / cut;
      first = slice * cut + i32(slice > 0);
      end = minimum(end, (slice + 1) * cut + 1);
    }
    return 2 * (unit - first) >= end - first ? end : first;
  }

  ETC_DEVICE static void find_bounds(
      const Task& task, const Layout& layout, i32 rows, i32 num_shares) {
    const i32 total = units(layout, rows), num_cuts = task.number_cuts(task.g);
    const i32 num_lists = task.number_lists(task.g);
#pragma unroll 1
    for (i32 s = task.thread; s < num_shares; s += kThreads) {
      const i32 exact = i32(u64(u32(total)) * u32(s) / u32(num_shares));
      const i32 row = row_of(layout, rows, exact), unit = exact - units(layout, row);
      layout.row[s] = row;
      layout.unit[s] = unit;
      layout.rounded[s] = rounded_of(unit, layout.stages(row), num_cuts);
    }
    task.sync();
    // Whether some worker gets much more than its part if shares begin with rows.
    bool is_long = false;
    if (num_cuts == 0) {
      const auto end = [&](i32 share) {
        return share < num_shares ? units(layout, layout.row[share]) + layout.rounded[share]
                                  : total;
      };
#pragma unroll 1
      for (i32 s = task.thread * num_lists; s < num_shares; s += kThreads * num_lists) {
        const u64 list_units = u64(u32(end(minimum(s + num_lists, num_shares)) - end(s)));
        is_long = is_long ||
                  list_units * u32(num_shares) >
                      u64(u32(total)) * u32(num_lists) + u32(Task::kSlack * num_shares);
      }
    }
    is_long = ptx::named_barrier_any<kThreads>(1, is_long);
    const auto bounds = last_axes<2>(task.template operand<Rows::kEnd + 1>());
#pragma unroll 1
    for (i32 s = task.thread; s <= num_shares; s += kThreads) {
      i32 row = rows, stage = 0, slot = num_cuts > 0 ? rows * num_cuts : 2 * s;
      if (s < num_shares) {
        const i32 unit = is_long ? layout.unit[s] : layout.rounded[s];
        row = layout.row[s];
        const bool is_next = unit > layout.stages(row);
        row += i32(is_next);
        stage = is_next ? 0 : maximum(unit - 1, 0);
        layout.row[s] = row;
        layout.unit[s] = stage;
        if (num_cuts > 0) {
          slot = row * num_cuts + (stage > 0 ? stage / cut_of<Task>(layout.stages(row)) : 0);
        }
      }
      const u32 before = u32(layout.before[row] + stage);
      ptx::store16(u64(bounds.at(s)), make_uint4(u32(row), u32(stage), before, u32(slot)));
    }
  }

  // By one warp: appends the entries of the lanes that have one, in order.
  ETC_DEVICE static void append(
      const Task& task, bool has_entry, i32 row, i32 slot, i32 num_slices, i32& count) {
    const u32 all = __ballot_sync(~0u, has_entry);
    if (has_entry) {
      i32* const entry = last_axes<2>(task.template operand<Rows::kEnd + 2>()).at(
          count + __popc(all & ((1u << ptx::lane()) - 1)));
      entry[0] = row, entry[1] = slot, entry[2] = num_slices;
    }
    count += __popc(all);
  }
  ETC_DEVICE static void list_combined(
      const Task& task, const Layout& layout, i32 rows, i32 num_shares) {
    const i32 num_cuts = task.number_cuts(task.g);
    const i32 most = last_axes<2>(task.template operand<Rows::kEnd + 2>()).size[0];
    i32 count = 0;
    if (num_cuts > 0) {
#pragma unroll 1
      for (i32 first = 0; first < rows; first += 32) {
        const i32 row = first + i32(ptx::lane());
        const i32 stages = row < rows ? layout.stages(row) : 0, cut = cut_of<Task>(stages);
        const i32 num_slices = (stages + cut - 1) / cut;
        append(task, num_slices > 1, row, row * num_cuts, num_slices, count);
      }
    } else {
#pragma unroll 1
      for (i32 first = 1; first < num_shares; first += 32) {
        const i32 share = first + i32(ptx::lane());
        // The first share that begins within a row finds the last one.
        bool is_first = share < num_shares && layout.unit[share] > 0;
        is_first = is_first &&
            (layout.row[share - 1] != layout.row[share] || layout.unit[share - 1] == 0);
        i32 end = share;
        while (is_first && end < num_shares && layout.unit[end] > 0 &&
            layout.row[end] == layout.row[share]) {
          ++end;
        }
        __syncwarp();
        append(
            task, is_first, is_first ? layout.row[share] : 0, 2 * share - 1, 2 * (end - share),
            count);
      }
    }
#pragma unroll 1
    for (i32 n = count + i32(ptx::lane()); n < most; n += 32) {
      i32* const entry = last_axes<2>(task.template operand<Rows::kEnd + 2>()).at(n);
      entry[0] = entry[1] = entry[2] = 0;
    }
    if (ptx::lane() == 0) *task.template operand<Rows::kEnd + 3>().at() = count;
  }
};

}  // namespace etc
