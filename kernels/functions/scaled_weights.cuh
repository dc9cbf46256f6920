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
  static constexpr bool kIsKN = kIsKN_, kIsScaled = false, kAreCodes = false;
  static constexpr u32 kRowBytes = 128, kBoxDepth = kStageDepth, kWords = 0;

  // Which eight rows of w of a warpgroup a warp has in row lane / 4 of wgmma's, and 8 further.
  ETC_DEVICE static constexpr u32 eight(u32 warp, u32 n) { return warp * 2 + n; }
};

constexpr u32 kBlockDepth = 128;                        // k of a block
constexpr u32 kBlockBoxes = kBlockDepth / kStageDepth;  // boxes of x in a block

// Codes [n, k] of e4m3. Rows of w share scales in groups of 1 << kShift; kHasBlocks: each block of k
// has its own, otherwise a row has one. Element: of the scales.
template <u32 kShift_, bool kHasBlocks_, class Element_>
struct ScaledWeights {
  using Element = Element_;
  static constexpr bool kIsKN = false, kIsScaled = true, kAreCodes = false;
  static constexpr bool kHasBlocks = kHasBlocks_;
  static constexpr u32 kRowBytes = 64, kBoxDepth = kStageDepth, kShift = kShift_, kWords = 9;

  // So that each warp has eight of up to 32 rows, and no others to widen.
  ETC_DEVICE static constexpr u32 eight(u32 warp, u32 n) { return warp + n * 4; }
};

// The scales of a task, in words of a work item. gate, up: the addresses of the first row's scale of
// the first block; without gates, they are equal. first, end: the rows of w, or of gate. apart: from
// there to those of up, where both are rows of one matrix. pitch: bytes from a row of scales to the
// next. num_blocks: of k.
struct ScalePlace {
  u64 gate, up;
  i32 first, end, apart;
  u32 pitch, num_blocks;

  ETC_DEVICE void write(u32* words) const {
    words[0] = u32(gate), words[1] = u32(gate >> 32), words[2] = u32(up), words[3] = u32(up >> 32);
    words[4] = u32(first), words[5] = u32(end), words[6] = pitch, words[7] = num_blocks;
    words[8] = u32(apart);
  }
  ETC_DEVICE static ScalePlace read(u32 shared) {
    const auto word = [&](u32 n) { return ptx::load_shared(shared + 4 * n); };
    return {u64(word(0)) | u64(word(1)) << 32, u64(word(2)) | u64(word(3)) << 32,
            i32(word(4)), i32(word(5)), i32(word(8)), word(6), word(7)};
  }
};

// What a thread reads of w: one row of the M of wgmma, and a second one if the tile has it.
template <class Weights>
struct ScaledRows {
  using Element = typename Weights::Element;
  static constexpr bool kHasBlocks = Weights::kHasBlocks;
  static constexpr u32 kLanes = 32;  // eight rows have the scales of their first one
  u32 row;    // bytes from a block's first code to those of the first row
  u32 apart;  // and from there to those of the second one, the same in a warp; 0: there is none
  u64 scales[2];
  u32 num_blocks;

  // gated: the first half of the tile's columns are rows of gate, the others of up.
  ETC_DEVICE ScaledRows(const ScalePlace& place, const TileShape& shape, u32 wg, bool is_gated)
      : num_blocks(place.num_blocks) {
    const u32 thread = ptx::thread() & 127, lane = thread & 31;
    const u32 columns = shape.warpgroup_columns(), before = wg * shape.halves() * columns;
    const u32 gate_columns = is_gated ? shape.columns / 2 : shape.columns;
    // wgmma multiplies 64 rows: the sums of those that the tile does not have are not used.
    const u32 warp = __shfl_sync(~0u, thread >> 5, 0);
    const u32 eights[2] = {Weights::eight(warp, 0) * 8, Weights::eight(warp, 1) * 8};
    const u32 next = eights[1] < columns ? eights[1] - eights[0] : 0;
    const u32 first = before + (eights[0] < columns ? eights[0] : 0) + lane / 4;
    row = first * kBlockDepth;
    apart = next * kBlockDepth;
    // NOTE: tiles begin with rows that are multiples of eight, and so do blocks of scales.
    const u32 scaled = Weights::kHasBlocks ? first - lane / 4 : first;
#pragma unroll
    for (u32 n = 0; n < 2; ++n) {
      const u32 column = scaled + n * next;
      const bool is_up = column >= gate_columns;
      const i32 of_gate =
          minimum(place.first + i32(is_up ? column - gate_columns : column), place.end - 1);
      const i32 of_w = of_gate + (is_up ? place.apart : 0);
      scales[n] = (is_up ? place.up : place.gate) + u64(u32(of_w) >> Weights::kShift) * place.pitch;
    }
  }

