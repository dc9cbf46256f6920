"""Dense matrix multiplication on tiles of many shapes; CUDA half in
`kernels/functions/tile_matmul.cuh`.

All compute x @ w.T with fp32 accumulators, w stored [n, k]. A cluster of two workers
runs one task. Which shape is fast depends on the sizes: see `ops/matmul_policy.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from etc_dist.functions.matmul import DEPTH, STAGE_K, two_byte
from etc_dist.ir import (
    DeviceFunction,
    Expr,
    Extent,
    Graph,
    Operand,
    TmaBox,
    maximum,
    minimum,
)
from etc_dist.ir.expr import Const
from etc_dist.ir.function import COMPUTE, LOAD, TENSOR

BUFFER_BYTES = 16384
"""Shared memory through which tiles are stored."""
MOST_STAGE_BYTES = 54 * 1024
"""Of stages of 128 elements of k."""
SPLITS = ("columns", "rows", "k")
"""What the two workers of a task may divide, as `TileSplit` in the CUDA half."""


@dataclass(frozen=True)
class TileShape:
    """A task's tile of y: `rows` of x by `columns` rows of w.

    split: what the two workers divide. "columns"; "rows": then the pair loads w once,
    each worker half of it for both; or "k": then their sums are added.
    swapped: the rows of w are the rows of the tensor cores' tile, and those of x its
    columns; for few rows of x, of which little padding is multiplied.
    """

    rows: int
    columns: int
    split: str = "columns"
    swapped: bool = False

    def __str__(self) -> str:
        swapped = ", swapped" * self.swapped
        return f"{self.rows} x {self.columns}, split {self.split}{swapped}"

    @property
    def worker_rows(self) -> int:
        return self.rows // 2 if self.split == "rows" else self.rows

    @property
    def worker_columns(self) -> int:
        return self.columns // 2 if self.split == "columns" else self.columns

    @property
    def loaded_columns(self) -> int:
        """Rows of w that one worker loads at once."""
        return self.columns if self.split == "k" else self.columns // 2

    @property
    def depth(self) -> int:
        """k of a stage. Wide stages stream weights faster, but some must be in flight
        while one is multiplied."""
        if self.swapped and self.worker_columns == 64:
            return 4 * STAGE_K
        return (2 if self._bytes_of(2 * STAGE_K) <= MOST_STAGE_BYTES else 1) * STAGE_K

    @property
    def stage_bytes(self) -> int:
        return self._bytes_of(self.depth)

    def _bytes_of(self, depth: int) -> int:
        return (self.worker_rows + self.worker_columns) * depth * 2

    def packed(self, number: int) -> int:
        """The shape as the CUDA half reads it: tile `number` of a program."""
        fields = (
            (number, 6),
            (SPLITS.index(self.split), 2),
            (int(self.swapped), 1),
            (self.depth // STAGE_K, 3),
            (self.worker_rows // 8, 6),
            (self.worker_columns // 8, 6),
        )
        value = 0
        for field, bits in reversed(fields):
            value = value << bits | field
        return value


def _multiply(x: Any, w: Any, y: Any, *, packed_tile: int) -> None:
    y[...] = (x.astype(np.float32) @ w.astype(np.float32).T).astype(y.dtype)


class Tiles:
    """The tiles of a graph, one of which the number `shape` chooses in a run: their
    sizes as numbers of the graph `g`."""

    def __init__(self, g: Graph, shape: Expr, shapes: Sequence[TileShape]):
        self._shapes = tuple(shapes)

        def chosen(name: str, value: Callable[[TileShape], int]) -> Expr:
            return g.let(name, _chosen(shape, [*map(value, self._shapes)]))

        self.rows = chosen("tile_rows", lambda s: s.rows)
        self.columns = chosen("tile_columns", lambda s: s.columns)
        self._box_rows = chosen("x_box_rows", lambda s: s.worker_rows)
        self._box_columns = chosen("w_box_rows", lambda s: s.loaded_columns)
        packed = [s.packed(number) for number, s in enumerate(self._shapes)]
        g.let("packed_tile", _chosen(shape, packed))
        self._packed = tuple(packed)

    def function(self, dtype: str) -> DeviceFunction:
        """x tile [rows, k], w tile [columns, k] -> y tile [rows, columns], in this
        rank's memory. Tiles may end at the tensors' edges; a row of y is a multiple of
        8."""
        element = two_byte(dtype)
        return DeviceFunction(
            name="tile_matmul",
            body=_multiply,
            source="functions/tile_matmul.cuh",
            lane=TENSOR,
            reads=2,
            writes=1,
            cluster=2,
            parts=2,
            roles=(LOAD, COMPUTE),
            streams=(1,),
            shared=BUFFER_BYTES,
            boxes={
                0: TmaBox(self._box_rows, STAGE_K),
                1: TmaBox(self._box_columns, STAGE_K),
            },
            tile={
                0: Operand((None, DEPTH), element),
                1: Operand((None, DEPTH), element),
                2: Operand((None, Extent(begins=8)), element),
            },
            constants={"kIsHalf": int(dtype == "float16"), "kTiles": self._packed},
        )


def _chosen(shape: Expr, values: Sequence[int]) -> Expr:
    """values[shape]."""
    total: Expr = Const(0)
    for number, value in enumerate(values):
        is_other = minimum(1, maximum(shape - number, number - shape))
        total = total + value * (1 - is_other)
    return total
