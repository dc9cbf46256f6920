"""The dims of a step that its arrays do not determine: rows with padding, tile shapes,
and how attention is divided."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from etc_dist.functions.attend import HEADS
from etc_dist.functions.attend_prompt import HEAD_DIMS, rows_of_block
from etc_dist.functions.plan_shares import CUT, LEAST_RUN, MOST_CUTS, STAGE
from etc_dist.functions.tile_shape import MOST_FEW_ROWS, TileShape, shapes_for
from etc_dist.models.config import ModelConfig
from etc_dist.models.experts import EXPERT_MATMULS, DecoderMixture
from etc_dist.models.sizes import layout_of
from etc_dist.ops.tile_model import (
    FAMILY,
    Sizes,
    Tiling,
    dims_of,
    num_tiles_of,
    text_of,
    tilings,
    work_of,
)
from etc_dist.ops.tuning import Tuning, default_tuning

ROWS = (
    *(1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512),
    *(768, 1024, 1536, 2048),
)
"""The rows of a step; others are padded to the next one: few shapes to prove. At most
MOST_ROWS of `plan_shares`."""
MOST_REQUESTS = 128
"""The most requests at once. Steps have more rows for prompts alone: those with drafts
or of several in a launch have at most as many."""
MOST_OUTPUTS = 512
"""The most rows of a step that get logits, and the most of all with
`deterministic="batch"`, where the sums of all cuts of a row are kept."""
WIDE_COLUMNS = {True: (96, 112, 160), False: (96, 160, 224)}
"""Whether a model has experts -> the columns of its tiles for many rows. More of them
add code, of which the instruction cache holds little: by the model of times, the
matmuls of dense models then take 0.2 % less on average at 96 and 128 rows. Models with
experts have no matmul as wide as `gate_up`, but for the head."""
SCALED = TileShape(128, 128, swapped=True, scaled=True)
"""For more than 64 rows and float8 weights, of which each code is then widened once. In
models with experts, few of them are in matmuls of so many rows."""
DIVIDED = ("o", "down")
"""The matmuls whose tiles may use split-K, if the model has no experts, and tiles are
stored on one rank. Others have so many columns, or so few elements of k, that it gains
at most a few percent, by the model; and each has more code."""
GATED = ("gate_up", "expert_up", "shared_up", "dense_up")
"""The matmuls of gate and up."""
SLICE_POSITIONS = 2 * STAGE
"""The fewest positions of a share that has a part of the longest request."""
MOST_SLICES = 16
"""Shares of a row at most, if rows are few: more cost more in their combination than
they save."""
BUSY_SHARES = 64
"""Shares of all heads that read a cache at nearly the rate of all workers: rows are not
divided further. The prototype measured 84 to 94 %, on an H200."""
BLOCK_STAGES = 2
"""Stages that a worker reads for rows of shares in the time that it takes for one of a
block: few rows are faster in shares, which all workers divide. An estimate for an H200,
by the bytes that both read from L2 and from shared memory."""
PROMPT_ROWS = 64
"""Blocks suffice for prompts of so many rows each: the last one of each may have few
rows. Tasks of blocks that do not exist are passed over at once."""
MOST_STEPS = 128
"""Steps of a launch, at most."""
MEAN_ROWS = 3
"""Rows of an expert's tile, as a multiple of the mean of all experts."""
MOST_SWAPPED_ROWS = 64
"""Up to so many rows, tiles that are not swapped were never faster. With them a step of
Qwen3-32B with 64 rows took 5 % longer, on an H200."""
MANY_ROWS_RATES = {"fill_bytes_per_us": 57e3, "parts_us": 8.0}
"""With more rows, up to MOST_REQUESTS, what differs from a call of one matmul in the
constants of the model of times. Measured in steps of Qwen3-32B with 128 rows on an
H200: each matmul loaded 54 to 59 KB/us into an SM, and the sums of parts ended 9 us
after the last part."""
TASK_US = 2.0
"""Microseconds for each task of a worker: the work of its loading thread before the
first load, where the ring of stages does not hide it."""
LEAST_TILE = 8
"""The fewest rows of an expert's tile: the smallest N of wgmma."""


