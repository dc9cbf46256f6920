"""The choice of a matrix multiplication's tiles, by a model of its time.

A tile is computed by one worker (an SM), and tiles run in waves over all workers. A
last wave that is not full leaves workers idle. There, tiles may use split-K: several
tasks multiply equal parts of k, and store fp32 partial sums, which further tasks add
(`ops/multiply.py`). No size is stored: the choice is a function of M, N, K, the number
of workers and the constants of a kind of GPU, which `etc-dist tune` fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from etc_dist.functions.tile_matmul import GROUP_WORDS, SLICE
from etc_dist.functions.tile_shape import FLOAT8_COLUMNS, TileShape
from etc_dist.functions.weight_layouts import STAGE_K
from etc_dist.ops.tile_order import ROW_GROUP, later_blocks
from etc_dist.ops.tuning import TileConstants, Tuning
from etc_dist.schedule.plan import Choice

FAMILY = (
    *(TileShape(r, c, swapped=True) for r in (8, 16, 32, 64) for c in (64, 128)),
    *(
        TileShape(r, 128, swapped=True)
        for r in (80, 96, 128, 144, 160, 176, 192, 208, 224, 256)
    ),
    *(TileShape(128, c) for c in (96, 112, 160, 176, 224, 256)),
)
"""The tile shapes of one program. The M of wgmma is 128 rows of x; in swapped tiles, 64
or 128 rows of w. Its N is the size of the tile in the other operand."""
FLOAT8_FAMILY = tuple(TileShape(128, c, float8=True) for c in FLOAT8_COLUMNS)
"""Those for float8 activations."""
RING_BYTES = 210_000
"""Shared memory for stages."""
ROW_BYTES = GROUP_WORDS // 8 * 4
"""Bytes of a part's sums for one index of the N of wgmma: 128 of its M, in fp32."""
STORED_AS_READ = 4
"""A part's sums take as long to store as so many times their bytes to read: fitted on
an H200."""
REFERENCE_AREA = 128 * 256
"""Elements of the tile whose epilogue takes `end_us`."""
BOUNDS = (
    "the tensor cores",
    "loads into shared memory",
    "accesses to shared memory",
    "the latency of loads",
    "the widening of weights",
)
"""What the times of `TileWork.block_us` are limited by, in their order."""
BY_WARPS, BY_WGMMA = (260.0, 6.3), (338.0, 2.5)
"""Cycles of the warps for a block of scaled weights and 128 of their rows, and for each
row of x."""
SERIAL_CYCLES = 254
"""By wgmma, in tiles of so many rows that the tensor cores wait meanwhile."""
MOST_OVERLAPPED_ROWS = 80
"""In tiles with more rows they do, or partly."""
FLOAT8_RATE = 1.4
"""Of float8 activations, the rate of the tensor cores with the promotion of sums, in
relation to that of 16 bits: measured for tiles of 128 to 192 columns on an H200."""
QUANTIZED_BYTES, QUANTIZED_US = 3, 2.0
"""Memory traffic of an element of x that is quantized, and the time from the last one
to the first loads of codes. Assumed."""
TURNS_SHARE = 1.08
"""If warpgroups alternate, a block takes so much longer, for its own stage."""
NARROW, NARROW_SHARE = 32, 0.86
"""If warpgroups alternate, each warp has 8 of up to so many rows of w, in place of 16,
which takes this share of the time, without wgmma."""
LEAST_COLUMNS = 16
"""A bound: no tile has fewer, with 8 each of gate and up."""
MOST_PARTS = 12
"""Of k of a tile: more parts need more scratch memory, and more time to add them."""
NORM = 8
"""The p of the p-norm of overlapping times: a smooth maximum."""
NEXT = 3
"""Further tilings that an explanation lists."""
Sizes = tuple[int, int, int]
"""M, N and K."""


