"""The dims of a step that its arrays do not determine: rows with padding, tile shapes,
and how attention is divided."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from etc_dist.functions.attend import HEADS
from etc_dist.functions.plan_shares import CUT, MOST_CUTS, STAGE
from etc_dist.functions.tile_matmul import MOST_FEW_ROWS, TileShape, shapes_for
from etc_dist.models.config import ModelConfig
from etc_dist.models.experts import Mixture
from etc_dist.models.sizes import layout_of
from etc_dist.ops.matmul_policy import SHAPES, choose, estimate
from etc_dist.ops.tuning import Tuning, default_tuning

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""The rows of a step; others are padded to the next one: few shapes to prove."""
STEP_SHAPES = tuple(
    replace(shape, deep=not shape.swapped)
    for shape in SHAPES
    if shape.rows <= ROWS[-1]
    and not shape.multicasts
    and (shape.swapped or shape.split == "columns")
)
"""The tiles of static programs. Larger ones, or multicast, add code, of which the
instruction cache holds little. Deep stages, for tiles of 128 rows, need less code.
Steps were not measured with tiles of 128 rows whose k is split."""
DYNAMIC_SHAPES = (
    *(TileShape(64, c, "k", swapped=True) for c in (64, 80)),
    *(TileShape(r, 256, swapped=True) for r in (8, 16, 64)),
    *(TileShape(r, 160, swapped=True) for r in (8, 32)),
    *(TileShape(r, c, swapped=True) for r, c in ((16, 64), (32, 192))),
    *(TileShape(128, c, deep=True) for c in (112, 256)),
)
"""The tiles of dynamic programs, which have more code per call: with those of static
ones Qwen3-30B-A3B spills 64 bytes in place of 16. By the model of times, the matmuls of
Qwen3 take 1.7 % longer on average than with all shapes."""
GATED = ("gate_up", "shared_up", "dense_up")
"""The matmuls of gate and up, but for those of chosen experts."""
SLICE_POSITIONS = 2 * STAGE
"""The fewest positions of a share that has a part of the longest request."""
MOST_SLICES = 16
"""Shares of a row at most, if rows are few: more cost more in their combination than
they save."""
BUSY_SHARES = 64
"""Shares of all heads that read a cache at nearly the rate of all workers: rows are not
divided further. The prototype measured 84 to 94 %, on an H200."""
MOST_STEPS = 128
"""Steps of a launch, at most."""
MEAN_ROWS = 3
"""Rows of an expert's tile, as a multiple of the mean of all experts."""
TASK_US = 2.0
"""Microseconds for each tile of an expert: the work of its loading thread before the
first load, where the ring of stages does not hide it."""
LEAST_TILE = 8
"""The fewest rows of such a tile: the smallest N of wgmma."""


def shapes_of(schedule: str) -> Sequence[TileShape]:
    """The tiles of a model's program."""
    return DYNAMIC_SHAPES if schedule == "dynamic" else STEP_SHAPES


def step_counts(most: int) -> list[int]:
    """The numbers of steps of a launch: powers of two and `most`."""
    return [*(1 << n for n in range((most - 1).bit_length())), most]


def padded(rows: int) -> int:
    """The number of rows of the program's call for `rows` rows."""
    return ROWS[bisect_left(ROWS, rows)]