  // Loads the bits of the scales of a block of k. Where each block has its own, those beyond the end
  // have 0.
  ETC_DEVICE void load_scales(u32 (&bits)[2], u32 block) const {
    const bool is_there = !kHasBlocks || block < num_blocks;
    const u64 offset = kHasBlocks ? block * sizeof(Element) : 0;
#pragma unroll
    for (u32 n = 0; n < 2; ++n) {
      bits[n] = 0;
      ptx::load_l2_into<sizeof(Element)>(bits[n], is_there, scales[n] + offset);
    }
  }
};

// The scales of a thread's two rows, for every `turn`-th block from `first` on. The kLanes lanes of
// the rows have those of one block each, and of one of the kLanes blocks after these, which arrive
// meanwhile.
// NOTE: the compiler may copy what has just been loaded, and so wait for it. Where this happened
// every four blocks, it took most of the time of the loops that widen weights.
template <class Rows>
struct BlockScales {
  static constexpr u32 kLanes = Rows::kLanes;
  const Rows& rows;
  u32 block, step;
  u32 own_bits[2], later[2];

  ETC_DEVICE BlockScales(const Rows& thread_rows, u32 first, u32 turn)
      : rows(thread_rows), block(first + ptx::lane() % kLanes * turn), step(kLanes * turn) {
    rows.load_scales(later, block);
    pass();
  }

  // Those of block n of the warpgroup.
  ETC_DEVICE float2 of(u32 n) const {
    return make_float2(scale(own_bits[0], n), scale(own_bits[1], n));
  }
  // Whether pass() comes before block n.
  ETC_DEVICE static bool passes(u32 n) { return Rows::kHasBlocks && n % kLanes == 0; }
  ETC_DEVICE void pass() {
    own_bits[0] = later[0], own_bits[1] = later[1];
    ptx::keep_order(own_bits[0]), ptx::keep_order(own_bits[1]);  // copied before others are loaded
    rows.load_scales(later, block += step);
  }

 private:
  ETC_DEVICE static float scale(u32 bits, u32 n) {
    const u32 shared = Rows::kHasBlocks ? __shfl_sync(~0u, bits, n % kLanes, kLanes) : bits;
    return number_of<typename Rows::Element>(shared);
  }
};

// d += the scales times the sums of a block, from sum kFirst of d on.
template <u32 kFirst = 0, u32 kCount, u32 kBlock>
ETC_DEVICE void add_scaled(float (&d)[kCount], const float (&block)[kBlock], float2 scale) {
  static_assert(kFirst + kBlock <= kCount);
#pragma unroll
  for (u32 i = 0; i < kBlock; ++i) {
    float& sum = d[kFirst + i];
    sum = __fmaf_rn(i % 4 < 2 ? scale.x : scale.y, block[i], sum);
  }
}

// A warpgroup's position in the stages of a task: a block of k. If the warpgroups alternate, a stage
// has a block for each; otherwise each has its own rows of w in all blocks of a stage.
template <class Program>
struct BlockReader {
  const Run<Program>& run;
  StageReader<Program>& stages;
  u32 bytes, codes_bytes, box_x;  // of a stage, of the codes of a block, of a box of x
  u32 x;                          // bytes from a stage's begin to its first box of x
  u32 turn;                       // from one of the warpgroup's blocks to the next
  u32 first, end, count;          // the warpgroup's blocks in a stage, and their number in the task
  u32 place = 0, block = 0;       // of the stage in the ring, and the block in it
  bool is_lost = false;           // whether a wait has failed
  bool is_releasing = ptx::lane() == 0;  // whether the thread releases stages: one, until is_lost
  bool is_early = false;          // whether the block's stage had not arrived in advance()
  bool is_gathered;               // whether threads have written to the stages, not only bulk copies