def step_shapes(*, has_experts: bool, is_float8: bool = False) -> tuple[TileShape, ...]:
    """The tiles of a step."""
    wide = WIDE_COLUMNS[has_experts]
    return (
        *(shape for shape in FAMILY if shape.rows <= MOST_FEW_ROWS),
        *([SCALED] if is_float8 and not has_experts else []),
        *(shape for shape in FAMILY if not shape.swapped and shape.columns in wide),
    )


def step_counts(most: int) -> list[int]:
    """The numbers of steps of a launch: powers of two and `most`."""
    return [*(1 << n for n in range((most - 1).bit_length())), most]


def most_steps(rows: int, steps: int) -> int:
    """The most steps of a launch with `rows` rows. steps: with few rows."""
    return steps if rows <= MOST_REQUESTS else 1


def dims_of_tiles(name: str, tiling: Tiling, is_divided: bool) -> dict[str, int]:
    """The dims that select the tiles of a matmul. is_divided: whether they may use
    split-K."""
    dims = dims_of(tiling, f"{name}_")
    return dims if is_divided else dict([*dims.items()][:2])


def num_outputs(rows: int, num_wanted: int) -> int:
    """How many of `rows` rows, with padding, get logits, if the first `num_wanted` have
    to. One of two numbers, so that there are few shapes to prove: with more than
    MOST_REQUESTS rows, most are of prompts."""
    return min(rows, MOST_OUTPUTS if num_wanted > MOST_REQUESTS else MOST_REQUESTS)


def row_counts(most: int) -> tuple[int, ...]:
    """The numbers of rows of steps with up to `most` rows."""
    return ROWS[: bisect_left(ROWS, most) + 1]


def padded(rows: int) -> int:
    """The number of rows of the program's call for `rows` rows."""
    return ROWS[bisect_left(ROWS, rows)]


