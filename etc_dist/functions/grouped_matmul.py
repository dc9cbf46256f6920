"""Matrix multiplication of tiles of rows, each by its expert's weights; CUDA half in
`kernels/functions/grouped_matmul.cuh`.

Weights are stored [experts, n, k]. A tile has up to 144 rows; one without rows is not
computed. Sums are in fp32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from etc_dist.functions.activation import SWIGLU, Activation
from etc_dist.functions.matmul import STAGE_K, two_byte
from etc_dist.ir import DeviceFunction, Extent, Operand, TmaBox
from etc_dist.ir.function import COMPUTE, GATHER, LOAD, STORE, TENSOR

UP_COLUMNS = 128
"""Columns of activations in a task on the GPU."""
TILE_COLUMNS = 256
"""Columns of the down projection in a task on the GPU."""
THIN_ROWS, THIN_COLUMNS = 64, 128
"""Of a thin tile."""
MOST_ROWS = 144
"""Rows of a tile at most."""
ROWS = Extent(most=MOST_ROWS, name="rows")
DEPTH = Extent(name="k", multiple=2 * STAGE_K, not_empty=True)
"""k, or a slice of it. A stage has up to 128 elements of k."""
ROW_BOX, WEIGHT_BOX = TmaBox(16, STAGE_K, large=64), TmaBox(128, STAGE_K)
GATED_BOX = TmaBox(128, STAGE_K, halves=True)
GATHERED_BOX = TmaBox(1, STAGE_K)


def _multiply(rows: Any, weights: Any, *operands: Any) -> None:
    *biases, y = operands
    y[...] = _product(rows, weights, *biases).astype(y.dtype)


def _product(rows: Any, weights: Any, bias: Any = None) -> Any:
    product = rows.astype(np.float32) @ weights.astype(np.float32).T
    return product if bias is None else product + bias.astype(np.float32)


def _grouped(
    name: str,
    dtype: str,
    body: Callable[..., None],
    reads: int,
    boxes: Mapping[int, TmaBox],
    tile: Mapping[int, Operand],
    gathers: tuple[int, ...] = (),
    thin: bool = False,
    activation: Activation = SWIGLU,
    biased: bool = False,
) -> DeviceFunction:
    return DeviceFunction(
        name=name,
        body=body,
        source="functions/grouped_matmul.cuh",
        lane=TENSOR,
        reads=reads,
        writes=1,
        roles=(LOAD, *([GATHER] if gathers else []), COMPUTE, STORE),
        streams=(1,),
        boxes=boxes,
        tile=tile,
        constants={
            "kGated": int(boxes[1].halves),
            "kIsHalf": int(dtype == "float16"),
            "kIsThin": int(thin),
            "kIsBiased": int(biased),
            **activation.constants(),
        },
        gathers=gathers,
    )


def grouped_gated(
    dtype: str,
    gathers: bool = True,
    activation: Activation = SWIGLU,
    *,
    biased: bool = False,
) -> DeviceFunction:
    """x [tokens, k], an expert's gate and up [128, k], the same rows of the two halves
    of one matrix, tokens [144] -> silu(rows @ gate.T) * (rows @ up.T), a tile [144,
    128], rounded once, where rows are those of x that `tokens` name. On the GPU a tile
    has at most 144 rows, and its columns begin at a multiple of 8 and are 128 or 64,
    fewer at the matrix' edge.

    Without gathers: rows [144, k] in place of x, and no tokens. activation: in place of
    that of SwiGLU. biased: biases of gate and up [128] follow the weights, and are
    added to the products."""
    element = two_byte(dtype)
    weight = Operand((Extent(most=UP_COLUMNS), DEPTH), element, leading=True)
    # Not those of the weights: a tile of y may have further columns, which become 0.
    columns = Extent(most=UP_COLUMNS, multiple=8, begins=8)
    result = Operand((ROWS, columns), element, leading=True)
    bias = Operand((Extent(most=UP_COLUMNS),), element, leading=True)
    gathered = Extent(begins=0), Extent(name="k", whole=True)
    tile = [Operand(gathered if gathers else (ROWS, DEPTH), element), weight, weight]
    tile += [bias] * (2 * biased) + [Operand((ROWS,), "int32")] * gathers + [result]

    def body(x: Any, gate: Any, up: Any, *operands: Any) -> None:
        *others, y = operands
        if not y.size:
            return
        rows = x[others[-1]] if gathers else x
        gate_bias, up_bias = others[:2] if biased else (None, None)
        sums = _product(rows, gate, gate_bias), _product(rows, up, up_bias)
        y[...] = activation.apply(*sums).astype(y.dtype)

    return _grouped(
        *("grouped_gated", dtype, body, len(tile) - 1),
        {0: GATHERED_BOX if gathers else ROW_BOX, 1: GATED_BOX},
        dict(enumerate(tile)),
        gathers=(0,) if gathers else (),
        activation=activation,
        biased=biased,
    )


def _tile(dtype: str, rows: Extent, most: int, result: str) -> dict[int, Operand]:
    """rows [rows, k], a weight [most, k], a result [rows, most]."""
    inputs, weight_rows = two_byte(dtype), Extent(most=most, name="columns")
    columns = weight_rows
    if result != "float32":  # it is stored in units of 16 bytes
        columns = replace(columns, multiple=8, begins=8)
    return {
        0: Operand((rows, DEPTH), inputs),
        1: Operand((weight_rows, DEPTH), inputs, leading=True),
        2: Operand((rows, columns), result, leading=True),
    }


def grouped_store(
    dtype: str, activation: Activation = SWIGLU, *, biased: bool = False
) -> DeviceFunction:
    """rows [144, k], an expert's weights [256, k] -> rows @ weights.T. On the GPU a
    tile has at most 144 rows, and its columns begin at a multiple of 8 and are 256 or
    128, fewer at the matrix' edge; a row of the matrix is a multiple of 16 bytes.
    A slice of k has a multiple of 128 elements, but for the last. biased: a bias [256]
    follows the weights, and is added. activation: that of `grouped_gated` in the same
    program, which then shares its mainloop."""
    boxes = {0: ROW_BOX, 1: WEIGHT_BOX}
    x, weight, y = _tile(dtype, ROWS, TILE_COLUMNS, two_byte(dtype)).values()
    columns = Extent(most=TILE_COLUMNS, name="columns")
    bias = Operand((columns,), two_byte(dtype), leading=True)
    tile = [x, weight, *[bias] * biased, y]
    return _grouped(
        *("grouped_store", dtype, _multiply, len(tile) - 1, boxes),
        dict(enumerate(tile)),
        activation=activation,
        biased=biased,
    )


def thin_float(dtype: str, activation: Activation = SWIGLU) -> DeviceFunction:
    """x [64, k], a weight of at most 128 rows -> x @ weight.T, a tile [64, 128] in
    fp32. On the GPU a tile has 64 rows and 128 columns, but at the edges, and k is all
    of the operands' or a share that ends after a multiple of 128. activation: as of
    `grouped_store`."""
    boxes = {0: ROW_BOX, 1: WEIGHT_BOX}
    rows = Extent(THIN_ROWS, name="rows", clipped=True)
    tile = _tile(dtype, rows, THIN_COLUMNS, "float32")
    return _grouped(
        *("thin_float", dtype, _multiply, 2, boxes, tile),
        thin=True,
        activation=activation,
    )
