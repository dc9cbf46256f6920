"""Steps of a decoder's program on the world's backend, and the rows of a workload."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from etc_dist import Program
from etc_dist.functions.append_kv import PagedCache
from etc_dist.functions.attend_prompt import HEAD_DIMS, PAIRS
from etc_dist.functions.plan_shares import BOUND, EXTENT, LEAST_RUN, plan_shares
from etc_dist.functions.tile_shape import TileShape
from etc_dist.ir.tensor import numpy_dtype
from etc_dist.models.config import ModelConfig
from etc_dist.models.sizes import DecoderSizes
from etc_dist.models.step_policy import DIVIDED, dims_of_tiles
from etc_dist.ops.tile_model import Tiling
from etc_dist.runtime.arrays import inspect
from tests.ops.arrays import Arrays

Array = np.ndarray[Any, Any]
FEW_ROWS = 16
SHAPES = (
    TileShape(FEW_ROWS, 64, swapped=True),
    TileShape(128, 128, swapped=True),
)
"""Tiles for few rows and for many."""
Rows = list[tuple[int, list[int]]]
"""Of a step: requests, each with the ids of its next positions."""
MOST_ROWS = 128
NOWHERE = 2**30
"""A page of a place that no position uses."""


def row_arrays(
    ids: Any, request: Any, position: Any, end: Any = None
) -> dict[str, Array]:
    """The arrays of a decoder's rows. end: default: all have one step."""
    ids, request, position = (np.array(a, np.int32) for a in (ids, request, position))
    return {
        "ids": ids,
        "position": position,
        "request": request,
        "end": np.array(position + 1 if end is None else end, np.int32),
        "stop": np.full((len(ids), 1), -1, np.int32),
        "sampling": np.zeros((len(ids), 5), np.int32),
    }


def share_dims(
    tasks: int, cuts: int = 0, lists: int = 2, blocks: int = 0, head_dim: int = 64
) -> dict[str, int]:
    """Of the attention of a decoder: the tasks of a KV head, the lists of each, and the
    most blocks of rows."""
    dims = {"shares": lists * tasks, "shares_of_task": lists, "cuts": cuts}
    return dims | ({"most_blocks": blocks} if head_dim in HEAD_DIMS else {})


def tile_dims(
    shapes: Sequence[TileShape], shape_numbers: Mapping[str, int], ranks: int = 1
) -> dict[str, int]:
    """The dims that select one of the shapes for each matmul, without split-K."""
    dims: dict[str, int] = {}
    for name, number in shape_numbers.items():
        tiling = Tiling(number, shapes[number].columns)
        divides = name in DIVIDED and ranks == 1 and "down" in shape_numbers
        dims |= dims_of_tiles(name, tiling, divides)
    return dims


def in_parts(split: int, parts: int) -> dict[str, int]:
    """The dims of a dense decoder whose matmuls use split-K that may: for so many
    columns of tiles, in so many parts."""
    values = {"split_tile_columns": split, "parts": parts}
    return {f"{name}_{dim}": n for name in DIVIDED for dim, n in values.items()}


