"""Matrix multiplication on tiles with as many rows of x as each task has, such as those
of experts; CUDA half in `kernels/functions/wide_tile.cuh`, for more than a few rows by
weights of 16 bits.

A tile without rows is not computed. Sums are in fp32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from etc_dist.functions.epilogue import Epilogue, store
from etc_dist.functions.scaled_weights import E4M3, SCALINGS
from etc_dist.functions.tile_matmul import Tiles, chosen, multiply_tile
from etc_dist.functions.tile_shape import TileShape
from etc_dist.functions.weight_layouts import STAGE_K, two_byte
from etc_dist.ir import (
    DeviceFunction,
    Expr,
    Extent,
    Graph,
    Operand,
    TmaBox,
    minimum,
)
from etc_dist.ir.expr import wrap
from etc_dist.ir.function import COMPUTE, GATHER, LOAD, STORE

WIDE = TileShape(144, 256, swapped=True)
"""The largest tile."""
NARROW = TileShape(16, 128, swapped=True)
"""The tile for few rows, with which more workers read weights."""
FEW_SCALED, SOME_SCALED, MANY_SCALED = (
    TileShape(rows, 128, swapped=True, scaled=True) for rows in (16, 32, 128)
)
"""Those of float8 weights. The first adds k in another order than the others."""
DEPTH = Extent(name="k", multiple=2 * STAGE_K, not_empty=True)
"""k, or a part of it, which ends where a stage of NARROW does."""
STAGE_BYTES = WIDE.stage_bytes
"""Of each stage of a program: with one size, less is to be computed between stages."""
ROLES = (LOAD, COMPUTE, STORE)
"""A warp notifies for a tile while the next one is multiplied."""
ROW_BOX, GATHERED_BOX = TmaBox(16, STAGE_K, large=64), TmaBox(1, STAGE_K)


def shapes_of_rows(w_layout: str, *, in_order: bool = False) -> Sequence[TileShape]:
    """The shapes for weights of a layout, by rows. in_order: those that all add k in
    one order."""
    if w_layout not in SCALINGS:
        return NARROW, WIDE
    return (*([] if in_order else [FEW_SCALED]), SOME_SCALED, MANY_SCALED)


class RowTiles(Tiles):
    """Tiles for tasks with up to `most_rows` rows of x, a number that differs between
    runs: of the first shape of `shapes_of_rows` that has so many, or of the last one.
    Each has as many rows as its task, which the caller bounds.

    most_columns: rows of w in a task at most. If there are as few rows as NARROW has,
    half as many. w_layout: "nk", or one of SCALINGS. Stages have STAGE_BYTES."""

    def __init__(
        self,
        g: Graph,
        name: str,
        most_rows: Expr | int = WIDE.rows,
        most_columns: int = WIDE.columns,
        *,
        gated: bool = False,
        w_layout: str = "nk",
        in_order: bool = False,
    ) -> None:
        shapes = shapes_of_rows(w_layout, in_order=in_order)
        self._most_columns, columns = most_columns, None
        is_half = most_columns <= WIDE.columns // 2 and not gated
        if is_half and w_layout == "nk":  # half of a tile is loaded
            columns = g.let(f"{name}_columns", wrap(WIDE.columns // 2))
        number = wrap(0)
        for shape in shapes[:-1]:
            number += minimum(1, most_rows // (shape.rows + 1))
        super().__init__(
            g,
            name,
            g.let(f"{name}_shape", number),
            shapes,
            w_layout=w_layout,
            columns=columns,
            stage_bytes=STAGE_BYTES,
        )

    def task_columns(self, *, gated: bool = False) -> Expr:
        """Columns of y of a task."""
        share = 2 if gated else 1
        most = self._most_columns // share
        widths = [
            min(most, shape.columns // share) if self._scaling is not None else most
            for shape in self._shapes
        ]
        if self._scaling is None:
            widths[0] = -(-most // 2)
        return self._let("task_columns", chosen(self._shape, tuple(widths)))

    def matmul_rows(
        self,
        dtype: str,
        epilogue: Epilogue = store,
        *,
        gathers: bool = False,
        is_biased: bool = False,
    ) -> DeviceFunction:
        """x [rows, k], w [columns, k] in `dtype` -> y [rows, columns], or gate and up,
        as `matmul`; of scaled weights the scales of each follow. is_biased: biases
        [columns] of each weight are next, and are added to the sums. gathers: the rows
        of x [any, k] that a further array names, numbers [rows] (int32), the last read.

        Gate and up may be rows of one matrix, with the same scales.

        Raises GraphError for an epilogue that does not only round."""
        self._check_rounds(epilogue)
        function = self.matmul(
            dtype, epilogue, may_have_no_rows=True, is_biased=is_biased
        )
        element, num_weights = two_byte(dtype), epilogue.weights
        most_rows = max(shape.rows for shape in self._shapes)
        most_columns = max(shape.columns for shape in self._shapes)
        rows = Extent(name="rows", most=most_rows)
        columns = Extent(name="columns", most=most_columns // num_weights)
        code = element if self._scaling is None else E4M3
        w = Operand((columns, DEPTH), code, leading=True)
        scales = [] if self._scaling is None else [self._scaling.operand] * num_weights
        bias = Operand((columns,), element, leading=True)
        y = Operand((rows, replace(columns, begins=8)), element, leading=True)
        x, box, numbers = Operand((rows, DEPTH), element), ROW_BOX, list[Operand]()
        if gathers:
            every = Extent(begins=0), Extent(name="k", whole=True)
            x, box = Operand(every, element), GATHERED_BOX
            numbers = [Operand((rows,), "int32")]
        biases = [bias] * (num_weights * is_biased)
        operands = [x, *[w] * num_weights, *scales, *biases, *numbers, y]
        starts = {"first_row": (1, -2), "up_row": (num_weights, -2)}
        return replace(
            function,
            body=partial(_multiply, epilogue, self.w_layout, gathers, is_biased),
            reads=len(operands) - 1,
            roles=(*ROLES, *[GATHER] * gathers),
            boxes={**function.boxes, 0: box},
            tile=dict(enumerate(operands)),
            gathers=(0,) if gathers else (),
            starts=starts if scales else {},
            constants={**function.constants, "kOwnRows": 1},
        )


def _multiply(
    epilogue: Epilogue,
    w_layout: str,
    gathers: bool,
    is_biased: bool,
    x: Any,
    *arrays: Any,
    packed_tile: int,
    first_row: int = 0,
    up_row: int = 0,
) -> None:
    *inputs, y = arrays
    if not y.size:
        return
    rows = x[inputs.pop()] if gathers else x
    multiply_tile(
        epilogue,
        w_layout,
        rows,
        *inputs,
        y,
        packed_tile=packed_tile,
        first_row=first_row,
        up_row=up_row,
        is_biased=is_biased,
    )
