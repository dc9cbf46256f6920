"""Dense matrix multiplication on tiles of many shapes; CUDA half in
`kernels/functions/tile_matmul.cuh`.

All compute x @ w.T with fp32 accumulators, w stored [n, k], or the SwiGLU of two such
products. A cluster of two workers runs one task. Which shape is fast depends on the
sizes: see `ops/matmul_policy.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from etc_dist.functions.matmul import DEPTH, STAGE_K, silu, two_byte
from etc_dist.ir import (
    DeviceFunction,
    Expr,
    Extent,
    Graph,
    Operand,
    TmaBox,
    equal,
    select,
)
from etc_dist.ir.expr import Const
from etc_dist.ir.function import COMPUTE, LOAD, TENSOR

BUFFER_BYTES = 16384
"""Shared memory through which tiles are stored."""
MOST_STAGE_BYTES = 64 * 1024
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
    def gated_columns(self) -> int:
        """Rows of gate or up that one worker loads at once."""
        whole = self.split == "rows"  # each worker loads one of them
        return self.loaded_columns if whole else self.loaded_columns // 2

    @property
    def may_be_gated(self) -> bool:
        """Whether half of a worker's columns are whole eights."""
        return self.worker_columns % 16 == 0

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
    y[...] = _product(x, w).astype(y.dtype)


def _multiply_gated(x: Any, gate: Any, up: Any, y: Any, *, packed_tile: int) -> None:
    y[...] = (silu(_product(x, gate)) * _product(x, up)).astype(y.dtype)


def _product(x: Any, w: Any) -> Any:
    return x.astype(np.float32) @ w.astype(np.float32).T


class Tiles:
    """The tiles of one matrix multiplication of a graph `g`, of which the number
    `shape` chooses one in a run. Their sizes are numbers of the graph, whose names
    begin with `name`."""

    def __init__(
        self, g: Graph, name: str, shape: Expr, shapes: Sequence[TileShape]
    ) -> None:
        self._g, self._name, self._shape = g, name, shape
        self._shapes = tuple(shapes)
        self._packed = [s.packed(number) for number, s in enumerate(self._shapes)]
        self.rows = self._number("rows", [s.rows for s in shapes])
        self.columns = self._number("columns", [s.columns for s in shapes])
        """Rows of w, of one matrix."""
        self._x_box = self._number("x_box", [s.worker_rows for s in shapes])
        self.values = {"packed_tile": self._number("tile", self._packed)}
        """For `g.call`."""

    def store(self, dtype: str) -> DeviceFunction:
        """x tile [rows, k], w tile [columns, k] -> y tile [rows, columns], in this
        rank's memory. Tiles may end at the tensors' edges; a row of y is a multiple of
        8."""
        box = self._number("w_box", [s.loaded_columns for s in self._shapes])
        return self._function(dtype, _multiply, [box])

    def gated(self, dtype: str) -> DeviceFunction:
        """x tile [rows, k], gate and up tiles [columns / 2, k] -> silu(x @ gate.T) *
        (x @ up.T), a tile [rows, columns / 2]; otherwise as `store`. For shapes that
        `may_be_gated`."""
        box = self._number("w_box", [s.gated_columns for s in self._shapes])
        return self._function(dtype, _multiply_gated, [box, box])

    def half_columns(self) -> Expr:
        """Rows of gate, and of up, of a gated tile."""
        return self._number("half_columns", [s.columns // 2 for s in self._shapes])

    def _number(self, name: str, values: Sequence[int]) -> Expr:
        return self._g.let(f"{self._name}_{name}", _chosen(self._shape, values))

    def _function(
        self, dtype: str, body: Callable[..., None], weights: Sequence[Expr]
    ) -> DeviceFunction:
        element, streams = two_byte(dtype), range(1, 1 + len(weights))
        factors = dict.fromkeys(
            (0, *streams), Operand((None, DEPTH), element, leading=True)
        )
        return DeviceFunction(
            name="tile_matmul",
            body=body,
            source="functions/tile_matmul.cuh",
            lane=TENSOR,
            reads=len(factors),
            writes=1,
            cluster=2,
            parts=2,
            roles=(LOAD, COMPUTE),
            streams=tuple(streams),
            shared=BUFFER_BYTES,
            boxes={
                0: TmaBox(self._x_box, STAGE_K),
                **{
                    n: TmaBox(w, STAGE_K) for n, w in zip(streams, weights, strict=True)
                },
            },
            tile={
                **factors,
                len(factors): Operand((None, Extent(begins=8)), element, leading=True),
            },
            constants={
                "kIsHalf": int(dtype == "float16"),
                "kGated": int(len(weights) == 2),
                "kTiles": tuple(self._packed),
            },
        )


def _chosen(shape: Expr, values: Sequence[int]) -> Expr:
    """values[shape]."""
    chosen: Expr = Const(values[-1])
    for number, value in reversed(list(enumerate(values[:-1]))):
        chosen = select(equal(shape, number), value, chosen)
    return chosen