def plan_data(
    dims: Mapping[str, int], ranks: int = 1, length: int = 3000
) -> dict[str, Any]:
    """What the attention of a run loads whose first row has this length, and each
    other one half of that before: some are divided. With blocks, the last rows are
    those of two prompts."""
    rows, steps, shares = (dims[name] for name in ("rows", "steps", "shares"))
    lengths = np.maximum(length >> np.arange(rows), 1)
    request, page = np.arange(rows), 16
    if dims["most_blocks"] > 0:
        lengths[-2 * LEAST_RUN :] = [*range(1, 1 + LEAST_RUN)] * 2
        request[-2 * LEAST_RUN :] = np.repeat([0, 1], LEAST_RUN)
    table = np.zeros((rows, -(-length // page)), np.int32)
    plan = [
        np.zeros(shape, np.int32)
        for shape in (
            (rows, EXTENT),
            (shares + 1, BOUND),
            (max(shares, rows), 3),
            (1,),
            (1 + dims["most_blocks"], 2),
        )
    ]
    numbers = {"pages": 1, "lists": dims["shares_of_task"], "cuts": dims["cuts"]}
    cos_sin = np.zeros((length, 64))
    body = plan_shares(PagedCache(64, page), PAIRS).body
    body(cos_sin, request, lengths - 1, table, *plan, **numbers)
    plan[2] = plan[2][: shares if dims["cuts"] == 0 else rows]
    names = "extents", "bounds", "combined", "num_combined", "blocks"
    return {
        name: ranks * [np.stack(steps * [array[None]])]
        for name, array in zip(names, plan, strict=True)
        if name != "extents"
    }


class Steps:
    """The cache and the pages of some requests, which grow step by step."""

    def __init__(
        self,
        program: Program,
        weights: Mapping[str, Array],
        config: ModelConfig,
        sizes: DecoderSizes,
        positions: Sequence[int],
        rng: np.random.Generator,
    ):
        """positions: of each request, the number that it will have. Pages are in any
        order; the cache begins as NaN."""
        self.program, self.rng = program, rng
        self.arrays = Arrays(program.backend)
        self.lengths = [0] * len(positions)
        page_size = sizes.page_size
        self.dtype, self.matmuls = sizes.dtype, sizes.matmuls
        self.mixture = sizes.mixture
        self.experts: Array | None = None
        """After a step: the experts that its rows chose, [layers, rows, top_k]."""
        counts = [-(-n // page_size) for n in positions]
        numbers = iter(rng.permutation(sum(counts)))
        table = np.full((len(positions), max(counts)), NOWHERE, np.int32)
        for row, count in zip(table, counts, strict=True):
            row[:count] = [next(numbers) for _ in range(count)]
        pages = (config.layers, sum(counts), 2, config.kv_heads, page_size)
        element = numpy_dtype(sizes.dtype)
        self.given = dict(weights) | {
            "cos_sin": config.cos_sin(max(counts) * page_size),
            "table": table,
            "cache": np.full((*pages, config.head_dim), np.nan, element),
        }
        self.dims = {
            "layers": config.layers,
            "hidden": config.hidden,
            "inner": config.inner,
            "vocabulary": config.vocabulary,
            "all_ids": config.vocabulary,
            "positions": len(self.given["cos_sin"]),
            "requests": len(positions),
            "most_pages": max(counts),
            "pages": sum(counts),
            "steps": 1,
            "stops": 1,
            "samples": 0,
        }
        self.given = {name: self.arrays.put(a) for name, a in self.given.items()}

    def run(
        self,
        rows: Rows,
        *,
        tasks: int = 1,
        cuts: int = 0,
        shape: int = 0,
        unused: int = 0,
    ) -> tuple[Array, Array]:
        """The logits and the next ids of all rows, in order. tasks, cuts: as of
        `share_dims`. shape: of the tiles of all matmuls. unused: rows more that belong
        to no request. The program gets the rows in any order."""
        places = [
            (new, request, self.lengths[request] + n)
            for request, ids in rows
            for n, new in enumerate(ids)
        ]
        for request, ids in rows:
            self.lengths[request] += len(ids)
        order = self.rng.permutation(len(places) + unused)
        mixed = np.array([*places, *unused * [(0, -1, -1)]], np.int32)[order].T.copy()
        num_rows = len(order)
        arrays = self.given | {
            name: self.arrays.put(array) for name, array in row_arrays(*mixed).items()
        }
        logits = np.full((num_rows, self.dims["vocabulary"]), np.nan)
        arrays["logits"] = self.arrays.put_as(logits, self.dtype)
        arrays["next_ids"] = self.arrays.put(np.full((1, num_rows), -1, np.int32))
        if self.mixture is not None:
            ids_shape = self.dims["layers"], num_rows, self.mixture.router.top_k
            arrays["experts"] = self.arrays.put(np.full(ids_shape, -9, np.int32))
        dims = (
            self.dims
            | dict.fromkeys(("rows", "outputs"), num_rows)
            | share_dims(tasks, cuts)
        )
        dims |= tile_dims(SHAPES, dict.fromkeys(self.matmuls, shape))
        arguments = {name: inspect(name, array) for name, array in arrays.items()}
        with self.program.world.exclusive:
            self.program.launch(self.program.bind(arguments, dims))
        self.program.synchronize()
        at = np.argsort(order)[: len(places)]
        if self.mixture is not None:
            self.experts = self.arrays.get(arrays["experts"]).astype(np.int32)[:, at]
        return (
            self.arrays.get(arrays["logits"])[at],
            self.arrays.get(arrays["next_ids"])[0, at].astype(np.int32),
        )

    def experts_of(self, rows: Rows) -> list[Array | None]:
        """After a step: the experts of each request's rows."""
        if self.experts is None:
            return [None] * len(rows)
        ends = np.cumsum([len(ids) for _, ids in rows])
        return np.split(self.experts, ends[:-1], axis=1)


@dataclass
class Workload:
    """Prompts that are processed in chunks, in steps that also decode, and then `steps`
    steps that decode all requests."""

    prompts: Sequence[Sequence[int]]
    steps: int
    mixed: int = 4
    """Steps of a request among chunks of other prompts, at most."""
    most_rows: int = MOST_ROWS
    next_ids: dict[int, int] = field(default_factory=dict)
    """To be set after each step: the id of each request whose prompt has ended."""

    @property
    def positions(self) -> list[int]:
        more = self.steps + self.mixed
        return [len(prompt) + more for prompt in self.prompts]

    def __iter__(self) -> Iterator[Rows]:
        num_stored = [0] * len(self.prompts)
        decoded = [0] * len(self.prompts)
        while pending := [
            r for r, p in enumerate(self.prompts) if num_stored[r] < len(p)
        ]:
            decoding = [r for r in self.next_ids if decoded[r] < self.mixed]
            rows: Rows = [
                (r, [self.next_ids[r]]) for r in decoding[: self.most_rows // 2]
            ]
            room = self.most_rows - len(rows)
            for r, _ in rows:
                decoded[r] += 1
            for r in pending:
                chunk = list(self.prompts[r][num_stored[r] : num_stored[r] + room])
                if chunk:
                    rows.append((r, chunk))
                num_stored[r] += len(chunk)
                room -= len(chunk)
            yield rows
        for _ in range(self.steps):
            yield [(r, [self.next_ids[r]]) for r in range(len(self.prompts))]


def last_rows(rows: Rows) -> list[int]:
    """Of each request of a step, the number of its last row."""
    return [int(n) - 1 for n in np.cumsum([len(ids) for _, ids in rows])]
