"""The choice of the shape of tiles of pairs of workers, by a model of their times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from etc_dist.functions.tile_matmul import MOST_FEW_ROWS, TileShape
from etc_dist.ops.tuning import (
    Constants,
    Measured,
    Tuning,
    default_tuning,
)

SHAPES = (
    *(TileShape(r, 64, "k", swapped=True) for r in (32, 64)),
    TileShape(64, 80, "k", swapped=True),
    *(TileShape(r, c, swapped=True) for r in (8, 16, 32, 64) for c in (128, 256)),
    *(
        TileShape(r, c, swapped=True)
        for r in (8, 16, 32)
        for c in (64, 80, 112, 160, 192)
    ),
    TileShape(64, 192, swapped=True),
    TileShape(64, 112, "k", swapped=True),
    *(TileShape(r, c, "rows", swapped=True) for r in (64, 128) for c in (80, 128)),
    *(TileShape(r, 256, swapped=True) for r in (144, 160, 176, 208, 240)),
    *(TileShape(r, 128, "k", swapped=True) for r in (144, 160, 208, 240)),
    *(TileShape(128, c) for c in (112, 128, 160, 192, 224, 256)),
    *(TileShape(256, c, "rows") for c in (64, 80, 112, 128, 160, 192, 208, 224, 256)),
    *(TileShape(128, c, "k") for c in (64, 80, 96, 112, 128, 160, 192, 208, 224, 256)),
)
"""The tiles that one program has."""
ONLY_SWAPPED_ROWS = 32
"""Up to so many rows of x, other tiles were never faster."""
TALL_ROWS = range(129, 1281)
"""The numbers of rows of x for which tall tiles serve. With fewer rows others were
faster; at 2048 rows, where tall ones gained 2 % in single calls, three of 12 sizes took
1 to 9 % longer in CUDA graphs."""
GATED = tuple(number for number, one in enumerate(SHAPES) if one.may_be_gated)
"""The positions of shapes that may be gated."""
EXCHANGE_UNIT = 64
"""The unit of the extent of sums that a pair exchanges."""
ROW_CLASSES = (8, 16, 32, 64, 96, 128, 200, 256, 400, 512, 800, 1024, 2048, 4096)
"""A time measured with one of these numbers of rows also serves fewer rows, down to
the next number."""
NEAR = 1 / 8
"""A measured time also serves n and k that differ by up to this share."""
Sizes = tuple[int, int, int]
"""M, N and K."""


@dataclass(frozen=True)
class Work:
    """The numbers that determine the time of a matrix multiplication on a tile shape.

    stages: of a pair of workers, in all its waves. started: for few rows, the pairs of
    workers that have a tile. idle: for few rows, the share of pairs without one.
    copied, read, cycles: for one stage, bytes copied into an SM, bytes read from memory
    and cycles of wgmma. swapped: whether tiles are swapped ones for few rows.
    exchanged: the columns, or of tall tiles the rows, whose sums the workers of a pair
    exchange, in units of 64; 0 if they do not split k.
    """

    stages: int
    waves: int
    started: int
    idle: float
    copied: int
    read: float
    cycles: float
    swapped: bool
    exchanged: float

    def stage_us(self, constants: Constants) -> tuple[float, float, float]:
        """A stage takes the longest of these: its copies, the memory's reads and its
        wgmmas."""
        read = self.read / constants.memory_bytes_per_us
        return (
            self.copied / constants.sm_bytes_per_us,
            read * (1 + constants.idle * self.idle),
            self.cycles / constants.cycles_per_us,
        )

    def ends(self, constants: Constants) -> int:
        """The number of tile ends that add to the time. If loads are the bound, only
        the last: the stages of the next tile are loaded during the others."""
        *loaded, multiplied = self.stage_us(constants)
        return self.waves if multiplied >= max(loaded) else 1

    def us(self, constants: Constants) -> float:
        """The launch, the stages of all waves, and the ends of tiles that loads do not
        hide."""
        start = constants.start_us * self.started
        stages = self.stages * max(self.stage_us(constants))
        end = constants.swapped_us * self.swapped
        end += constants.exchange_us * self.exchanged
        return constants.launch_us + start + stages + self.ends(constants) * end


def work_of(shape: TileShape, m: int, n: int, k: int, workers: int) -> Work:
    """The work of x [m, k] and w [n, k] on tiles of `shape`."""
    pairs = max(1, workers // 2)
    down = -(-m // shape.rows)
    tasks = down * -(-n // shape.columns)
    waves, active = -(-tasks // pairs), min(tasks, pairs)
    depth = shape.step  # of the pair
    swapped = shape.swapped and not shape.is_tall
    few = swapped and down == 1
    # A wgmma takes half a cycle for each column.
    blocks = -(-shape.worker_columns // 64) if shape.swapped else 2
    wide = shape.worker_rows if shape.swapped else shape.worker_columns
    exchanged = shape.rows if shape.is_tall else shape.worker_columns
    return Work(
        stages=waves * -(-k // depth),
        waves=waves,
        started=active if few else 0,
        idle=1 - active / pairs if few else 0.0,
        copied=shape.stage_bytes,
        read=active * shape.columns * depth * 2 / min(down, pairs),
        cycles=blocks * shape.depth / 16 * wide / 2,
        swapped=swapped,
        exchanged=(shape.split == "k") * exchanged / EXCHANGE_UNIT,
    )


def estimate(
    shape: TileShape,
    m: int,
    n: int,
    k: int,
    workers: int,
    tuning: Tuning | None = None,
) -> float:
    """Microseconds by the model."""
    tuning = tuning or default_tuning()
    us = work_of(shape, m, n, k, workers).us(tuning.constants)
    return us * tuning.factor(shape.key, m)


@dataclass(frozen=True)
class Rating:
    """The time of a tile shape. number: its position in a sequence of shapes. measured:
    the sizes at which it was measured; None if it is predicted."""

    number: int
    us: float
    measured: Measured | None = None


def serving(m: int, shapes: Sequence[TileShape] = SHAPES) -> list[int]:
    """The positions of the shapes that can serve m rows. Swapped tiles for few rows
    must hold all of up to MOST_FEW_ROWS; those whose rows are divided serve only if
    both workers have rows. Tall tiles serve TALL_ROWS."""
    few = min(m, MOST_FEW_ROWS)
    return [
        number
        for number, one in enumerate(shapes)
        if not (one.swapped and one.rows < few)
        and not (one.swapped and one.multicasts and m <= one.worker_rows)
        and not (one.is_tall and m not in TALL_ROWS)
    ]


def rate(
    m: int,
    n: int,
    k: int,
    workers: int,
    shapes: Sequence[TileShape] = SHAPES,
    *,
    gated: bool = False,
    in_order: bool = False,
    tuning: Tuning | None = None,
) -> list[Rating]:
    """The tile shapes to choose from for x [m, k] and w [n, k]: first those measured at
    such sizes, then the others by the model, each group the fastest first. gated: only
    shapes for gated matmuls. in_order: only shapes that add over k in order, so that a
    row has the same bits for any m."""
    tuning = tuning or default_tuning()
    left = {
        number: shapes[number]
        for number in serving(m, shapes)
        if shapes[number].serves(gated=gated, in_order=in_order)
    }
    swapped = {number: one for number, one in left.items() if one.swapped}
    if m <= ONLY_SWAPPED_ROWS:
        left = swapped or left
    # Of those that hold all rows and differ in nothing else, the one with fewest rows.
    fewest: dict[tuple[str, int], int] = {}
    for one in swapped.values():
        if one.rows >= m:
            kind = one.split, one.columns
            fewest[kind] = min(one.rows, fewest.get(kind, one.rows))
    found = [
        Rating(number, estimate(one, m, n, k, workers, tuning))
        for number, one in left.items()
        if not one.swapped or one.rows <= fewest.get((one.split, one.columns), one.rows)
    ]
    found.sort(key=lambda one: one.us)
    named = {shapes[one.number].key: one.number for one in found}
    allowed = [shapes[one.number] for one in found]
    near = _nearest(tuning, (m, n, k), workers, allowed)
    if near is None:
        return found
    known = [Rating(named[t], us, near) for t, us in near.us.items() if t in named]
    known.sort(key=lambda one: one.us)
    first = {one.number for one in known}
    return known + [one for one in found if one.number not in first]


def choose(
    m: int,
    n: int,
    k: int,
    workers: int,
    shapes: Sequence[TileShape] = SHAPES,
    *,
    gated: bool = False,
    in_order: bool = False,
    tuning: Tuning | None = None,
) -> int:
    """The position of the fastest shape in `shapes`; arguments as for `rate`."""
    kinds = {"gated": gated, "in_order": in_order}
    return rate(m, n, k, workers, shapes, **kinds, tuning=tuning)[0].number


def row_class(m: int) -> int | None:
    """The number of rows whose measured times serve m rows; None above all."""
    return next((most for most in ROW_CLASSES if m <= most), None)


def _waves(shape: TileShape, sizes: Sizes, workers: int) -> int:
    """The most tiles that a worker computes one after the other."""
    return work_of(shape, *sizes, workers).waves


def _nearest(
    tuning: Tuning, sizes: Sizes, workers: int, allowed: Sequence[TileShape]
) -> Measured | None:
    """The measured sizes whose N and K are nearest, of those near enough, of the same
    class of rows, and that serve: with as many waves on each of the shapes as when they
    were measured, and with a time of allowed[0], the model's choice."""
    m, *weight = sizes

    def distances(one: Measured) -> list[float]:
        return [abs(a / b - 1) for a, b in zip(weight, (one.n, one.k), strict=True)]

    def is_near(one: Measured) -> bool:
        pairs = zip(weight, (one.n, one.k), strict=True)
        return row_class(m) == one.m and all(abs(a - b) <= NEAR * b for a, b in pairs)

    def serves(one: Measured) -> bool:
        at = one.m, one.n, one.k
        return allowed[0].key in one.us and all(
            _waves(shape, sizes, workers) == _waves(shape, at, workers)
            for shape in allowed
            if shape.key in one.us
        )

    measured = tuning.measured if workers == tuning.workers else ()
    near = (one for one in measured if is_near(one) and serves(one))
    return min(near, key=lambda one: sum(distances(one)), default=None)
