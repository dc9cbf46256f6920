// Routes rows to tiles of their experts. The first rows, at most 16, choose their top-k experts and
// weights here; the choices of the others are read. With kOwnExperts, only so many experts are on
// each rank: the others have no tiles. Scratch memory has the choices of one block of rows at a time,
// and of the other blocks the number of rows of each expert.
#pragma once
#include "functions/router.cuh"

namespace etc {

template <class Task>
struct route_rows {
  static constexpr i32 kTopK = Task::kTopK, kExperts = Task::kExperts;
  static constexpr i32 kWarps = Task::threads / 32;
  // Scratch memory for a block of so many rows.
  static constexpr i32 bytes_of(i32 rows) {
    return (kExperts * (rows / 32 + 2) + 1) * 4 + rows * kTopK * 2;
  }
  static constexpr i32 kScratch = i32(Shared::kScratchBytes);
  static constexpr i32 kBlock =
      bytes_of(512) <= kScratch ? 512 : bytes_of(256) <= kScratch ? 256 : 128;
  static constexpr i32 kPerLane = (kExperts + 31) / 32;   // adjacent experts for each lane
  static constexpr u32 kNone = 0xffff;          // the choice of a row without a request
  static constexpr i32 kPlace = Task::kReads + 2;  // an operand
  using Choice = ExpertChoice<Task>;

  ETC_DEVICE static void run(const Task& task) {
    run(task, [] { return true; });
  }
  // ready() waits for the logits and the known choices; false after an abort.
  template <class Ready>
  ETC_DEVICE static void run(const Task& task, Ready ready) {
    static_assert(bytes_of(kBlock) <= kScratch);
    const i32 rows = num_rows(task.template operand<kPlace>());
    const Layout layout(task.scratch, minimum(rows, kBlock));
    for (i32 i = task.thread; i < kExperts * (layout.num_words + 1); i += Task::threads) {
      layout.other_rows[i] = 0;  // and layout.choice_bits
    }
    if (!ready()) return;
    task.sync();
    const i32 num_chosen = task.template operand<0>().size[0];  // in this task
    if (num_chosen < rows) read(task, layout, 0, num_chosen, minimum(rows, kBlock));
#pragma unroll 1
    for (i32 first = kBlock; first < rows; first += kBlock) {
      each_choice(task, first, 0, minimum(rows - first, kBlock), [&](i32, i32 expert) {
        if (expert >= 0) atomicAdd(&layout.other_rows[expert], 1u);
      });
    }
    if (num_chosen > kWarps) {
      choose<2>(task, layout);
    } else if (num_chosen > 0) {
      choose<1>(task, layout);
    }
    task.sync();
    const i32 most = task.number_tile_rows(task.g);
    const bool is_gathered = task.number_gathers(task.g) != 0;
    if (task.thread < 32) number_tiles(task.thread, layout, most, is_gathered);
    task.sync();
    list_tiles(task, layout, most, is_gathered, rows);
    locate(task, layout, most, is_gathered, 0, minimum(rows, kBlock));
#pragma unroll 1
    for (i32 first = kBlock; first < rows; first += kBlock) {
      const i32 block_rows = minimum(rows - first, kBlock);
      task.sync();  // the block before has been read
      pass_block(task, layout, first == kBlock);
      task.sync();
      read(task, layout, first, 0, block_rows);
      task.sync();
      locate(task, layout, most, is_gathered, first, block_rows);
    }
  }

 private:
  // In scratch memory. other_rows [kExperts]: the rows of other blocks that chose the expert; after
  // the first block, those of earlier ones. choice_bits [num_words][kExperts]: a bit for each row of
  // the block that did. tile [kExperts + 1]: the first tile of each expert, then the number of tiles.
  // choice [rows][kTopK]: the experts of each row of the block.
  struct Layout {
    i32 num_words;
    u32 *other_rows, *choice_bits, *tile;
    u16* choice;

