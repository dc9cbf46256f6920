"""The choice of the shape of tiles of pairs of workers, by a model of their times."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from etc_dist.functions.tile_matmul import MOST_FEW_ROWS, TileShape
from etc_dist.ops.order import ROW_GROUP
from etc_dist.ops.tuning import (
    Constants,
    Measured,
    MeasuredPair,
    Tuning,
    default_tuning,
)
from etc_dist.schedule.plan import Choice

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
BLOCK = 256
"""The most rows of a block if there are several. A block of rows has one event, and no
tile is in two blocks. They have equally many rows, but for the last."""
BLOCKS_IN_ONE = 5
"""On one rank, rows for up to so many blocks are a single one, which tiles divide
evenly: no rows arrive during the multiplication."""
BLOCK_UNIT = 16
"""The rows of a block are a multiple of this if there are several, so that half a block
may be a tile."""
EXCHANGE_UNIT = 64
"""The unit of the extent of sums that a pair exchanges."""
ROW_CLASSES = (8, 16, 32, 64, 96, 128, 200, 256, 400, 512, 800, 1024, 2048, 4096)
"""A time measured with one of these numbers of rows also serves fewer rows, down to
the next number."""
NEAR = 1 / 8
"""A measured time also serves n and k that differ by up to this share."""
BOUNDS = ("copies into the SMs", "reads from memory", "the tensor cores")
NEXT = 3
"""Further tile shapes that an explanation lists."""
Sizes = tuple[int, int, int]
"""M, N and K."""
Known = TypeVar("Known", Measured, MeasuredPair)


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
    tasks: int
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


def has_blocks(m: int, world_size: int) -> bool:
    """Whether m rows of all ranks are divided into blocks of up to BLOCK rows."""
    return world_size > 1 or m > BLOCKS_IN_ONE * BLOCK


def tiles_down(shape: TileShape, m: int, in_blocks: bool) -> int:
    """The number of tiles that m rows are divided into. in_blocks: none is in two
    blocks; then not for swapped tiles for few rows, which may not divide a block
    evenly."""
    if not in_blocks or m <= BLOCK:
        return -(-m // shape.rows)
    units = -(-m // (-(-m // BLOCK) * BLOCK_UNIT))
    block = units * BLOCK_UNIT
    return -(-m * -(-block // shape.rows) // block)


def work_of(
    shape: TileShape, m: int, n: int, k: int, workers: int, in_blocks: bool = False
) -> Work:
    """The work of x [m, k] and w [n, k] on tiles of `shape`; in_blocks: see
    `tiles_down`."""
    pairs = max(1, workers // 2)
    down = tiles_down(shape, m, in_blocks)
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
        tasks=tasks,
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
    in_blocks: bool = False,
) -> float:
    """Microseconds by the model; in_blocks: see `tiles_down`."""
    tuning = tuning or default_tuning()
    us = work_of(shape, m, n, k, workers, in_blocks).us(tuning.constants)
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
    in_blocks: bool = False,
    tuning: Tuning | None = None,
) -> list[Rating]:
    """The tile shapes to choose from for x [m, k] and w [n, k]: first those measured at
    such sizes, then the others by the model, each group the fastest first. gated: only
    shapes for gated matmuls. in_order: only shapes that add over k in order, so that a
    row has the same bits for any m. in_blocks: see `tiles_down`."""
    tuning = tuning or default_tuning()
    left = {
        number: shapes[number]
        for number in serving(m, shapes)
        if shapes[number].serves(gated=gated, in_order=in_order)
    }
    if in_blocks and m > BLOCK:  # the others cannot divide every block evenly
        whole = {n: one for n, one in left.items() if one.is_tall or not one.swapped}
        left = whole or left
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
        Rating(number, estimate(one, m, n, k, workers, tuning, in_blocks))
        for number, one in left.items()
        if not one.swapped or one.rows <= fewest.get((one.split, one.columns), one.rows)
    ]
    found.sort(key=lambda one: one.us)
    named = {shapes[one.number].key: one.number for one in found}
    allowed = [shapes[one.number] for one in found]
    near = _nearest(tuning, (m, n, k), workers, allowed, in_blocks)
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


def explained(
    dim: str,
    sizes: Sizes,
    workers: int,
    shapes: Sequence[TileShape],
    tuning: Tuning,
    *,
    gated: bool = False,
    in_order: bool = False,
    in_blocks: bool = False,
) -> Choice:
    """`choose` for m, n and k, as the value of a dim, with its reasons; arguments as
    for `rate`."""
    kinds = {"gated": gated, "in_order": in_order, "in_blocks": in_blocks}
    ratings = rate(*sizes, workers, shapes, **kinds, tuning=tuning)
    reasons = partial(explain, sizes, workers, shapes, ratings, tuning, in_blocks)
    return Choice(dim, ratings[0].number, reasons)


def row_class(m: int) -> int | None:
    """The number of rows whose measured times serve m rows; None above all."""
    return next((most for most in ROW_CLASSES if m <= most), None)


def nearest(
    measured: Iterable[Known],
    m: int,
    sizes: tuple[int, int],
    sizes_of: Callable[[Known], tuple[int, int]],
    serves: Callable[[Known], bool],
) -> Known | None:
    """The one of `measured` whose two sizes are nearest to `sizes`, of those near
    enough, of the class of m rows, and that serve. sizes_of: the sizes of one."""

    def distances(one: Known) -> list[float]:
        return [abs(a / b - 1) for a, b in zip(sizes, sizes_of(one), strict=True)]

    def is_near(one: Known) -> bool:
        pairs = zip(sizes, sizes_of(one), strict=True)
        return row_class(m) == one.m and all(abs(a - b) <= NEAR * b for a, b in pairs)

    found = (one for one in measured if is_near(one) and serves(one))
    return min(found, key=lambda one: sum(distances(one)), default=None)


def waves_of(shape: TileShape, sizes: Sizes, workers: int, in_blocks: bool) -> int:
    """The most tiles that a worker computes one after the other."""
    return work_of(shape, *sizes, workers, in_blocks).waves


def _nearest(
    tuning: Tuning,
    sizes: Sizes,
    workers: int,
    allowed: Sequence[TileShape],
    in_blocks: bool,
) -> Measured | None:
    """The nearest measured sizes that serve `sizes`: with as many waves on each of the
    shapes as when they were measured, without blocks, and with a time of allowed[0],
    the model's choice."""

    def serves(one: Measured) -> bool:
        at = one.m, one.n, one.k
        return allowed[0].key in one.us and all(
            waves_of(shape, sizes, workers, in_blocks)
            == waves_of(shape, at, workers, False)
            for shape in allowed
            if shape.key in one.us
        )

    m, n, k = sizes
    measured = tuning.measured if workers == tuning.workers else ()
    return nearest(measured, m, (n, k), lambda one: (one.n, one.k), serves)