  ETC_DEVICE BlockReader(
      const Run<Program>& task_run, StageReader<Program>& task_stages, u32 num_stages,
      const TileShape& shape, u32 wg, bool has_gathered)
      : run(task_run), stages(task_stages), bytes(shape.bytes<kStageDepth>()),
        codes_bytes(shape.columns * kBlockDepth), box_x(shape.box_x()),
        x(shape.depth / kBlockBoxes * codes_bytes), turn(2 - shape.halves()),
        first(wg * (1 - shape.halves())), end(first + (shape.depth >> (2 - shape.halves()))),
        count(num_stages * (end - first)), is_gathered(has_gathered) {}
  // The places in the ring of the block's codes and of its first box of x.
  ETC_DEVICE u32 codes() const { return place + block * codes_bytes; }
  ETC_DEVICE u32 boxes() const { return place + x + block * kBlockBoxes * box_x; }
  // Waits for the first stage.
  ETC_DEVICE void begin() {
    place = stages.next(bytes), block = first;
    wait();
  }
  // Whether the block is the last one of its stage.
  ETC_DEVICE bool ends_stage() const { return block + 1 == end; }
  // From a block to the next one, which may be read after arrive(); or if it is the last one to an
  // earlier one of the same stage.
  // NOTE: without branches, and long before arrive(): then latencies are hidden. Those in and before
  // a branch are not, since the compiler moves no other work there: waits took a third of the time
  // of some loops.
  ETC_DEVICE void advance(bool is_last) {
    const bool is_end = ends_stage(), is_next = is_end && !is_last;
    is_early = is_next & !stages.has_next();
    block = is_end ? first : block + 1;
    place = stages.next_if(is_next, bytes, place);
  }
  // Waits for the stage of the block, if need be.
  ETC_DEVICE void arrive() {
    if (is_early) wait();
  }
  // Before wgmma reads the block, or a bulk copy writes in its place.
  ETC_DEVICE void fence() const {
    if (is_gathered) ptx::fence_proxy_async_shared();
  }
  ETC_DEVICE u32 stage() const { return stages.count() - 1; }
  // Releases stage n if the warp has read it.
  ETC_DEVICE void release(bool is_read, u32 n) const {
    __syncwarp();  // all lanes have read it
    stages.release_if(is_read & is_releasing, n);
  }

 private:
  ETC_DEVICE void wait() {
    if (!is_lost) is_lost = !stages.wait_full(run);
    is_lost = __any_sync(~0u, is_lost);
    is_releasing = is_releasing && !is_lost;
  }
};

// Rows of x that warps multiply without wgmma, as MOST_BY_WARPS in functions/tile_shape.py.
constexpr u32 kMostByWarps = 16;

// The mainloop of a warpgroup of a swapped tile with few rows of x, whose warps have up to `kEights`
// times eight rows of w. Returns whether a wait has failed.
// NOTE: mma has both operands in registers. So a lane may have any k, the same of both: here 32
// adjacent codes of a row in a block, two loads, and in each step of 16 k four of these. Of the lanes
// of two rows, each load takes every unit of 16 bytes of a line once. Each half of a lane's codes has
// its own sums: an mma waits for that before it. The next stage is waited for while the last of them
// run.
template <bool kIsHalf, class Weights, u32 kRows, u32 kEights, class Program>
ETC_DEVICE bool multiply_by_warps(
    BlockReader<Program>& reader, const ScaledRows<Weights>& w, float (&d)[kRows / 2]) {
  const u32 lane = ptx::lane(), row = lane / 4, quarter = lane % 4, half = quarter / 2;
  const u32 begin = reader.stages.address(0);
  const u32 first_code = w.row + ((quarter * 2 + half) ^ row) * 16;
  const u32 first_x = half * reader.box_x + row * 128 + ((quarter % 2 * 4 + half * 2) ^ row) * 16;
  BlockScales scales(w, reader.first, reader.turn);
  u32 codes[kEights][2][4];  // of each row, two times 16
  const auto load = [&](u32 (&words)[4], u32 address) ETC_INLINE {
    const uint4 unit = ptx::load_shared16(address);
    words[0] = unit.x, words[1] = unit.y, words[2] = unit.z, words[3] = unit.w;
  };
  const auto load_codes = [&](u32 block) ETC_INLINE {
    const u32 address = block + first_code;
#pragma unroll
    for (u32 unit = 0; unit < 2; ++unit) {
#pragma unroll
      for (u32 n = 0; n < kEights; ++n) load(codes[n][unit], (address ^ unit * 16) + n * w.apart);
    }
  };
  reader.begin();  // the scales arrive meanwhile
  load_codes(begin + reader.codes());
#pragma unroll 1
  for (u32 i = 0;;) {
    const u32 x = begin + reader.boxes(), stage = reader.stage();
    const bool is_end = reader.ends_stage(), is_last = i + 1 == reader.count;
    reader.advance(is_last);
    const u32 next = begin + reader.codes();
    float sums[2][kRows / 2] = {};
#pragma unroll
    for (u32 unit = 0; unit < 2; ++unit) {
      u32 a[4][4] = {}, b[kRows / 8][2][4];
#pragma unroll
      for (u32 n = 0; n < kRows / 4; ++n) {
        load(b[n / 2][n % 2], x + (first_x ^ (unit * 32 + n % 2 * 16)) + n / 2 * 1024);
      }
#pragma unroll
      for (u32 step = 0; step < 4; ++step) {
#pragma unroll
        for (u32 n = 0; n < kEights; ++n) {
          const uint2 wide = widen4<kIsHalf>(codes[n][unit][step]);
          a[step][n] = wide.x, a[step][n + 2] = wide.y;
        }
#pragma unroll
        for (u32 n = 0; n < kRows / 8; ++n) {
          const u32* const words = b[n][step / 2] + step % 2 * 2;
          float(&sum)[4] = reinterpret_cast<float(&)[4]>(sums[unit][4 * n]);
          ptx::mma_16x8x16<kIsHalf>(
              sum, a[step][0], a[step][1], a[step][2], a[step][3], words[0], words[1]);
        }
      }
    }
    const float2 scale = scales.of(i++);
    reader.fence();
    reader.release(is_end, stage);  // before a wait
    const auto add = [&]() ETC_INLINE {
#pragma unroll
      for (u32 n = 0; n < kRows / 2; ++n) sums[0][n] += sums[1][n];
      add_scaled(d, sums[0], scale);
    };
    if (is_last) {
      add();
      return reader.is_lost;
    }
    if (reader.is_early | scales.passes(i)) {  // one branch, seldom taken
      reader.arrive();
      if (scales.passes(i)) scales.pass();
    }
    load_codes(next);
    add();
  }
}