    // rows: the most of a block.
    ETC_DEVICE Layout(u32* scratch, i32 rows)
        : num_words((rows + 31) / 32),
          other_rows(scratch),
          choice_bits(other_rows + kExperts),
          tile(choice_bits + kExperts * num_words),
          choice(reinterpret_cast<u16*>(tile + kExperts + 1)) {}
    // Sets choice i of the block, an expert or -1.
    ETC_DEVICE void mark(i32 i, i32 expert) const {
      const i32 row = i / kTopK;
      choice[i] = u16(expert);
      if (expert >= 0) atomicOr(&choice_bits[row / 32 * kExperts + expert], 1u << row % 32);
    }
    // The number of rows of the block, before row `end` of it, that chose an expert.
    ETC_DEVICE i32 count(i32 expert, i32 end) const {
      i32 sum = 0;
#pragma unroll 4
      for (i32 word_idx = 0; word_idx * 32 < end; ++word_idx) {
        const i32 num_left = end - word_idx * 32;
        const u32 mask = num_left >= 32 ? ~0u : (1u << num_left) - 1;
        sum += __popc(choice_bits[word_idx * kExperts + expert] & mask);
      }
      return sum;
    }
    ETC_DEVICE i32 count(i32 expert) const { return count(expert, num_words * 32); }
    ETC_DEVICE i32 count_all(i32 expert) const { return count(expert) + i32(other_rows[expert]); }
  };

  // The last two axes are rows and choices.
  template <class Choice>
  ETC_DEVICE static i32 num_rows(const Choice& choices) {
    return choices.size[Choice::kRank - 2];
  }

  template <int kRows>
  ETC_DEVICE static void choose(const Task& task, const Layout& layout) {
    Choice::template choose<kRows>(
        task, 0, task.template operand<Task::kReads>(), task.template operand<Task::kReads + 1>(),
        [&](i32 row, i32 k, i32 expert) { layout.mark(row * kTopK + k, held(task, expert)); });
  }

  // The expert, or -1 if another rank has it.
  ETC_DEVICE static i32 held(const Task& task, i32 expert) {
    if constexpr (Task::kOwnExperts > 0) {
      const i32 first = task.g.rank * Task::kOwnExperts;
      if (u32(expert - first) >= u32(Task::kOwnExperts)) return -1;
    }
    return expert;
  }

