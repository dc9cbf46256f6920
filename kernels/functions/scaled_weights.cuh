// Weights of 16 bits, or of float8_e4m3fn with scales; and the mainloop of the latter.
//
// A block is 128 elements of k. Each block of a row of w has a scale: y is the sum over blocks, in
// the order of k, of the scale times x @ w.T of the block, both in fp32. Codes are widened exactly
// to the elements of x, on their way from shared memory to the registers that wgmma reads.
#pragma once
#include "functions/tile_sums.cuh"
#include "ptx/wgmma_registers.cuh"

namespace etc {

// Weights of the elements of x, stored [n, k] or [k, n].
template <bool kIsKN_>
struct PlainWeights {
  static constexpr bool kIsKN = kIsKN_, kIsScaled = false;
  static constexpr u32 kBytes = 2, kWords = 0;
};

constexpr u32 kBlockDepth = 128;                        // k of a block
constexpr u32 kBlockBoxes = kBlockDepth / kStageDepth;  // boxes of x in a block

// Codes [n, k] of e4m3. Rows of w share scales in groups of 1 << kShift; kHasBlocks: each block of k
// has its own, otherwise a row has one. Element: of the scales.
template <u32 kShift_, bool kHasBlocks_, class Element_>
struct ScaledWeights {
  using Element = Element_;
  static constexpr bool kIsKN = false, kIsScaled = true, kHasBlocks = kHasBlocks_;
  static constexpr u32 kBytes = 1, kShift = kShift_, kWords = 8;
};

// The scales of a task, in words of a work item. gate, up: the addresses of the first row's scale of
// the first block; without gates, they are equal. first, end: the rows of w. pitch: bytes from a row
// of scales to the next. blocks: of k.
struct ScalePlace {
  u64 gate, up;
  i32 first, end;
  u32 pitch, blocks;

  ETC_DEVICE void write(u32* words) const {
    words[0] = u32(gate), words[1] = u32(gate >> 32), words[2] = u32(up), words[3] = u32(up >> 32);
    words[4] = u32(first), words[5] = u32(end), words[6] = pitch, words[7] = blocks;
  }
  ETC_DEVICE static ScalePlace read(u32 shared) {
    const auto word = [&](u32 n) { return ptx::load_shared(shared + 4 * n); };
    return {u64(word(0)) | u64(word(1)) << 32, u64(word(2)) | u64(word(3)) << 32,
            i32(word(4)), i32(word(5)), word(6), word(7)};
  }
};

// What a thread reads of w: two rows of the M of wgmma, eight apart.
template <class Weights>
struct ScaledRows {
  using Element = typename Weights::Element;
  u32 codes;  // bytes from a block's first code to the thread's first code of the first row
  u32 apart;  // and from there to the second row, the same in a warp
  u64 scales[2];
  u32 blocks;

  // gated: the first half of the tile's columns are rows of gate, the others of up.
  ETC_DEVICE ScaledRows(const ScalePlace& place, const TileShape& shape, u32 wg, bool is_gated)
      : blocks(place.blocks) {
    const u32 thread = ptx::thread() & 127, lane = thread & 31;
    const u32 columns = shape.warpgroup_columns(), before = wg * shape.halves() * columns;
    const u32 gates = is_gated ? shape.columns / 2 : shape.columns;
    // wgmma multiplies 64 rows: in place of those that the tile does not have, a first one.
    const u32 of_warp = __shfl_sync(~0u, thread >> 5, 0) * 16;
    const u32 begin = of_warp < columns ? of_warp : 0;
    const u32 next = of_warp + 8 < columns ? 8 : 0;
    const u32 first = before + begin + lane / 4;
    codes = first * kBlockDepth + (lane / 4) * 16 + lane % 4 * 2;
    apart = next * kBlockDepth;
#pragma unroll
    for (u32 n = 0; n < 2; ++n) {
      const u32 row = first + n * next;
      const bool is_up = row >= gates;
      const i32 of_w = minimum(place.first + i32(is_up ? row - gates : row), place.end - 1);
      scales[n] = (is_up ? place.up : place.gate) + u64(u32(of_w) >> Weights::kShift) * place.pitch;
    }
  }

  // The scales of a block of k. Where each block has its own, those beyond the end have none.
  ETC_DEVICE float2 scales_of(u32 block) const {
    const bool is_there = !Weights::kHasBlocks || block < blocks;
    const u64 at = Weights::kHasBlocks ? block * sizeof(Element) : 0;
    const auto load = [&](u32 n) ETC_INLINE {
      return is_there ? float(*reinterpret_cast<const Element*>(scales[n] + at)) : 0.0f;
    };
    return make_float2(load(0), load(1));
  }

  // The codes of box kBox of the block that begins at shared address `at`, for the registers of
  // wgmma. The swizzle exchanges units of 16 bytes by the number of the row in eight.
  template <u32 kBox>
  ETC_DEVICE void load_box(u32 (&box)[16], u32 at) const {
    const u32 begin[2] = {at, at + apart};
#pragma unroll
    for (u32 step = 0; step < 4; ++step) {
#pragma unroll
      for (u32 n = 0; n < 2; ++n) {
        const u32 from = (codes ^ (kBox * 4 + step) * 16) + begin[n];
        box[4 * step + n] = ptx::load_shared2(from);
        box[4 * step + 2 + n] = ptx::load_shared2(from + 8);
      }
    }
  }
};

// The scales of a thread's rows, for every `turn`-th block from `first` on. The four lanes of a row
// have those of one block each, and of one of the four blocks after these, which arrive meanwhile.
template <class Weights>
struct BlockScales {
  static constexpr u32 kLanes = 4;
  const ScaledRows<Weights>& rows;
  u32 block, step;
  float2 own, later;

