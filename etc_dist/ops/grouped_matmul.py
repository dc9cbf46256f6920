"""Matrix products of tiles of rows, each with its own expert's weights; CUDA half in
`kernels/tasks/grouped_matmul.cuh`.

Weights are stored [experts, n, k]. A tile has up to 256 rows; one of no rows is left
alone. A cluster of two workers computes it with fp32 accumulation, each notifying for
its own share, hence two parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from etc_dist.ir import DeviceFunction, TmaBox
from etc_dist.ir.function import TENSOR
from etc_dist.ops.matmul import STAGE_K

UP_COLUMNS = 256
"""Columns of activations in a task on the GPU."""
TILE_COLUMNS = 512
"""Columns of the down projection in a task on the GPU."""
ROW_BOX, WEIGHT_BOX = TmaBox(16, STAGE_K), TmaBox(128, STAGE_K)
GATED_BOX = TmaBox(128, STAGE_K, halves=True)
STORE_BOX = TmaBox(16, 64)


def _multiply(rows: Any, weights: Any, y: Any) -> None:
    y[...] = _product(rows, weights).astype(y.dtype)


def _multiply_gated(rows: Any, gate: Any, up: Any, y: Any) -> None:
    left = _product(rows, gate)
    # exp(80) is large enough for silu to be 0 in any dtype here, and does not overflow.
    active = left / (1 + np.exp(-np.maximum(left, -80)))
    y[...] = (active * _product(rows, up)).astype(y.dtype)


def _product(rows: Any, weights: Any) -> Any:
    return rows.astype(np.float32) @ weights.astype(np.float32).T


def _grouped(
    name: str,
    dtype: str,
    body: Callable[..., None],
    weight_box: TmaBox,
) -> DeviceFunction:
    gated = weight_box.halves
    reads = 2 + gated
    return DeviceFunction(
        name=name,
        body=body,
        source="tasks/grouped_matmul.cuh",
        lane=TENSOR,
        reads=reads,
        writes=1,
        cluster=2,
        parts=2,
        boxes={0: ROW_BOX, 1: weight_box, reads: STORE_BOX},
        constants={
            "kGated": int(gated),
            "kIsHalf": int(dtype == "float16"),
            "kWeightIsKN": 0,
        },
    )


def grouped_gated(dtype: str) -> DeviceFunction:
    """rows [256, k], an expert's gate and up [256, k], the same rows of the two halves
    of one matrix -> silu(rows @ gate.T) * (rows @ up.T), a tile [256, 256], rounded
    once. On the GPU a tile has at most 256 rows, and its columns begin at a multiple of
    8 and are 256, or 128 if no tile has more than 16 rows, but at the matrix' edge."""
    return _grouped("grouped_gated", dtype, _multiply_gated, GATED_BOX)


def grouped_store(dtype: str) -> DeviceFunction:
    """rows [256, k], an expert's weights [512, k] -> rows @ weights.T. On the GPU a
    tile has at most 256 rows, and its columns are 512, or 256 if no tile has more than
    16 rows, but at the matrix' edge."""
    return _grouped("grouped_store", dtype, _multiply, WEIGHT_BOX)