@dataclass(frozen=True)
class Tiling:
    """The tiles of a matmul.

    shape_idx: the position of their shape. columns: of each tile. split_tile_columns:
    the number of columns of tiles, the last ones, that are computed by split-K. parts:
    of k of each of their tiles, each part one task.
    """

    shape_idx: int
    columns: int
    split_tile_columns: int = 0
    parts: int = 1


@dataclass(frozen=True)
class TileWork:
    """The work of a tiling: that of the most loaded worker, and of all workers. A block
    is STAGE_K elements of k of a tile.

    num_tiles: of the matmul. num_blocks: of the most loaded worker. block_cycles: of
    the tensor cores for a block. block_load_bytes: of a block, into shared memory.
    block_read_bytes: of a block, read from shared memory by wgmma. widen_cycles: of the
    warps, to widen the weights of a block. stage_blocks: blocks of a stage.
    prefetched_blocks: that fit in shared memory in addition to the stage in use.
    tile_area: elements of a tile, padding included. num_epilogues: tiles and parts of
    the most loaded worker. mean_blocks: of a worker, on average. memory_bytes: that all
    workers read or write once. worker_weight_bytes: that one worker reads. idle_bytes:
    of weights, that workers could read while they have no task. is_split: whether any
    tile uses split-K. worker_sum_bytes: partial sums that the most loaded worker reads,
    and STORED_AS_READ times those that it stores. scratch_bytes: of all partial sums.
    quantized: elements of x that are before any tile.

    The fields may also be arrays, of many tilings; then times are arrays.
    """

    num_tiles: int
    num_blocks: int
    block_cycles: float
    block_load_bytes: int
    block_read_bytes: int
    widen_cycles: float
    stage_blocks: int
    prefetched_blocks: int
    tile_area: int
    num_epilogues: int
    mean_blocks: float
    memory_bytes: int
    worker_weight_bytes: float
    idle_bytes: float
    is_split: int
    worker_sum_bytes: int
    scratch_bytes: int
    quantized: int

    def block_us(self, constants: TileConstants) -> tuple[float, ...]:
        """The times of a block that overlap, in the order of BOUNDS. The longest
        dominates."""
        c = constants
        shared_bytes_per_us = 128 * c.shared_ratio * c.cycles_per_us
        return (
            self.block_cycles / c.cycles_per_us,
            self.block_load_bytes / c.fill_bytes_per_us,
            (self.block_read_bytes + self.block_load_bytes) / shared_bytes_per_us,
            c.latency_us / self.prefetched_blocks,
            self.widen_cycles / c.cycles_per_us,
        )

    def us(self, constants: TileConstants) -> float:
        """The time of the whole matmul."""
        c = constants
        block = _norm(*self.block_us(c)) + c.stage_us / self.stage_blocks
        read_bytes = self.memory_bytes + c.idle_share * self.idle_bytes
        mainloops: float = _norm(
            self.num_blocks * block,
            self.mean_blocks * self.block_cycles / c.mean_cycles_per_us,
            read_bytes / c.memory_bytes_per_us,
            self.worker_weight_bytes / c.worker_bytes_per_us,
        )
        end_us = c.task_us + c.end_us * self.tile_area / REFERENCE_AREA
        epilogues = self.num_epilogues * end_us
        sums = c.parts_us * self.is_split + self.worker_sum_bytes / c.sums_bytes_per_us
        before = self.quantized * QUANTIZED_BYTES / c.memory_bytes_per_us
        before += QUANTIZED_US * (self.quantized > 0)
        return c.call_us + before + mainloops + epilogues + sums


def _norm(*times: float) -> Any:
    return sum(time**NORM for time in times) ** (1 / NORM)


