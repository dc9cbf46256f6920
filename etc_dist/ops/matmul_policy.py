"""Which tiles a matrix multiplication uses: a model of their times."""

from __future__ import annotations

from collections.abc import Sequence

from etc_dist.functions.tile_matmul import TileShape

SHAPES = (
    *(TileShape(r, 64, "k", swapped=True) for r in (32, 64)),
    TileShape(64, 80, "k", swapped=True),
    *(TileShape(r, c, swapped=True) for r in (8, 16, 32, 64) for c in (128, 256)),
    *(
        TileShape(r, c, swapped=True)
        for r in (8, 16, 32)
        for c in (64, 80, 112, 160, 192)
    ),
    *(TileShape(128, c) for c in (112, 128, 160, 224, 256)),
    *(TileShape(256, c, "rows") for c in (64, 80, 112, 128, 160, 192, 256)),
)
"""The tiles that one program has."""
MOST_SWAPPED_ROWS = 64
"""Tiles of fewer rows serve no more rows than they have."""
IN_ONE_WAVE = (TileShape(64, 80, "k", swapped=True),)
"""Chosen for one tile down and one wave only: other times were not measured."""
GATED = tuple(number for number, one in enumerate(SHAPES) if one.may_be_gated)
"""Those that may be gated."""
SM_BYTES_PER_US = 78_000
"""The rate of one SM's bulk copies. This and the next ones fit the times of all tiles
for five N and K at M = 1 to 1024 on an H200, without the narrow ones for few
rows: the chosen ones take at most 7 % more than the best ones, 0.3 % on average."""
MEMORY_BYTES_PER_US = 5_350_000
IDLE = 0.15
"""For few rows, one tile: the share of the memory's rate that is lost if no worker
reads."""
START_US = 0.01
"""For few rows: of each pair that has a tile. Both order tiles that differ little."""
CYCLES_PER_US = 1700
LAUNCH_US = 8.6
SWAPPED_US = 1.7
"""The end of a tile, if it is swapped: its sums go through shared memory."""
EXCHANGE_US = 0.5
"""Of a pair that splits k."""


def choose(
    m: int,
    n: int,
    k: int,
    workers: int,
    shapes: Sequence[TileShape] = SHAPES,
    *,
    gated: bool = False,
    in_order: bool = False,
) -> int:
    """The position in `shapes` of the tiles that take the least time for x [m, k] and
    w [n, k]. gated: of those that may be gated. in_order: of those that add k in its
    order, so that a row has the same bits for each m."""
    few = min(m, MOST_SWAPPED_ROWS)
    times = {
        number: estimate(one, m, n, k, workers)
        for number, one in enumerate(shapes)
        if (one.may_be_gated or not gated)
        and (one.k_parts == 1 or not in_order)
        and not (one.swapped and one.rows < few)
        and (one not in IN_ONE_WAVE or _fits_at_once(one, m, n, workers))
    }
    return min(times, key=times.__getitem__)


def _fits_at_once(shape: TileShape, m: int, n: int, workers: int) -> bool:
    """Whether a pair of workers has at most one tile, and the tiles have all rows."""
    return m <= shape.rows and -(-n // shape.columns) <= workers // 2


def estimate(shape: TileShape, m: int, n: int, k: int, workers: int) -> float:
    """Microseconds: the launch, and for each wave of tiles its stages and its end. A
    stage takes the longest of its copies, the memory's reads and its wgmmas."""
    pairs = max(1, workers // 2)
    down = -(-m // shape.rows)
    tasks = down * -(-n // shape.columns)
    waves, active = -(-tasks // pairs), min(tasks, pairs)
    splits_k = shape.split == "k"
    depth = shape.depth * (2 if splits_k else 1)  # of the pair
    copied = shape.stage_bytes / SM_BYTES_PER_US
    read = active * shape.columns * depth * 2 / min(down, pairs) / MEMORY_BYTES_PER_US
    start = 0.0
    if shape.swapped and down == 1:
        read *= 1 + IDLE * (1 - active / pairs)
        start = START_US * active
    # A wgmma takes half a cycle for each column.
    blocks = -(-shape.worker_columns // 64) if shape.swapped else 2
    wide = shape.worker_rows if shape.swapped else shape.worker_columns
    multiplied = blocks * shape.depth / 16 * wide / 2 / CYCLES_PER_US
    end = SWAPPED_US * shape.swapped + EXCHANGE_US * splits_k
    stages = waves * -(-k // depth) * max(copied, read, multiplied)
    # The next tile's stages are copied during the end of one.
    ends = waves if multiplied >= max(copied, read) else 1
    return LAUNCH_US + start + stages + ends * end