// The codes of a box for the registers of wgmma.
template <bool kIsHalf>
struct BoxCodes {
  u32 codes[16];

  // The swizzle exchanges units of 16 bytes by the number of the row in eight. first: bytes from a
  // block's first code to those of the thread in its first row. block: its address.
  ETC_DEVICE void load(u32 first, u32 apart, u32 box, u32 block) {
    const u32 rows[2] = {block, apart + block};
#pragma unroll
    for (u32 step = 0; step < 4; ++step) {
#pragma unroll
      for (u32 n = 0; n < 2; ++n) {
        const u32 address = (first ^ (box * 4 + step) * 16) + rows[n];
        codes[4 * step + n] = ptx::load_shared2(address);
        codes[4 * step + 2 + n] = ptx::load_shared2(address + 8);
      }
    }
  }
  ETC_DEVICE void widen_to(u32 (&words)[16]) const {
#pragma unroll
    for (u32 j = 0; j < 16; ++j) words[j] = widen<kIsHalf>(u16(codes[j]));
  }
};

// The mainloop of a warpgroup of a swapped tile. Returns whether a wait has failed.
// NOTE: while a box is multiplied, the next one is widened and the codes of the one after it are
// loaded. No wgmma is in flight from one turn of the loop to the next: the compiler would then
// reserve its registers in all of the program.
template <bool kIsHalf, class Weights, u32 kRows, class Program>
ETC_DEVICE bool multiply_widened(
    BlockReader<Program>& reader, const ScaledRows<Weights>& w, float (&d)[kRows / 2]) {
  const u32 in_ring = reader.stages.descriptor_base() | 0x10000u;
  const u32 x = __shfl_sync(~0u, in_ring, 0), begin = reader.stages.address(0);
  const u32 lane = ptx::lane(), first_code = w.row + lane / 4 * 16 + lane % 4 * 2;
  float sums[kRows / 2];
  u32 a[2][16];
  BoxCodes<kIsHalf> codes;
  BlockScales scales(w, reader.first, reader.turn);
  const auto block = [&]() ETC_INLINE { return begin + reader.codes(); };
  const auto load = [&](u32 box) ETC_INLINE { codes.load(first_code, w.apart, box, block()); };
  reader.begin();  // the scales arrive meanwhile
  load(0);
  codes.widen_to(a[0]);
  load(1);
#pragma unroll 1
  for (u32 i = 0; i < reader.count;) {
    const u32 box = x + reader.boxes() / 16, stage = reader.stage();
    const bool is_end = reader.ends_stage(), is_last = i + 1 == reader.count;
    reader.fence();
    ptx::wgmma_fence();
    ptx::wgmma_box_registers<kIsHalf, kRows>(sums, a[0], ptx::matrix_descriptor(box), 0);
    ptx::wgmma_commit();
    reader.advance(is_last);
    const float2 scale = scales.of(i++);
    codes.widen_to(a[1]);
    if (reader.is_early | scales.passes(i)) {  // one branch, seldom taken
      reader.arrive();
      if (scales.passes(i)) scales.pass();
    }
    load(0);
    ptx::wgmma_fence();
    ptx::wgmma_box_registers<kIsHalf, kRows>(
        sums, a[1], ptx::matrix_descriptor(box + reader.box_x / 16), 1);
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();  // the first registers have been read
    if (!is_last) {  // otherwise the compiler would do it after the next wait
      codes.widen_to(a[0]);
      load(1);
    }
    ptx::wgmma_wait<0>();
#pragma unroll
    for (float& sum : sums) ptx::keep_order(sum);
    add_scaled(d, sums, scale);
    reader.release(is_end, stage);
  }
  return reader.is_lost;
}