def mean_tiles(rows: int, share: float, height: int) -> float:
    """The expected number of tiles of `height` rows that an expert has, if each of
    `rows` rows chooses it with the probability `share`."""
    if share == 1:
        return -(-rows // height)

    def log_probability(count: int) -> float:
        # NOTE: its factors are beyond the range of a float for many rows.
        log_ways = math.lgamma(rows + 1) - math.lgamma(count + 1)
        log_ways -= math.lgamma(rows - count + 1)
        return log_ways + count * math.log(share) + (rows - count) * math.log1p(-share)

    return sum(
        math.exp(log_probability(count)) * -(-count // height)
        for count in range(1, rows + 1)
    )


@dataclass(frozen=True)
class StepPolicy:
    """Chooses the dims of a model's steps. workers: of a GPU; None for the CPU backend,
    on which few tasks are fast. in_order: a row has the same bits in every batch. Then
    all tiles add over k in order, and the slices of a row depend on its length alone.
    """

    config: ModelConfig
    workers: int | None
    in_order: bool = False
    tuning: Tuning = field(default_factory=default_tuning)
    ranks: int = 1
    _dims_of_step: dict[tuple[int, int, int, bool], dict[str, int]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _tiles: dict[tuple[int, int], dict[str, int]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def dims(
        self,
        rows: int,
        longest: int,
        outputs: int | None = None,
        *,
        has_blocks: bool = False,
    ) -> dict[str, int]:
        """For `rows` rows, which attend to up to `longest` positions each. outputs: the
        rows with logits; default: all. has_blocks: see `has_blocks`."""
        outputs = rows if outputs is None else outputs
        key = rows, self.length(longest), outputs, has_blocks
        if key not in self._dims_of_step:
            self._dims_of_step[key] = self._choose(rows, longest, outputs, has_blocks)
        return dict(self._dims_of_step[key])

    def has_blocks(self, prompt_rows: int) -> bool:
        """Whether rows of a step are attended in blocks, which is faster for many.
        prompt_rows: of its last rows, those in runs of LEAST_RUN or more rows of one
        request. In order there are none: which rows are in a block depends on the
        batch."""
        if self.in_order or self.config.head_dim not in HEAD_DIMS:
            return False
        least = LEAST_RUN
        if self.workers is not None:
            least = max(least, BLOCK_STAGES * self.workers // self._head_tiles)
        return prompt_rows >= least

    def length(self, longest: int) -> int:
        """The bucket of `longest`: dims depend only on it and on the rows."""
        num_slices = min(longest // SLICE_POSITIONS, MOST_SLICES)
        return num_slices + (MOST_SLICES + 1) * self._cuts(longest)

    def shapes_of(self, matmul: str) -> Sequence[TileShape]:
        """The tiles of a matmul, of which the dim `<matmul>_shape` selects one."""
        has_experts = self.config.mixture is not None
        is_float8 = bool(self.config.float8)
        shapes = step_shapes(has_experts=has_experts, is_float8=is_float8)
        return shapes_for(layout_of(matmul, self.config.float8), shapes)

    def text(self, matmul: str, dims: Mapping[str, int]) -> str:
        """The tiles of a matmul in words."""
        shape, num_groups = (
            dims[f"{matmul}_{dim}"] for dim in ("shape", "column_groups")
        )
        split = dims.get(f"{matmul}_split_tile_columns", 0)
        tiling = Tiling(shape, 8 * num_groups, split, dims.get(f"{matmul}_parts", 1))
        return text_of(self.shapes_of(matmul), tiling)

    def _choose(
        self, rows: int, longest: int, outputs: int, has_blocks: bool
    ) -> dict[str, int]:
        tiles_key = rows, outputs
        if tiles_key not in self._tiles:
            self._tiles[tiles_key] = self._choose_tiles(rows, outputs)
        return {
            **self._tiles[tiles_key],
            **self._shares(rows, longest),
            "cuts": self._cuts(longest),
            **self._blocks(rows if has_blocks else 0),
        }

    def _choose_tiles(self, rows: int, outputs: int) -> dict[str, int]:
        """The dims of the tiles of all matmuls."""
        dims: dict[str, int] = {}
        for name, (n, k) in self._matmuls().items():
            m = outputs if name == "head" else rows
            tiling = self._tiling(m, n, k, name)
            dims |= dims_of_tiles(name, tiling, self._divides(name))
        if self.config.mixture is not None:
            dims |= self._expert_tiles(rows, self.config.mixture)
        return dims

    def every(
        self, positions: int, most_rows: int = ROWS[-1]
    ) -> list[Mapping[str, int]]:
        """All choices, for texts of up to `positions` and steps of up to `most_rows`
        rows."""
        useful = {n * SLICE_POSITIONS for n in range(1, MOST_SLICES + 1)}
        useful |= {(CUT * STAGE << n) + 1 for n in range(MOST_CUTS.bit_length())}
        lengths = [1, *sorted(n for n in useful if n <= positions)]
        dims_of_steps = [
            {
                "rows": rows,
                "outputs": outputs,
                **self.dims(rows, n, outputs, has_blocks=has_blocks),
            }
            for rows in row_counts(most_rows)
            for outputs in sorted({num_outputs(rows, n) for n in (1, rows)})
            for n in lengths
            for has_blocks in {False, self.has_blocks(rows)}
        ]
        return list({tuple(dims.values()): dims for dims in dims_of_steps}.values())

    def capacity(
        self, most_rows: int, positions: int, steps: int
    ) -> list[Mapping[str, int]]:
        """The choices for each number of rows up to `most_rows`, at the full length,
        with up to `steps` steps in a launch."""
        return [
            {
                "rows": rows,
                "outputs": num_outputs(rows, rows),
                **self.dims(rows, positions, has_blocks=self.has_blocks(rows)),
                "steps": most_steps(rows, steps),
                "samples": 1,
            }
            for rows in row_counts(most_rows)
        ]

    def _matmuls(self) -> dict[str, tuple[int, int]]:
        """The n and k of each, n of gate and of up."""
        config = self.config
        heads = config.heads * config.head_dim
        width = heads + 2 * config.kv_heads * config.head_dim
        sizes_by_name = {
            "qkv": (width, config.hidden),
            "o": (config.hidden, heads),
            "head": (config.vocabulary, config.hidden),
        }
        if config.mixture is None:
            sizes_by_name["gate_up"] = config.inner, config.hidden
            sizes_by_name["down"] = config.hidden, config.inner
        if config.shared_inner:
            sizes_by_name["shared_up"] = config.shared_inner, config.hidden
            sizes_by_name["shared_down"] = config.hidden, config.shared_inner
        if config.dense_inner:
            sizes_by_name["dense_up"] = config.dense_inner, config.hidden
            sizes_by_name["dense_down"] = config.hidden, config.dense_inner
        return sizes_by_name

    def _tiling(self, rows: int, n: int, k: int, name: str) -> Tiling:
        """The fastest one by the model of times; for the CPU backend, of few tiles."""
        shapes, sizes, gated = self.shapes_of(name), (rows, n, k), name in GATED
        candidates = self._whole_tilings(shapes, gated)
        workers = self.workers or 1
        if self._divides(name) and self.workers is not None:
            candidates += tilings(
                shapes, sizes, workers, gated=gated, in_order=self.in_order
            )
        if rows <= MOST_SWAPPED_ROWS:
            candidates = [
                candidate
                for candidate in candidates
                if shapes[candidate.shape_idx].swapped
            ]

        is_many = MOST_SWAPPED_ROWS < rows <= MOST_REQUESTS
        cost = self._cost(MANY_ROWS_RATES if is_many else {})
        return min(candidates, key=lambda t: cost(shapes[t.shape_idx], t, sizes, gated))

    def _whole_tilings(self, shapes: Sequence[TileShape], gated: bool) -> list[Tiling]:
        """Those without split-K."""
        return [
            Tiling(shape_idx, columns)
            for shape_idx, shape in enumerate(shapes)
            if shape.serves(gated=gated, in_order=self.in_order)
            for columns in shape.widths(gated=gated)
        ]

    def _cost(
        self, rates: Mapping[str, float]
    ) -> Callable[[TileShape, Tiling, Sizes, bool], float]:
        """The time of a matmul with some tiles; on the CPU backend, their number.
        rates: in place of constants of the tuning."""
        workers = self.workers
        if workers is None:
            return num_tiles_of
        constants = replace(self.tuning.tiles, task_us=TASK_US, **rates)

        def us(shape: TileShape, tiling: Tiling, sizes: Sizes, gated: bool) -> float:
            return work_of(shape, tiling, sizes, workers, gated).us(constants)

        return us

    def _divides(self, name: str) -> bool:
        """Whether tiles of a matmul may use split-K."""
        return name in DIVIDED and self.ranks == 1 and self.config.mixture is None

    def _expert_tiles(self, rows: int, mixture: DecoderMixture) -> dict[str, int]:
        """Tiles with the rows that most experts have, and the fastest widths for the
        expected number of chosen experts, if rows choose uniformly. If experts have
        several tiles, those of the fastest height."""
        heights = sorted(set.intersection(*map(self._heights, EXPERT_MATMULS)))
        share = mixture.router.top_k / mixture.experts
        if rows > MOST_REQUESTS:
            candidates = [
                self._grouped_tilings(
                    height, math.ceil(mixture.held * mean_tiles(rows, share, height))
                )
                for height in heights
            ]
            tilings_by_name = min(candidates, key=lambda candidate: candidate[0])[1]
        else:
            least_rows = min(rows, max(LEAST_TILE, math.ceil(MEAN_ROWS * rows * share)))
            fitting = [n for n in heights if n >= least_rows] or heights
            height = min(fitting[0], max(n for n in heights if n <= MOST_FEW_ROWS))
            num_experts = math.ceil(mixture.held * (1 - (1 - share) ** rows))
            _, tilings_by_name = self._grouped_tilings(height, num_experts)
        dims: dict[str, int] = {}
        for name, tiling in tilings_by_name.items():
            dims |= dims_of_tiles(name, tiling, False)
        return dims

    def _heights(self, name: str) -> set[int]:
        """The rows of the tiles that may serve a matmul."""
        shapes = self.shapes_of(name)
        whole_tilings = self._whole_tilings(shapes, name in GATED)
        return {shapes[tiling.shape_idx].rows for tiling in whole_tilings}

    def _grouped_tilings(
        self, height: int, num_tiles: int
    ) -> tuple[float, dict[str, Tiling]]:
        """The time of the experts' matmuls with the fastest tiles of `height` rows, and
        these. num_tiles: of the rows of all experts."""
        hidden, inner = self.config.hidden, self.config.inner
        sizes = dict(
            zip(EXPERT_MATMULS, ((inner, hidden), (hidden, inner)), strict=True)
        )
        fastest = {
            name: self._grouped_tiling(name, height, num_tiles, n, k)
            for name, (n, k) in sizes.items()
        }
        all_us = sum(us for us, _ in fastest.values())
        return all_us, {name: tiling for name, (_, tiling) in fastest.items()}

    def _grouped_tiling(
        self, name: str, height: int, num_row_tiles: int, n: int, k: int
    ) -> tuple[float, Tiling]:
        """The time of the fastest tiles of `height` rows, and these. n and k: of the
        weights of an expert, or of its gate and of its up."""
        shapes, gated = self.shapes_of(name), name in GATED
        all_columns, cost = n * (1 + gated), self._cost({})

        def cost_of_all(tiling: Tiling) -> float:
            num_tiles = -(-all_columns // tiling.columns)
            sizes = height, num_row_tiles * num_tiles * tiling.columns, k
            return cost(shapes[tiling.shape_idx], tiling, sizes, False)

        fitting_tilings = [
            tiling
            for tiling in self._whole_tilings(shapes, gated)
            if shapes[tiling.shape_idx].rows == height
        ]
        fastest = min(fitting_tilings, key=cost_of_all)
        return cost_of_all(fastest), fastest

    def _shares(self, rows: int, longest: int) -> dict[str, int]:
        """The shares of each KV head. A worker has one list of a share while that is
        enough for all rows, or else two."""
        if self.workers is None:
            return {"shares": 1, "shares_of_task": 1}
        heads = self._head_tiles
        num_tasks = max(1, self.workers // heads)
        if rows * heads > self.workers:
            return {"shares": 2 * num_tasks, "shares_of_task": 2}
        num_shares = min(max(1, longest // SLICE_POSITIONS), MOST_SLICES)
        num_shares = min(num_shares, -(-BUSY_SHARES // (rows * heads)))
        return {"shares": min(num_tasks, rows * num_shares), "shares_of_task": 1}

    @property
    def _head_tiles(self) -> int:
        """The tasks of attention for each share or block."""
        heads = self.config.kv_heads
        return heads * -(-self.config.heads // heads // HEADS)

    def _blocks(self, rows: int) -> dict[str, int]:
        """The most blocks of `rows` rows."""
        if self.config.head_dim not in HEAD_DIMS:
            return {}
        height = rows_of_block(self.config.heads // self.config.kv_heads)
        return {"most_blocks": -(-rows // height) + -(-rows // PROMPT_ROWS)}

    def _cuts(self, longest: int) -> int:
        """The slots of a row if it is cut: a power of two, so that there are few shapes
        to prove."""
        if not self.in_order:
            return 0
        num_slices = min(-(-longest // (CUT * STAGE)), MOST_CUTS)
        return 1 << (num_slices - 1).bit_length()
