// RMSNorm of a row, or of the sum of a residual and what an `Added` computes.
#pragma once
#include "ptx/warp.cuh"
#include "worker/task.cuh"

namespace etc {

// The vectors of a row that a thread has at once: eight columns each, `kStep` apart.
template <class Task>
struct RowVectors {
  static constexpr i32 kAtOnce = 4;
  static constexpr i32 kStep = Task::threads * 8;
  using Sums = Sum8<Task::kIsHalf>[kAtOnce];

  // Of the row at `source`, from `column` on; zeros after its end.
  ETC_DEVICE static void fetch(u64 source, i32 column, i32 columns, uint4 (&vectors)[kAtOnce]) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const i32 own_column = column + i * kStep;
      vectors[i] = ptx::load16_l2_if(own_column < columns, source + own_column * 2);
    }
  }
};

// Adds nothing: the norm is that of x.
struct NothingAdded {
  template <class Task>
  ETC_DEVICE explicit NothingAdded(const Task&) {}
};

// Adds nothing to the row of an id.
template <class Task>
struct EmbeddedRow {
  u64 x;

  ETC_DEVICE explicit EmbeddedRow(const Task& task) {
    const auto embedding = task.template operand<0>();
    const u32 id = ptx::load4_l2(u64(task.template operand<1>().at()));
    x = u64(embedding.at(id < u32(embedding.size[0]) ? id : 0));
  }
};

// Adds nothing to a row that is copied.
template <class Task>
struct CopiedRow {
  u64 x;

  ETC_DEVICE explicit CopiedRow(const Task& task) : x(u64(task.template operand<0>().at())) {}
};

// Adds x.
template <class Task>
struct AddedRow {
  using Vectors = RowVectors<Task>;
  u64 x;

  ETC_DEVICE explicit AddedRow(const Task& task) : x(u64(task.template operand<0>().at())) {}
  ETC_DEVICE void add(i32 column, i32 columns, typename Vectors::Sums& sums) const {
    uint4 vectors[Vectors::kAtOnce];
    Vectors::fetch(x, column, columns, vectors);
#pragma unroll
    for (int i = 0; i < Vectors::kAtOnce; ++i) sums[i].add(vectors[i]);
  }
};

// The last reads are the residual, if something is added to one, and the gain. With kHasBias a
// further row, operand 1, is added. The sum, or the row of an id or that is copied, is stored, too.
template <class Task, class Added>
struct NormalizedRow {
  using Vectors = RowVectors<Task>;
  static constexpr bool kStores = !kIsSame<Added, NothingAdded>;
  static constexpr bool kCopies =
      kIsSame<Added, EmbeddedRow<Task>> || kIsSame<Added, CopiedRow<Task>>;
  static constexpr bool kAdds = kStores && !kCopies;
  static constexpr i32 kWarps = Task::threads / 32;
  static constexpr i32 kAtOnce = Vectors::kAtOnce, kStep = Vectors::kStep;
  static constexpr i32 kChunk = kAtOnce * kStep;   // columns that stay in registers

  ETC_DEVICE static void run(const Task& task) {
    run(task, [] { return true; });
  }
  // ready(): what is added is there; the residual is loaded before.
  // NOTE: one row, since a loop over rows needs registers for addresses.
  template <class Ready>
  ETC_DEVICE static void run(const Task& task, Ready ready) {
    float* const sums = reinterpret_cast<float*>(task.scratch);
    const Row row(task);
    const i32 last = (row.columns - 1) / kChunk * kChunk;
    uint4 gain[kAtOnce], vectors[kAtOnce];
    float squares = 0.0f;
#pragma unroll 1
    for (i32 first = 0; first <= last; first += kChunk) {
      if (!row.fetch_sums(first, task.thread * 8 + first, ready, vectors)) return;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i * kStep >= row.columns) break;
        squares += squares_of(vectors[i]);
      }
    }
    if constexpr (!Task::kKeeps) {
      fetch(row.gain, task.thread * 8 + last, row.columns, gain);  // arrives during the reduction
    }
    squares = ptx::warp_sum(squares);
    if (task.thread % 32 == 0) sums[task.thread / 32] = squares;
    task.sync();
    float total = 0.0f;
#pragma unroll
    for (i32 warp = 0; warp < kWarps; ++warp) total += sums[warp];
    const float scale = rsqrtf(total / float(row.columns) + Task::kEps);
    // The last columns are in registers; of long rows the others are loaded again.