@dataclass(frozen=True)
class StepPolicy:
    """Chooses the dims of a model's steps. workers: of a GPU; None for the CPU backend,
    on which few tasks are fast. in_order: a row has the same bits in every batch. Then
    all tiles add over k in order, and the slices of a row depend on its length alone.
    """

    config: ModelConfig
    workers: int | None
    shapes: Sequence[TileShape] = STEP_SHAPES
    in_order: bool = False
    tuning: Tuning = field(default_factory=default_tuning)
    _known: dict[tuple[int, int], dict[str, int]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def dims(self, rows: int, longest: int) -> dict[str, int]:
        """For `rows` rows, which attend to up to `longest` positions each."""
        key = rows, self.length(longest)
        if key not in self._known:
            self._known[key] = self._choose(rows, longest)
        return dict(self._known[key])

    def length(self, longest: int) -> int:
        """The bucket of `longest`: dims depend only on it and on the rows."""
        slices = min(longest // SLICE_POSITIONS, MOST_SLICES)
        return slices + (MOST_SLICES + 1) * self._cuts(longest)

    def shapes_of(self, matmul: str) -> Sequence[TileShape]:
        """The tiles of a matmul, of which the dim `<matmul>_shape` selects one."""
        return shapes_for(layout_of(matmul, self.config.float8), self.shapes)

    def _choose(self, rows: int, longest: int) -> dict[str, int]:
        shapes = {
            f"{name}_shape": self._shape(name, rows, n, k)
            for name, (n, k) in self._matmuls().items()
        }
        if self.config.mixture is not None:
            shapes |= self._expert_shapes(rows, self.config.mixture)
        return {
            **shapes,
            **self._shares(rows, longest),
            "cuts": self._cuts(longest),
        }

    def every(self, positions: int) -> list[Mapping[str, int]]:
        """All choices, for texts of up to `positions`."""
        useful = {n * SLICE_POSITIONS for n in range(1, MOST_SLICES + 1)}
        useful |= {(CUT * STAGE << n) + 1 for n in range(MOST_CUTS.bit_length())}
        lengths = [1, *sorted(n for n in useful if n <= positions)]
        chosen = [{"rows": r, **self.dims(r, n)} for r in ROWS for n in lengths]
        return list({tuple(dims.values()): dims for dims in chosen}.values())

    def capacity(
        self, most_rows: int, positions: int, steps: int
    ) -> list[Mapping[str, int]]:
        """The choices for each number of rows up to `most_rows`, at the full length,
        with `steps` steps in a launch."""
        counts = (rows for rows in ROWS if rows <= most_rows)
        most = {"steps": steps, "samples": 1}
        return [{"rows": rows, **self.dims(rows, positions), **most} for rows in counts]

    def _matmuls(self) -> dict[str, tuple[int, int]]:
        """The n and k of each."""
        config = self.config
        heads = config.heads * config.head_dim
        width = heads + 2 * config.kv_heads * config.head_dim
        found = {
            "qkv": (width, config.hidden),
            "o": (config.hidden, heads),
            "head": (config.vocabulary, config.hidden),
        }
        if config.mixture is None:
            found["gate_up"] = 2 * config.inner, config.hidden
            found["down"] = config.hidden, config.inner
        if config.shared_inner:
            found["shared_up"] = 2 * config.shared_inner, config.hidden
            found["shared_down"] = config.hidden, config.shared_inner
        if config.dense_inner:
            found["dense_up"] = 2 * config.dense_inner, config.hidden
            found["dense_down"] = config.hidden, config.dense_inner
        return found

    def _expert_shapes(self, rows: int, mixture: Mixture) -> dict[str, int]:
        """Tiles with the rows that most experts have, and the fastest widths for the
        expected number of chosen experts, if rows choose uniformly."""
        mean = rows * mixture.router.top_k / mixture.experts
        heights = sorted({shape.rows for shape in self.shapes})
        wanted = min(rows, max(LEAST_TILE, math.ceil(MEAN_ROWS * mean)))
        fitting = [n for n in heights if n >= wanted] or heights
        height = min(fitting[0], max(n for n in heights if n <= MOST_FEW_ROWS))
        unused = (1 - mixture.router.top_k / mixture.experts) ** rows
        groups = math.ceil(mixture.held * (1 - unused))
        config = self.config
        return {
            "expert_up_shape": self._grouped_shape(
                height, groups, 2 * config.inner, config.hidden, gated=True
            ),
            "expert_down_shape": self._grouped_shape(
                height, groups, config.hidden, config.inner
            ),
        }

    def _grouped_shape(
        self, height: int, groups: int, n: int, k: int, *, gated: bool = False
    ) -> int:
        """The position of the fastest shape of `height` rows, for weights [n, k] of
        `groups` experts."""

        def cost(number: int) -> float:
            shape = self.shapes[number]
            tiles = -(-n // shape.columns)
            if self.workers is None:
                return tiles
            of_all = groups * tiles * shape.columns
            waves = -(-2 * groups * tiles // self.workers)
            sizes = height, of_all, k, self.workers
            return TASK_US * waves + estimate(shape, *sizes, self.tuning)

        known = [
            number
            for number, shape in enumerate(self.shapes)
            if shape.rows == height and self._may_have(shape, gated)
        ]
        return min(known, key=cost)

    def _shape(self, name: str, rows: int, n: int, k: int) -> int:
        gated, shapes = name in GATED, self.shapes_of(name)
        if self.workers is not None:
            kinds = {"gated": gated, "in_order": self.in_order}
            sizes = rows, n, k, self.workers
            return choose(*sizes, shapes, **kinds, tuning=self.tuning)
        tasks = {
            number: -(-rows // s.rows) * -(-n // s.columns)
            for number, s in enumerate(shapes)
            if self._may_have(s, gated)
        }
        return min(tasks, key=tasks.__getitem__)

    def _may_have(self, shape: TileShape, gated: bool) -> bool:
        return shape.serves(gated=gated, in_order=self.in_order)

    def _shares(self, rows: int, longest: int) -> dict[str, int]:
        """The shares of each KV head. A worker has one list of a share while that is
        enough for all rows, or else two."""
        cluster = self.shapes[0].cluster
        if self.workers is None:
            return {"shares": cluster, "shares_of_task": cluster}
        heads = self.config.kv_heads
        heads *= -(-self.config.heads // heads // HEADS)
        tasks = max(1, self.workers // cluster // heads)
        if rows * heads > self.workers:
            return {"shares": 2 * cluster * tasks, "shares_of_task": 2 * cluster}
        each = min(max(1, longest // SLICE_POSITIONS), MOST_SLICES)
        each = min(each, -(-BUSY_SHARES // (rows * heads)))
        tasks = min(tasks, -(-rows * each // cluster))
        return {"shares": tasks * cluster, "shares_of_task": cluster}

    def _cuts(self, longest: int) -> int:
        """The slots of a row if it is cut: a power of two, so that there are few shapes
        to prove."""
        if not self.in_order:
            return 0
        slices = min(-(-longest // (CUT * STAGE)), MOST_CUTS)
        return 1 << (slices - 1).bit_length()
