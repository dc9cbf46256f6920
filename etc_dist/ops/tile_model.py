"""The choice of a matrix multiplication's tiles, by a model of its time.

A tile is computed by one worker (an SM). Tiles take turns in waves over all workers. If
the last wave is not full, k of its tiles may be divided into equal parts, as
`ops/multiply.py` does. No size is stored: a choice follows from M, N, K, the number of
workers and the constants of a kind of GPU, which `etc-dist tune` fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from etc_dist.functions.matmul import STAGE_K
from etc_dist.functions.tile_matmul import GROUP_WORDS, SLICE, TileShape
from etc_dist.ops.order import ROW_GROUP
from etc_dist.ops.tuning import TileConstants, Tuning
from etc_dist.schedule.plan import Choice

FAMILY = (
    *(
        TileShape(r, c, "none", swapped=True)
        for r in (8, 16, 32, 64)
        for c in (64, 128)
    ),
    *(
        TileShape(r, 128, "none", swapped=True)
        for r in (80, 96, 128, 144, 160, 176, 192, 208, 224, 256)
    ),
    *(TileShape(128, c, "none") for c in (96, 112, 160, 176, 224, 256)),
)
"""The tiles that one program has: 128 rows of x, or up to 128 rows of w, are the M of
wgmma; of the other operand any multiple of 8."""
RING_BYTES = 210_000
"""Shared memory for stages."""
ROW_BYTES = GROUP_WORDS // 8 * 4
"""The sums of a row of the N of wgmma, in a part of a tile."""
REFERENCE_AREA = 128 * 256
"""Elements of the tile whose end takes `end_us`."""
BOUNDS = (
    "the tensor cores",
    "loads into shared memory",
    "accesses to shared memory",
    "the latency of loads",
)
MOST_PARTS = 12
JOIN = 8
"""The exponent by which several bounds of the same time are joined: the time is little
more than the longest."""
NEXT = 3
"""Further tilings that an explanation lists."""
Sizes = tuple[int, int, int]
"""M, N and K."""


@dataclass(frozen=True)
class Tiling:
    """The tiles of a matmul: a shape, by its number; the columns of a tile; how many
    columns of tiles are divided along k, and into how many parts."""

    shape: int
    columns: int
    split_columns: int = 0
    parts: int = 1


@dataclass(frozen=True)
class TileWork:
    """What the most loaded worker does for a tiling, and all workers together.

    blocks: of its tiles and parts. cycles, filled, read: of a block, the cycles of
    products, the bytes loaded into shared memory, and those that wgmma reads of it.
    stage_blocks: blocks of a stage. ahead: blocks that fit in shared memory behind the
    one in use. area: elements of a tile. ends: tiles and parts. moved: bytes that all
    workers read or write. streamed: bytes of weights that this worker alone reads.
    summed: bytes of parts' sums that it stores and reads. scratch: of all of them.

    For many tilings at once, all may be arrays; then times are arrays, too.
    """

    tiles: int
    blocks: int
    cycles: float
    filled: int
    read: int
    stage_blocks: int
    ahead: int
    area: int
    ends: int
    moved: int
    streamed: float
    is_split: int
    summed: int
    scratch: int

    def block_us(self, constants: TileConstants) -> tuple[float, float, float, float]:
        """A block takes about the longest of these: its products, its loads, the
        accesses to shared memory, and the latency of loads."""
        c = constants
        shared = 128 * c.shared_ratio * c.cycles_per_us
        return (
            self.cycles / c.cycles_per_us,
            self.filled / c.fill_bytes_per_us,
            (self.read + self.filled) / shared,
            c.latency_us / self.ahead,
        )

    def us(self, constants: TileConstants) -> float:
        """The time of the whole matmul."""
        c = constants
        block = _joined(*self.block_us(c)) + c.stage_us / self.stage_blocks
        core: float = _joined(
            self.blocks * block,
            self.moved / c.memory_bytes_per_us,
            self.streamed / c.worker_bytes_per_us,
        )
        ends = c.end_us * self.ends * self.area / REFERENCE_AREA
        parts = c.parts_us * self.is_split + self.summed / c.sums_bytes_per_us
        return c.call_us + core + ends + parts


def _joined(*times: float) -> Any:
    return sum(each**JOIN for each in times) ** (1 / JOIN)


def work_of(
    shape: TileShape, tiling: Tiling, sizes: Sizes, workers: int, gated: bool = False
) -> TileWork:
    """The work of x [m, k] and weights [n, k], of gate and up if `gated`."""
    m, n, k = sizes
    n *= 2 if gated else 1
    columns = tiling.columns
    down, across = -(-m // shape.rows), -(-n // columns)
    rows = (m + 8 * down - 1) // (8 * down) * 8
    is_small = shape.swapped and shape.columns <= 64
    fixed, free = (
        64 if is_small else 128,
        shape.rows if shape.swapped else shape.columns,
    )
    stages = -(-k // shape.depth)
    part = -(-stages // tiling.parts)
    num_parts = down * tiling.split_columns * tiling.parts
    every = num_parts + down * (across - tiling.split_columns)
    loads = []
    for worker in {0, max(num_parts - 1, 0) % workers, num_parts % workers}:
        of_parts = -(-max(num_parts - worker, 0) // workers)
        of_all = -(-max(every - worker, 0) // workers)
        loads.append((of_parts * part + (of_all - of_parts) * stages, of_all, of_parts))
    most, ends, parts_stored = max(loads)
    stage_blocks = shape.depth // STAGE_K
    used = min(rows, free) if shape.swapped else free
    slices = -(-down * tiling.split_columns * -(-used // SLICE) // workers)
    sums = slices * tiling.parts * SLICE + parts_stored * used
    active = min(workers, every)
    return TileWork(
        tiles=down * across,
        blocks=most * stage_blocks,
        cycles=fixed * free / 32,
        filled=(rows + columns) * 2 * STAGE_K,
        read=(1 if is_small else 2) * 4 * (2048 + free * 32),
        stage_blocks=stage_blocks,
        ahead=max(1, RING_BYTES // shape.stage_bytes - 1) * stage_blocks,
        area=fixed * free,
        ends=ends,
        moved=2 * (n * k + m * k + m * n),
        streamed=2 * n * k / active,
        is_split=int(num_parts > 0),
        summed=sums * ROW_BYTES if num_parts else 0,
        scratch=num_parts * -(-free // SLICE) * SLICE * ROW_BYTES,
    )


def tilings(
    shapes: Sequence[TileShape],
    sizes: Sizes,
    workers: int,
    *,
    gated: bool = False,
    in_order: bool = False,
    w_layout: str = "nk",
) -> Iterator[Tiling]:
    """The tilings to choose from. in_order: only those that add over k in order, so
    that a row has the same bits for any m."""
    m, n, k = sizes
    n *= 2 if gated else 1
    for number, shape in enumerate(shapes):
        if not shape.serves(gated=gated, in_order=in_order):
            continue
        down, stages = -(-m // shape.rows), -(-k // shape.depth)
        widths = {shape.columns}
        for waves in (1, 2, 3):  # as wide as so many waves need
            most = max(1, waves * workers // down)
            widths.add(-(-n // (8 * most)) * 8)
            widths.add(-(-n // (16 * most)) * 16)
        for columns in sorted(widths):
            if not shape.serves_columns(columns, gated=gated, w_layout=w_layout):
                continue
            yield Tiling(number, columns)
            if in_order:
                continue
            for split, parts in _divisions(down, -(-n // columns), stages, workers):
                yield Tiling(number, columns, split, parts)


def _divisions(
    down: int, across: int, stages: int, workers: int
) -> Iterator[tuple[int, int]]:
    """Numbers of columns of tiles that are divided, and of parts, none of them empty,
    which fit in one wave."""
    waves = down * across // workers
    if down * across == waves * workers:
        return
    found = set()
    for whole in {waves, max(waves - 1, 0)}:
        split = across - whole * workers // down
        most = min((workers + down - 1) // (down * split), MOST_PARTS)
        for parts in {most, most - 1, most // 2, 2}:
            if 1 < parts <= most and stages // parts >= 2:
                found.add((split, -(-stages // -(-stages // parts))))
    yield from sorted(found)


@dataclass(frozen=True)
class Prediction:
    """A tiling, its work and its time in microseconds."""

    tiling: Tiling
    work: TileWork
    us: float


def predictions(
    shapes: Sequence[TileShape],
    sizes: Sizes,
    workers: int,
    constants: TileConstants,
    *,
    gated: bool = False,
    in_order: bool = False,
    w_layout: str = "nk",
) -> list[Prediction]:
    """All tilings, the fastest first; arguments as for `tilings`."""
    found = []
    kinds = {"gated": gated, "in_order": in_order}
    for each in tilings(shapes, sizes, workers, w_layout=w_layout, **kinds):
        work = work_of(shapes[each.shape], each, sizes, workers, gated)
        found.append(Prediction(each, work, work.us(constants)))
    return sorted(found, key=lambda each: each.us)


def choose(
    sizes: Sizes,
    workers: int,
    shapes: Sequence[TileShape],
    tuning: Tuning,
    *,
    name: str = "",
    gated: bool = False,
    in_order: bool = False,
    w_layout: str = "nk",
) -> list[Choice]:
    """The fastest tiling, or the one that the tuning keeps for weights [n, k] of these
    sizes: the values of the dims of `add_matmul` and of the tiles, whose names begin
    with `name`. Arguments as for `tilings`."""
    found = predictions(
        shapes,
        sizes,
        workers,
        tuning.tiles,
        gated=gated,
        in_order=in_order,
        w_layout=w_layout,
    )
    kept = ""
    if workers == tuning.workers and w_layout == "nk" and not gated:
        kept = tuning.kept_tiles(sizes)
    if kept:
        found.sort(key=lambda each: text_of(shapes, each.tiling) != kept)
    reasons = partial(_explain, sizes, workers, shapes, found, tuning, kept)
    return [
        Choice(f"{name}{dim}", value, reasons if dim == "shape" else list)
        for dim, value in dims_of(found[0].tiling).items()
    ]


def dims_of(tiling: Tiling) -> dict[str, int]:
    """A tiling as dims of a graph."""
    return {
        "shape": tiling.shape,
        "eights": tiling.columns // 8,
        "split_columns": tiling.split_columns,
        "parts": tiling.parts,
    }


def text_of(shapes: Sequence[TileShape], tiling: Tiling) -> str:
    """A tiling in words."""
    shape = shapes[tiling.shape]
    words = f"{shape.rows} x {tiling.columns}{', swapped' * shape.swapped}"
    if tiling.parts == 1:
        return words
    return f"{words}, {tiling.split_columns} across in {tiling.parts} parts of k"


def _explain(
    sizes: Sizes,
    workers: int,
    shapes: Sequence[TileShape],
    found: Sequence[Prediction],
    tuning: Tuning,
    kept: str,
) -> list[str]:
    best = found[0]
    is_kept = text_of(shapes, best.tiling) == kept
    shape, work = shapes[best.tiling.shape], best.work
    times = work.block_us(tuning.tiles)
    bound = BOUNDS[times.index(max(times))]
    memory_us = work.moved / tuning.tiles.memory_bytes_per_us
    if memory_us > work.blocks * max(times):
        bound = "the memory's rate"
    scratch = f"; {work.scratch / 2**20:.1f} MiB of sums" if work.scratch else ""
    return [
        f"tiles of {text_of(shapes, best.tiling)}: {best.us:.1f} us predicted for "
        f"{' x '.join(map(str, sizes))}, bound by {bound}",
        *["  measured as faster than the next: etc-dist tune --sizes"] * is_kept,
        f"  {work.tiles} tiles on {workers} workers, {ROW_GROUP} down first; stages of "
        f"{shape.stage_bytes >> 10} KB and {shape.depth} of k{scratch}",
        *(
            f"  next: {text_of(shapes, each.tiling)}: {each.us:.1f} us"
            for each in found[1 : 1 + NEXT]
        ),
        f"  tuning: {tuning.show()}",
    ]