#pragma unroll 1
    for (i32 first = last; first >= 0; first -= kChunk) {
      if (first != last) {
        if constexpr (!Task::kKeeps) {
          fetch(row.gain, task.thread * 8 + first, row.columns, gain);
        }
        fetch(row.sum, task.thread * 8 + first, row.columns, vectors);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const i32 column = task.thread * 8 + first + i * kStep;
        if (column < row.columns) {
          if constexpr (Task::kKeeps) {
            ptx::store16(row.y + column * 2, vectors[i]);
          } else {
            ptx::store16(row.y + column * 2, multiplied(vectors[i], gain[i], scale));
          }
        }
      }
    }
  }

 private:
  // The addresses of one row's operands. `sum`: what the norm is of.
  struct Row {
    static constexpr i32 kReads = Task::kReads;
    u64 bias, residual, gain, sum, y;
    i32 columns;
    Added added;

    ETC_DEVICE explicit Row(const Task& task) : added(task) {
      const auto tile = task.template operand<kReads>();
      columns = tile.size[decltype(tile)::kRank - 1];
      gain = u64(task.template operand<kReads - 1>().at());
      y = u64(task.template operand<kReads + kStores>().at());
      sum = u64(task.template operand<kStores ? kReads : 0>().at());
      if constexpr (kAdds) residual = u64(task.template operand<kReads - 2>().at());
      if constexpr (Task::kHasBias) bias = u64(task.template operand<1>().at());
    }
    // first: the first thread's column. Vectors of which no thread has a column are left out.
    template <class Ready>
    ETC_DEVICE bool fetch_sums(
        i32 first, i32 column, Ready ready, uint4 (&vectors)[kAtOnce]) const {
      if constexpr (kAdds) {
        uint4 of_residual[kAtOnce], of_bias[kAtOnce];
        fetch(residual, column, columns, of_residual);
        if constexpr (Task::kHasBias) fetch(bias, column, columns, of_bias);
        if (!ready()) return false;
        typename Vectors::Sums total = {};
        added.add(column, columns, total);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (first + i * kStep >= columns) break;
          if constexpr (Task::kHasBias) total[i].add(of_bias[i]);
          total[i].add(of_residual[i]);
          vectors[i] = total[i].rounded();
          const i32 own_column = column + i * kStep;
          if (own_column < columns) ptx::store16(sum + own_column * 2, vectors[i]);
        }
      } else if constexpr (kCopies) {
        fetch(added.x, column, columns, vectors);
        if constexpr (Task::kEmbeddingScale != 1.0f) {
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) {
            Sum8<Task::kIsHalf> sum;
            sum.add(vectors[i], Task::kEmbeddingScale);
            vectors[i] = sum.rounded();
          }
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const i32 own_column = column + i * kStep;
          if (own_column < columns) ptx::store16(sum + own_column * 2, vectors[i]);
        }
      } else {
        fetch(sum, column, columns, vectors);
      }
      return true;
    }
  };

  ETC_DEVICE static void fetch(u64 source, i32 column, i32 columns, uint4 (&vectors)[kAtOnce]) {
    Vectors::fetch(source, column, columns, vectors);
  }
  ETC_DEVICE static float squares_of(uint4 words) {
    const u32 word[4] = {words.x, words.y, words.z, words.w};
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = unpack<Task::kIsHalf>(word[i]);
      sum = __fmaf_rn(pair.y, pair.y, __fmaf_rn(pair.x, pair.x, sum));
    }
    return sum;
  }
  ETC_DEVICE static uint4 multiplied(uint4 words, uint4 gain, float scale) {
    u32 word[4] = {words.x, words.y, words.z, words.w};
    const u32 gain_word[4] = {gain.x, gain.y, gain.z, gain.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = unpack<Task::kIsHalf>(word[i]);
      const float2 pair_gain = unpack_gains<Task::kIsHalf, Task::kGainOffset>(gain_word[i]);
      word[i] = pack<Task::kIsHalf>(pair.x * scale * pair_gain.x, pair.y * scale * pair_gain.y);
    }
    return make_uint4(word[0], word[1], word[2], word[3]);
  }
};

template <class Task>
struct rms_norm : NormalizedRow<Task, NothingAdded> {};

template <class Task>
struct add_rms_norm : NormalizedRow<Task, AddedRow<Task>> {};

template <class Task>
struct embed_norm : NormalizedRow<Task, EmbeddedRow<Task>> {};

// With kKeeps: without a norm.
template <class Task>
struct embed_rows : NormalizedRow<Task, EmbeddedRow<Task>> {};

template <class Task>
struct copy_norm : NormalizedRow<Task, CopiedRow<Task>> {};

}  // namespace etc
