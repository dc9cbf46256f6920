"""Products that come in parts, each of a share of k or of a rank; CUDA halves in
`kernels/tasks/add_parts.cuh`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from etc_dist.ir import DeviceFunction
from etc_dist.ir.function import TRANSFER
from etc_dist.ops.matmul import silu


def _add_parts(parts: Any, y: Any) -> None:
    y[...] = _sum(parts).astype(y.dtype)


def _activate_parts(gate: Any, up: Any, active: Any) -> None:
    active[...] = (silu(_sum(gate)) * _sum(up)).astype(active.dtype)


def _sum(parts: Any) -> Any:
    total = np.zeros(parts.shape[1:], np.float32)
    for part in parts:
        total += part.astype(np.float32)
    return total


def add_parts(dtype: str) -> DeviceFunction:
    """fp32 parts [n, rows, columns] -> their sum in `dtype`, added in order, here or in
    a peer's memory."""
    return _function("add_parts", dtype, 1, _add_parts)


def activate_parts(dtype: str) -> DeviceFunction:
    """fp32 parts of gate's and of up's product [n, rows, columns] -> silu(gate) * up of
    their sums, added in order."""
    return _function("activate_parts", dtype, 2, _activate_parts)


def sum_ranks(dtype: str) -> DeviceFunction:
    """parts [world, rows, columns] -> their sum [rows, columns] over ranks, in rank
    order, in fp32."""
    source = "tasks/sum_parts.cuh"
    return _function("sum_parts", dtype, 1, _add_parts, source, kSplit=0)


def _function(
    name: str,
    dtype: str,
    reads: int,
    body: Callable[..., None],
    source: str = "tasks/add_parts.cuh",
    **constants: int,
) -> DeviceFunction:
    return DeviceFunction(
        name=name,
        body=body,
        source=source,
        lane=TRANSFER,
        reads=reads,
        writes=1,
        constants={"kIsHalf": int(dtype == "float16"), **constants},
    )