  // Calls f(i, expert or -1) for choice i of the block that begins with row `block`: for the known
  // choices of its rows [first, end).
  template <class F>
  ETC_DEVICE static void each_choice(const Task& task, i32 block, i32 first, i32 end, F f) {
    constexpr int kAtOnce = 4;
    const u64 ids = u64(task.template operand<2>().at() + block * kTopK);
    const i32 end_choice = end * kTopK;
#pragma unroll 1
    for (i32 first_choice = first * kTopK + task.thread; first_choice < end_choice;
         first_choice += kAtOnce * Task::threads) {
      u32 experts[kAtOnce];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const i32 i = first_choice + n * Task::threads;
        experts[n] = i < end_choice ? ptx::load4_l2(ids + i * 4) : 0;
      }
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const i32 i = first_choice + n * Task::threads;
        if (i < end_choice) f(i, held(task, i32(experts[n])));
      }
    }
  }
  ETC_DEVICE static void read(
      const Task& task, const Layout& layout, i32 block, i32 first, i32 end) {
    each_choice(task, block, first, end, [&](i32 i, i32 expert) { layout.mark(i, expert); });
  }

  // Adds the rows of the block to those of earlier ones, and clears its bits.
  ETC_DEVICE static void pass_block(const Task& task, const Layout& layout, bool is_first) {
#pragma unroll 1
    for (i32 expert = task.thread; expert < kExperts; expert += Task::threads) {
      const u32 before = is_first ? 0 : layout.other_rows[expert];
      layout.other_rows[expert] = before + u32(layout.count(expert));
#pragma unroll 1
      for (i32 word_idx = 0; word_idx < layout.num_words; ++word_idx) {
        layout.choice_bits[word_idx * kExperts + expert] = 0;
      }
    }
  }

  ETC_DEVICE static i32 tiles_of(i32 rows, i32 most, bool is_gathered) {
    return is_gathered ? (rows + most - 1) / most : minimum(rows, 1);
  }

  // One warp computes the first tile of each expert: a prefix sum.
  ETC_DEVICE static void number_tiles(
      i32 lane, const Layout& layout, i32 most, bool is_gathered) {
    i32 num_tiles[kPerLane], sum = 0;
#pragma unroll
    for (i32 i = 0; i < kPerLane; ++i) {
      const i32 expert = lane * kPerLane + i;
      num_tiles[i] = expert < kExperts ? tiles_of(layout.count_all(expert), most, is_gathered) : 0;
      sum += num_tiles[i];
    }
    u32 first = ptx::warp_sum_before(sum);
    if (lane == 31) layout.tile[kExperts] = first + sum;
#pragma unroll
    for (i32 i = 0; i < kPerLane; ++i) {
      const i32 expert = lane * kPerLane + i;
      if (expert < kExperts) layout.tile[expert] = first;
      first += num_tiles[i];
    }
  }

  // One thread writes the tiles of an expert; then all threads clear the unused tiles.
  ETC_DEVICE static void list_tiles(
      const Task& task, const Layout& layout, i32 most, bool is_gathered, i32 rows) {
    const auto tile_list = task.template operand<Task::kReads + 3>();
    constexpr int kAxis = decltype(tile_list)::kRank - 2;
    const auto write = [&](i32 tile, i32 expert, i32 count) {
      if (count > 0) expert -= task.g.rank * Task::kOwnExperts;
      ptx::store8(u64(tile_list.at() + 2 * tile), u32(expert), u32(count));
    };
    constexpr i32 kSteps = (kExperts + Task::threads - 1) / Task::threads;
#pragma unroll
    for (i32 n = 0; n < kSteps; ++n) {
      const i32 expert = task.thread + n * Task::threads;
      if (expert >= kExperts) break;
      const i32 count = layout.count_all(expert), first = i32(layout.tile[expert]);
      const i32 num_tiles = tiles_of(count, most, is_gathered);
#pragma unroll 1
      for (i32 i = 0; i < num_tiles; ++i) {
        write(first + i, expert, is_gathered ? minimum(count - i * most, most) : rows);
      }
    }
    const i32 num_tiles = i32(layout.tile[kExperts]);
    if (task.thread == 0) *task.template operand<Task::kReads + 4>().at() = num_tiles;
#pragma unroll 1
    for (i32 tile = num_tiles + task.thread; tile < tile_list.size[kAxis]; tile += Task::threads) {
      write(tile, 0, 0);
    }
  }

  // Writes the place of each choice of the block that begins with row `block`.
  ETC_DEVICE static void locate(
      const Task& task, const Layout& layout, i32 most, bool is_gathered, i32 block, i32 rows) {
    const auto place = task.template operand<kPlace>();
    const i32 stride = task.number_stride(task.g);
#pragma unroll 1
    for (i32 i = task.thread; i < rows * kTopK; i += Task::threads) {
      const i32 row = i / kTopK;
      const u32 expert = layout.choice[i];
      i32 place_row = -1;
      if (expert != kNone) {
        const i32 num_earlier = block > 0 ? i32(layout.other_rows[expert]) : 0;
        const i32 row_idx = is_gathered ? num_earlier + layout.count(expert, row) : block + row;
        const i32 tile = row_idx / most;
        place_row = (i32(layout.tile[expert]) + tile) * stride + row_idx - tile * most;
      }
      *Choice::at_choice(place, block + row, i % kTopK) = place_row;
    }
  }
};

}  // namespace etc