def explain(
    sizes: Sizes,
    workers: int,
    shapes: Sequence[TileShape],
    ratings: Sequence[Rating],
    tuning: Tuning,
    in_blocks: bool = False,
) -> list[str]:
    """The reasons for the first one of `ratings`."""
    best, shape = ratings[0], shapes[ratings[0].number]
    work, pairs = work_of(shape, *sizes, workers, in_blocks), max(1, workers // 2)
    stage = work.stage_us(tuning.constants)
    bound = BOUNDS[stage.index(max(stage))]
    counts = [_counted(work.tasks, "tile"), _counted(work.waves, "wave")]
    others = [f"{shapes[one.number]}: {_time(one)}" for one in ratings[1 : 1 + NEXT]]
    order = f"{ROW_GROUP} tiles down first"
    return [
        f"tiles of {shape}: {_time(best)} for {' x '.join(map(str, sizes))}",
        f"  pairs of workers, {', '.join(counts)} of {pairs} pairs, {order}",
        f"  {_counted(work.stages, 'stage')} of {max(stage):.2f} us, bound by {bound}; "
        f"{shape.stage_bytes >> 10} KB, {shape.step} of k",
        *(f"  next: {each}" for each in others),
        f"  tuning: {tuning.show()}, measured with weights [n, k]",
    ]


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count > 1)}"


def _time(one: Rating) -> str:
    if one.measured is None:
        return f"{one.us:.1f} us predicted"
    at = one.measured
    return f"{one.us:.1f} us measured at {at.m} x {at.n} x {at.k}"