def num_tiles_of(
    shape: TileShape, tiling: Tiling, sizes: Sizes, gated: bool = False, ranks: int = 1
) -> int:
    """The number of all tiles, for the arguments of `work_of`."""
    m, n, _ = sizes
    n *= 2 if gated else 1
    return ranks * -(-m // (ranks * shape.rows)) * -(-n // tiling.columns)


def work_of(
    shape: TileShape,
    tiling: Tiling,
    sizes: Sizes,
    workers: int,
    gated: bool = False,
    ranks: int = 1,
) -> TileWork:
    """The work of x [m, k] and weights [n, k], of gate and up if `gated`. ranks: how
    many have the rows, of which tiles have those of one: see `RankTiles`."""
    m, n, k = sizes
    n *= 2 if gated else 1
    columns, split = tiling.columns, tiling.split_tile_columns
    down = -(-m // (ranks * shape.rows))
    # Of each tile: see `Tiles`.
    rows = (m // ranks + 8 * down - 1) // (8 * down) * 8
    wgmma_m, wgmma_n = _wgmma_rows(shape), shape.wgmma_n
    num_stages = -(-k // shape.depth)
    num_part_stages = -(-num_stages // tiling.parts)
    num_parts = down * split * tiling.parts
    num_tiles = num_tiles_of(shape, tiling, sizes, gated, ranks)
    num_tasks = num_parts + num_tiles - down * split
    num_worker_stages, num_worker_tasks, num_worker_parts = _most_loaded(
        workers, num_parts, num_tasks, num_part_stages, num_stages
    )
    blocks_per_stage = shape.depth // STAGE_K
    used_n = min(rows, wgmma_n) if shape.swapped else wgmma_n
    num_worker_slices = -(-down * split * -(-used_n // SLICE) // workers)
    stored_rows = num_worker_parts * used_n
    sum_rows = num_worker_slices * tiling.parts * SLICE + STORED_AS_READ * stored_rows
    early = down
    if shape.float8:
        early -= int(later_blocks(down, n).evaluate({}))
    weight_bytes = n * k * shape.weight_bytes
    num_split_stages = down * split * (num_part_stages * tiling.parts - num_stages)
    num_all_blocks = (num_tiles * num_stages + num_split_stages) * blocks_per_stage
    num_blocks = num_worker_stages * blocks_per_stage
    block_weight_bytes = columns * shape.weight_bytes * STAGE_K
    return TileWork(
        num_tiles=num_tiles,
        num_blocks=num_blocks,
        block_cycles=wgmma_m * wgmma_n / 32 / (FLOAT8_RATE if shape.float8 else 1),
        block_load_bytes=(shape.x_bytes * rows + shape.weight_bytes * columns)
        * STAGE_K,
        block_read_bytes=_block_read_bytes(shape),
        widen_cycles=_widen_cycles(shape, columns),
        stage_blocks=blocks_per_stage,
        prefetched_blocks=max(1, RING_BYTES // shape.stage_bytes - 1)
        * blocks_per_stage,
        tile_area=wgmma_m * wgmma_n,
        num_epilogues=num_worker_tasks,
        mean_blocks=num_all_blocks / workers,
        memory_bytes=weight_bytes + shape.x_bytes * m * k + 2 * m * n,
        worker_weight_bytes=weight_bytes / min(workers, num_tasks),
        idle_bytes=(workers * num_blocks - num_all_blocks) * block_weight_bytes,
        is_split=int(num_parts > 0),
        worker_sum_bytes=sum_rows * ROW_BYTES if num_parts else 0,
        scratch_bytes=num_parts * -(-wgmma_n // SLICE) * SLICE * ROW_BYTES,
        quantized=min(m, early * rows) * k if shape.float8 else 0,
    )


def _wgmma_rows(shape: TileShape) -> int:
    """M of the wgmmas of a tile: of both warpgroups, unless they alternate, where each
    multiplies for all of the tile."""
    return 64 if shape.alternates else 128


def _most_loaded(
    workers: int, num_parts: int, num_tasks: int, num_part_stages: int, num_stages: int
) -> tuple[int, int, int]:
    """The stages, the tasks, and of these the parts, of the most loaded worker."""
    # Tasks are assigned round-robin, parts first. The most loaded worker is the first
    # one, that of the last part, or that of the first whole tile.
    loads = []
    for worker in {0, max(num_parts - 1, 0) % workers, num_parts % workers}:
        num_worker_parts = -(-max(num_parts - worker, 0) // workers)
        num_worker_tasks = -(-max(num_tasks - worker, 0) // workers)
        num_tile_stages = (num_worker_tasks - num_worker_parts) * num_stages
        num_worker_stages = num_worker_parts * num_part_stages + num_tile_stages
        loads.append((num_worker_stages, num_worker_tasks, num_worker_parts))
    return max(loads)


def _block_read_bytes(shape: TileShape) -> int:
    """The bytes of shared memory that the wgmmas of a block read."""
    # A block has 4 wgmma of k = 16 for each 64 of M: 64 x 16 and N x 16 elements. The
    # codes of scaled weights are read by loads of 16 bits, at half of the rate. Of
    # float8 activations it has 2, of as many bytes, for each part of the columns.
    num_wgmma, num_column_parts = (
        (2, shape.parts_of_columns) if shape.float8 else (4, 1)
    )
    read_bytes = 2048 * num_column_parts + shape.wgmma_n * 32
    return _wgmma_rows(shape) // 64 * num_wgmma * read_bytes


def _widen_cycles(shape: TileShape, columns: int) -> float:
    """Of the warps, for a block of scaled weights."""
    if not shape.scaled:
        return 0.0
    if shape.rows > MOST_OVERLAPPED_ROWS:
        return shape.wgmma_n * 4 + SERIAL_CYCLES
    all_rows, each_row = BY_WARPS if shape.by_warps else BY_WGMMA
    cycles = all_rows + each_row * shape.wgmma_n
    if not shape.alternates:
        return cycles
    is_narrow = shape.by_warps and columns <= NARROW
    return cycles / 2 * TURNS_SHARE * (NARROW_SHARE if is_narrow else 1.0)


def tilings(
    shapes: Sequence[TileShape],
    sizes: Sizes,
    workers: int,
    *,
    gated: bool = False,
    in_order: bool = False,
    divides: bool = True,
    w_layout: str = "nk",
    ranks: int = 1,
) -> Iterator[Tiling]:
    """The tilings to choose from. in_order: only those that add over k in order, so
    that a row has the same bits for any m. divides: whether tiles may use split-K.
    ranks: as for `work_of`."""
    m, n, k = sizes
    n *= 2 if gated else 1
    for shape_idx, shape in enumerate(shapes):
        if not shape.serves(gated=gated, in_order=in_order):
            continue
        down, num_stages = -(-m // (ranks * shape.rows)), -(-k // shape.depth)
        widths = {shape.columns}
        for waves in (1, 2, 3):  # the narrowest tiles that fit in so many waves
            most_across = max(1, waves * workers // (ranks * down))
            widths.add(-(-n // (8 * most_across)) * 8)
            widths.add(-(-n // (16 * most_across)) * 16)
        for columns in sorted(widths):
            if not shape.serves_columns(columns, gated=gated, w_layout=w_layout):
                continue
            yield Tiling(shape_idx, columns)
            if in_order or not divides:
                continue
            across = -(-n // columns)
            num_other_tiles = (ranks - 1) * down * across
            for split, num_parts in _divisions(
                down, across, num_other_tiles, num_stages, workers
            ):
                yield Tiling(shape_idx, columns, split, num_parts)


def _divisions(
    down: int, across: int, num_other_tiles: int, num_stages: int, workers: int
) -> Iterator[tuple[int, int]]:
    """Pairs of the columns of tiles to split, and of the parts of each of their tiles.
    All parts together fill at most one wave, and none is empty. num_other_tiles: tiles
    of other ranks' rows, which are not split. Own rows then follow all of them, so that
    they are not summed earlier: none is split if own tiles are more than a wave."""
    num_tiles = down * across + num_other_tiles
    num_full_waves = num_tiles // workers
    if num_tiles == num_full_waves * workers or (
        num_other_tiles and down * across > workers
    ):
        return
    divisions = set()
    # Split-K for the last wave, or also for the full one before it: then parts are
    # longer, and fewer.
    for num_whole_waves in {num_full_waves, max(num_full_waves - 1, 0)}:
        split = (num_tiles - num_whole_waves * workers + down - 1) // down
        if split > across:
            continue
        most = min((workers + down - 1) // (down * split), MOST_PARTS)
        for num_parts in {most, most - 1, most // 2, 2}:
            if 1 < num_parts <= most and num_stages // num_parts >= 2:
                # Parts have a whole number of stages: fewer parts may be enough.
                num_part_stages = -(-num_stages // num_parts)
                divisions.add((split, -(-num_stages // num_part_stages)))
    yield from sorted(divisions)


def largest_tilings(
    shapes: Sequence[TileShape], workers: int, rows: int, *, in_order: bool = False
) -> tuple[Tiling, Tiling]:
    """Of x with so many rows: one with as many tiles and events, and one whose parts
    take as much memory, as any of the `tilings` for up to so many rows, at all N and K.
    in_order: without parts.

    With `down` tiles in a column, a wave has at most workers + down - 1 parts, and two
    of each tile: so down < workers, and there are at most 2 (workers - 1) parts."""

    def divided(shape_idx: int, columns: int) -> Tiling:
        if in_order:
            return Tiling(shape_idx, columns)
        down = -(-rows // shapes[shape_idx].rows)
        return Tiling(shape_idx, columns, -(-max(1, workers - 1) // down), 2)

    order = sorted(range(len(shapes)), key=lambda idx: shapes[idx].wgmma_n)
    smallest = min(order, key=lambda idx: shapes[idx].rows)
    return divided(smallest, LEAST_COLUMNS), divided(
        order[-1], shapes[order[-1]].columns
    )


@dataclass(frozen=True)
class Prediction:
    """A tiling, its work and its time in microseconds. tiles_down: the number of its
    rows of tiles."""

    tiling: Tiling
    work: TileWork
    us: float
    tiles_down: int


def predictions(
    shapes: Sequence[TileShape],
    sizes: Sizes,
    workers: int,
    constants: TileConstants,
    *,
    gated: bool = False,
    in_order: bool = False,
    divides: bool = True,
    w_layout: str = "nk",
    ranks: int = 1,
) -> list[Prediction]:
    """All tilings, the fastest first; arguments as for `tilings`."""
    ranking = []
    kinds = {"gated": gated, "in_order": in_order, "divides": divides}
    for tiling in tilings(
        shapes, sizes, workers, w_layout=w_layout, ranks=ranks, **kinds
    ):
        shape = shapes[tiling.shape_idx]
        work = work_of(shape, tiling, sizes, workers, gated, ranks)
        tiles_down = -(-sizes[0] // (ranks * shape.rows))
        ranking.append(Prediction(tiling, work, work.us(constants), tiles_down))
    return sorted(ranking, key=lambda prediction: prediction.us)


def choose(
    sizes: Sizes,
    workers: int,
    shapes: Sequence[TileShape],
    tuning: Tuning,
    *,
    in_order: bool = False,
    divides: bool = True,
    w_layout: str = "nk",
    ranks: int = 1,
) -> list[Choice]:
    """The values of the dims of `dims_of` for the first tiling of `ranked`."""
    ranking, notes = ranked(
        sizes,
        workers,
        shapes,
        tuning,
        in_order=in_order,
        divides=divides,
        w_layout=w_layout,
        ranks=ranks,
    )
    return choices("", sizes, workers, shapes, ranking, tuning, notes)


def ranked(
    sizes: Sizes,
    workers: int,
    shapes: Sequence[TileShape],
    tuning: Tuning,
    *,
    in_order: bool = False,
    divides: bool = True,
    w_layout: str = "nk",
    ranks: int = 1,
) -> tuple[list[Prediction], list[str]]:
    """The predictions, the fastest first, and notes on the first one. That is the
    measured one that the tuning has for weights [n, k] of exactly these sizes, if it
    has one. Arguments as for `tilings`."""
    kinds = {"in_order": in_order, "divides": divides}
    ranking = predictions(
        shapes, sizes, workers, tuning.tiles, w_layout=w_layout, ranks=ranks, **kinds
    )
    measured = ""
    if workers == tuning.workers and w_layout == "nk" and ranks == 1:
        measured = tuning.kept_tiles(sizes)
    if measured:
        ranking.sort(
            key=lambda prediction: text_of(shapes, prediction.tiling) != measured
        )
    notes = []
    if text_of(shapes, ranking[0].tiling) == measured:
        notes = ["measured as faster than the next: etc-dist tune --sizes"]
    return ranking, notes


def choices(
    name: str,
    sizes: Sizes,
    workers: int,
    shapes: Sequence[TileShape],
    ranking: Sequence[Prediction],
    tuning: Tuning,
    notes: Sequence[str] = (),
) -> list[Choice]:
    """The dims of the first one of `ranking`, whose names begin with `name`, with the
    reasons. notes: lines to add to these."""
    reasons = partial(_explain, sizes, workers, shapes, ranking, tuning, notes)
    return [
        Choice(dim, value, reasons if dim == f"{name}shape" else list)
        for dim, value in dims_of(ranking[0].tiling, name).items()
    ]


def dims_of(tiling: Tiling, name: str = "") -> dict[str, int]:
    """A tiling as dims of a graph with `tiles_of_dims` and a `TiledMatmul`, whose names
    begin with `name`."""
    values = {
        "shape": tiling.shape_idx,
        "column_groups": tiling.columns // 8,
        "split_tile_columns": tiling.split_tile_columns,
        "parts": tiling.parts,
    }
    return {f"{name}{dim}": value for dim, value in values.items()}


def text_of(shapes: Sequence[TileShape], tiling: Tiling) -> str:
    """A tiling in words."""
    shape = shapes[tiling.shape_idx]
    words = f"{shape.rows} x {tiling.columns}{', swapped' * shape.swapped}"
    if tiling.parts == 1:
        return words
    split = f"{tiling.split_tile_columns} tile columns"
    return f"{words}, split-K in {tiling.parts} parts for {split}"


def _explain(
    sizes: Sizes,
    workers: int,
    shapes: Sequence[TileShape],
    ranking: Sequence[Prediction],
    tuning: Tuning,
    notes: Sequence[str],
) -> list[str]:
    best = ranking[0]
    shape, work = shapes[best.tiling.shape_idx], best.work
    times = work.block_us(tuning.tiles)
    bound = BOUNDS[times.index(max(times))]
    memory_us = work.memory_bytes / tuning.tiles.memory_bytes_per_us
    if memory_us > work.num_blocks * max(times):
        bound = "the memory's rate"
    scratch = f"; {work.scratch_bytes / 2**20:.1f} MiB of sums" * work.is_split
    return [
        f"tiles of {text_of(shapes, best.tiling)}: {best.us:.1f} us predicted for "
        f"{' x '.join(map(str, sizes))}, bound by {bound}",
        *(f"  {note}" for note in notes),
        f"  {work.num_tiles} tiles on {workers} workers, {ROW_GROUP} down first; "
        f"stages of {shape.stage_bytes >> 10} KB and {shape.depth} of k{scratch}",
        *(
            f"  next: {text_of(shapes, prediction.tiling)}: {prediction.us:.1f} us"
            for prediction in ranking[1 : 1 + NEXT]
        ),
        f"  tuning: {tuning.show()}",
    ]