// The most rows of x whose sums of a block, and codes ahead, fit in the registers of a thread.
constexpr u32 kMostAhead = 80;

// The same with more rows of x.
// NOTE: a thread has the sums of a block for half of the rows. A box is widened once, and then
// multiplied by either half; the other box is widened meanwhile.
template <bool kIsHalf, class Weights, u32 kRows, class Program>
ETC_DEVICE bool multiply_by_halves(
    BlockReader<Program>& reader, const ScaledRows<Weights>& w, float (&d)[kRows / 2]) {
  constexpr u32 kHalf = kRows / 2;
  const u32 in_ring = reader.stages.descriptor_base() | 0x10000u;
  const u32 x = __shfl_sync(~0u, in_ring, 0), begin = reader.stages.address(0);
  const u32 lane = ptx::lane(), first_code = w.row + lane / 4 * 16 + lane % 4 * 2;
  float sums[kHalf / 2];
  u32 a[2][16];
  BlockScales scales(w, reader.first, reader.turn);
  const auto widen_to = [&](u32 (&words)[16], u32 box, u32 block) ETC_INLINE {
    BoxCodes<kIsHalf> codes;
    codes.load(first_code, w.apart, box, block);
    codes.widen_to(words);
  };
  reader.begin();  // the scales arrive meanwhile
  widen_to(a[0], 0, begin + reader.codes());
#pragma unroll 1
  for (u32 i = 0; i < reader.count; ++i) {
    const u32 block = begin + reader.codes(), first_box = x + reader.boxes() / 16;
    const u32 stage = reader.stage();
    const bool is_end = reader.ends_stage(), is_last = i + 1 == reader.count;
    const auto multiply = [&](u32 box, u32 half) ETC_INLINE {
      const u32 half_box = first_box + box * reader.box_x / 16 + half * kHalf * 128 / 16;
      reader.fence();
      ptx::wgmma_fence();
      ptx::wgmma_box_registers<kIsHalf, kHalf>(
          sums, a[box], ptx::matrix_descriptor(half_box), i32(box));
      ptx::wgmma_commit();
    };
    const auto keep = [&]() ETC_INLINE {
#pragma unroll
      for (float& sum : sums) ptx::keep_order(sum);
    };
    multiply(0, 0);
    widen_to(a[1], 1, block);
    multiply(1, 0);
    reader.advance(is_last);
    const float2 scale = scales.of(i);
    ptx::wgmma_wait<0>();
    keep();
    add_scaled<0>(d, sums, scale);
    multiply(0, 1);
    multiply(1, 1);
    reader.arrive();
    if (scales.passes(i + 1)) scales.pass();
    ptx::wgmma_wait<1>();  // the first registers have been read
    if (!is_last) widen_to(a[0], 0, begin + reader.codes());
    ptx::wgmma_wait<0>();
    keep();
    add_scaled<kHalf / 2>(d, sums, scale);
    reader.release(is_end, stage);
  }
  return reader.is_lost;
}

// One of them. is_gathered: as for multiply_boxes().
template <bool kIsHalf, class Weights, u32 kRows, class Program>
ETC_DEVICE bool multiply_scaled(
    const Run<Program>& run, StageReader<Program>& stages, u32 count, const TileShape& shape,
    const ScaledRows<Weights>& w, u32 wg, bool is_gathered, float (&d)[kRows / 2]) {
  BlockReader<Program> reader(run, stages, count, shape, wg, is_gathered);
  if constexpr (kRows <= kMostByWarps) {
    if (w.apart == 0) {
      return multiply_by_warps<kIsHalf, Weights, kRows, 1>(reader, w, d);
    }
    return multiply_by_warps<kIsHalf, Weights, kRows, 2>(reader, w, d);
  } else if constexpr (kRows <= kMostAhead) {
    return multiply_widened<kIsHalf, Weights, kRows>(reader, w, d);
  } else {
    return multiply_by_halves<kIsHalf, Weights, kRows>(reader, w, d);
  }
}

}  // namespace etc