  ETC_DEVICE BlockScales(const ScaledRows<Weights>& w, u32 first, u32 turn)
      : rows(w), block(first + ptx::lane() % kLanes * turn), step(kLanes * turn),
        own(rows.scales_of(block)), later(rows.scales_of(block += step)) {}

  // Those of block n of the warpgroup; called for one n after the other.
  ETC_DEVICE float2 of(u32 n) {
    if constexpr (!Weights::kHasBlocks) return own;
    const u32 from = n % kLanes;
    const float2 scale =
        make_float2(__shfl_sync(~0u, own.x, from, kLanes), __shfl_sync(~0u, own.y, from, kLanes));
    if (from == kLanes - 1) own = later, later = rows.scales_of(block += step);
    return scale;
  }
};

// d += the scales times the sums of a block.
template <u32 kCount>
ETC_DEVICE void add_scaled(float (&d)[kCount], float (&block)[kCount], float2 scale) {
#pragma unroll
  for (u32 i = 0; i < kCount; ++i) {
    ptx::keep_order(block[i]);
    d[i] = __fmaf_rn(i % 4 < 2 ? scale.x : scale.y, block[i], d[i]);
  }
}

// The mainloop of a warpgroup of a swapped tile. If the warpgroups alternate, a stage has a block for
// each; otherwise each multiplies all blocks of a stage by its own rows of w. Returns whether a wait
// has failed.
// NOTE: while a box is multiplied, the next one is widened and the codes of the one after it are
// loaded. In tiles of many rows, registers for that would spill: there codes are loaded just before
// they are widened, and with most rows only the other warpgroup multiplies meanwhile. No wgmma is in
// flight from one turn of the loop to the next: the compiler would then reserve its registers in all
// of the program.
template <bool kIsHalf, class Weights, u32 kRows, class Program>
ETC_DEVICE bool multiply_scaled(
    const Run<Program>& run, StageReader<Program>& stages, u32 count, const TileShape& shape,
    const ScaledRows<Weights>& w, u32 wg, float (&d)[kRows / 2]) {
  const u32 turns = 1 - shape.halves(), stage_blocks = shape.depth / kBlockBoxes;
  const u32 first = wg * turns, end = first + (stage_blocks >> turns);
  const u32 bytes = shape.bytes<Weights::kBytes>(), block_bytes = shape.columns * kBlockDepth;
  const u32 at_x = (stages.descriptor_base() | 0x10000u) + stage_blocks * block_bytes / 16;
  const u32 x = __shfl_sync(~0u, at_x, 0), box_x = shape.box_x();
  constexpr u32 kWidened = kRows > 96 ? 1 : 2;  // boxes in registers
  constexpr bool kLoadsAhead = kRows <= 80;
  float sums[kRows / 2];
  u32 a[kWidened][16], box[16];
  BlockScales<Weights> scales(w, first, 1 + turns);
  u32 at = 0, n = first;  // the stage's place, and the block in it
  bool lost = false;
  const auto begin_stage = [&]() ETC_INLINE {
    at = stages.next(bytes), n = first;
    if (!lost) lost = !stages.wait_full(run);
    lost = __any_sync(~0u, lost);
  };
  const auto codes = [&]() ETC_INLINE { return stages.address(at) + n * block_bytes; };
  // Box `number` of the block whose codes begin at `from`: load() is called some time before widen().
  const auto load = [&](auto number, u32 from) ETC_INLINE {
    if constexpr (kLoadsAhead) w.template load_box<decltype(number)::value>(box, from);
  };
  const auto widen_to = [&](u32 (&to)[16], auto number, u32 from) ETC_INLINE {
    if constexpr (!kLoadsAhead) w.template load_box<decltype(number)::value>(box, from);
#pragma unroll
    for (u32 i = 0; i < 16; ++i) to[i] = widen<kIsHalf>(u16(box[i]));
  };
  begin_stage();
  load(Number<0u>{}, codes());
  widen_to(a[0], Number<0u>{}, codes());
  load(Number<1u>{}, codes());
  const u32 blocks = count * (end - first);
#pragma unroll 1
  for (u32 i = 0; i < blocks; ++i) {
    const u32 from = codes(), at_box = x + (at + n * kBlockBoxes * box_x) / 16;
    ptx::wgmma_fence();
    ptx::wgmma_box_registers<kIsHalf, kRows>(sums, a[0], ptx::matrix_descriptor(at_box), 0);
    ptx::wgmma_commit();
    if constexpr (kWidened == 1) ptx::wgmma_wait<0>();
    const bool ends_stage = ++n == end, goes_on = i + 1 < blocks;
    if (ends_stage) {
      if (goes_on) {
        begin_stage();
      } else {
        n = first;  // what is loaded from there is not used
      }
    }
    widen_to(a[kWidened - 1], Number<1u>{}, from);
    load(Number<0u>{}, codes());
    ptx::wgmma_fence();
    ptx::wgmma_box_registers<kIsHalf, kRows>(
        sums, a[kWidened - 1], ptx::matrix_descriptor(at_box + box_x / 16), 1);
    ptx::wgmma_commit();
    const float2 scale = scales.of(i);
    ptx::wgmma_wait<kWidened - 1>();  // the first registers have been read
    if (goes_on) {
      widen_to(a[0], Number<0u>{}, codes());
      load(Number<1u>{}, codes());
    }
    ptx::wgmma_wait<0>();
    add_scaled(d, sums, scale);
    if (ends_stage) {
      __syncwarp();  // all lanes have read the codes
      if (!lost) stages.release(stages.count() - (goes_on ? 2 : 1));
    }
  }
  return lost;
}

}  // namespace etc
