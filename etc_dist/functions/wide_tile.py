"""Matrix multiplication on tiles with as many rows of x as each task has, such as those
of experts; CUDA half in `kernels/functions/wide_tile.cuh`, for more than a few rows.

A tile without rows is not computed. Sums are in fp32."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from etc_dist.functions.epilogue import Epilogue, store
from etc_dist.functions.tile_matmul import Tiles
from etc_dist.functions.tile_shape import TileShape
from etc_dist.functions.weight_layouts import STAGE_K, two_byte
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
from etc_dist.ir.expr import wrap
from etc_dist.ir.function import COMPUTE, GATHER, LOAD, STORE

WIDE = TileShape(144, 256, swapped=True)
"""The largest tile."""
NARROW = TileShape(16, 128, swapped=True)
"""The tile for few rows, with which more workers read weights."""
DEPTH = Extent(name="k", multiple=2 * STAGE_K, not_empty=True)
"""k, or a part of it, which ends where a stage of NARROW does."""
STAGE_BYTES = WIDE.stage_bytes
"""Of each stage of a program: with one size, less is to be computed between stages."""
ROLES = (LOAD, COMPUTE, STORE)
"""A warp notifies for a tile while the next one is multiplied."""
ROW_BOX, GATHERED_BOX = TmaBox(16, STAGE_K, large=64), TmaBox(1, STAGE_K)


class RowTiles(Tiles):
    """Tiles of up to 144 rows of x by 256 columns, or, if `is_few` is 1, of up to 16 by
    128. Each has as many rows as its task, which the caller bounds. most_columns: rows
    of w in a task, half as many if `is_few`. Stages have STAGE_BYTES."""

    def __init__(
        self,
        g: Graph,
        name: str,
        is_few: Expr | int = 0,
        most_columns: int = WIDE.columns,
        *,
        gated: bool = False,
    ) -> None:
        self._is_few, self._most_columns = equal(is_few, 1), most_columns
        columns = None
        if most_columns <= WIDE.columns // 2 and not gated:  # half of a tile is loaded
            columns = g.let(f"{name}_columns", wrap(WIDE.columns // 2))
        super().__init__(
            g,
            name,
            1 - wrap(is_few),
            (NARROW, WIDE),
            columns=columns,
            stage_bytes=STAGE_BYTES,
        )

    def task_columns(self, *, gated: bool = False) -> Expr:
        """Columns of y of a task."""
        most = self._most_columns // 2 if gated else self._most_columns
        value = select(self._is_few, -(-most // 2), most)
        return self._let("task_columns", value)

    def matmul_rows(
        self,
        dtype: str,
        epilogue: Epilogue = store,
        *,
        gathers: bool = False,
        is_biased: bool = False,
    ) -> DeviceFunction:
        """x [rows, k], w [columns, k] in `dtype` -> y [rows, columns], or gate and up,
        as `matmul`. is_biased: biases [columns] of each weight follow the weights,
        and are added to the sums. gathers: the rows of x [any, k] that a further array
        names, numbers [rows] (int32), the last read.

        Raises GraphError for an epilogue that does not only round."""
        function = self.matmul(dtype, epilogue, may_have_no_rows=True)
        element = two_byte(dtype)
        rows = Extent(name="rows", most=WIDE.rows)
        columns = Extent(name="columns", most=WIDE.columns // epilogue.weights)
        w = Operand((columns, DEPTH), element, leading=True)
        bias = Operand((columns,), element, leading=True)
        y = Operand((rows, replace(columns, begins=8)), element, leading=True)
        x, box, numbers = Operand((rows, DEPTH), element), ROW_BOX, list[Operand]()
        if gathers:
            every = Extent(begins=0), Extent(name="k", whole=True)
            x, box = Operand(every, element), GATHERED_BOX
            numbers = [Operand((rows,), "int32")]
        weights = [w] * epilogue.weights
        operands = [x, *weights, *[bias] * (len(weights) * is_biased), *numbers, y]
        return replace(
            function,
            body=partial(_multiply, epilogue, is_biased),
            reads=len(operands) - 1,
            roles=(*ROLES, *[GATHER] * gathers),
            boxes={**function.boxes, 0: box},
            tile=dict(enumerate(operands)),
            gathers=(0,) if gathers else (),
            constants={
                **function.constants,
                "kOwnRows": 1,
                "kIsBiased": int(is_biased),
            },
        )


def _multiply(
    epilogue: Epilogue, is_biased: bool, x: Any, *arrays: Any, packed_tile: int
) -> None:
    *inputs, y = arrays
    if not y.size:
        return
    weights, inputs = inputs[: epilogue.weights], inputs[epilogue.weights :]
    biases = [0] * len(weights)
    if is_biased:
        biases, inputs = inputs[: len(weights)], inputs[len(weights) :]
    rows = x[inputs[0]] if inputs else x
    wide = rows.astype(np.float32)
    sums = [
        wide @ w.astype(np.float32).T + np.asarray(bias, np.float32)
        for w, bias in zip(weights, biases, strict=True)
    ]
    epilogue.half.body(*sums, y)
