"""Products that come in parts, each of a share of k or of a rank; CUDA halves in
`kernels/tasks/add_parts.cuh`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from etc_dist.ir import DeviceFunction, Extent, Operand
from etc_dist.ir.function import TRANSFER
from etc_dist.ops.matmul import silu, two_byte


def _add_parts(parts: Any, y: Any) -> None:
    y[...] = _sum(parts).astype(y.dtype)


def _activate_parts(gate: Any, up: Any, active: Any) -> None:
    active[...] = (silu(_sum(gate)) * _sum(up)).astype(active.dtype)


def _sum(parts: Any) -> Any:
    total = np.zeros(parts.shape[1:], np.float32)
    for part in parts:
        total += part.astype(np.float32)
    return total


def _columns(dtype: str) -> Extent:
    """Eights of columns; a row of the tensor is a multiple of 16 bytes."""
    return Extent(name="columns", multiple=8, begins=4 if dtype == "float32" else 8)


def _total(dtype: str) -> Operand:
    return Operand(("rows", _columns(dtype)), dtype, leading=True)


PARTS = Operand((None, "rows", _columns("float32")), "float32")


def add_parts(dtype: str) -> DeviceFunction:
    """fp32 parts [n, rows, columns] -> their sum in `dtype`, added in order, here or in
    a peer's memory. On GPUs columns are multiples of 8."""
    made = dtype if dtype == "float32" else two_byte(dtype)
    return _function("add_parts", dtype, _add_parts, {0: PARTS, 1: _total(made)})


def activate_parts(dtype: str) -> DeviceFunction:
    """fp32 parts of gate's and of up's product [n, rows, columns] -> silu(gate) * up of
    their sums, added in order."""
    tile = {0: PARTS, 1: PARTS, 2: _total(two_byte(dtype))}
    return _function("activate_parts", dtype, _activate_parts, tile)


def sum_ranks(dtype: str) -> DeviceFunction:
    """parts [world, rows, columns] of `dtype`, row-major -> their sum [rows, columns]
    over ranks, in rank order, in fp32, rounded once. On GPUs columns are multiples of
    8, and so are the places where they begin."""
    if dtype == "float32":
        return add_parts(dtype)
    tile = {0: sum_operand(dtype), 1: Operand(("rows", _columns(dtype)), dtype)}
    source = "tasks/sum_parts.cuh"
    return _function("sum_parts", dtype, _add_parts, tile, source, kSplit=0)


def sum_operand(dtype: str) -> Operand:
    """The ranks' parts, of two bytes an element."""
    return Operand(("world", "rows", _columns(dtype)), dtype)


def _function(
    name: str,
    dtype: str,
    body: Callable[..., None],
    tile: Mapping[int, Operand],
    source: str = "tasks/add_parts.cuh",
    **constants: int,
) -> DeviceFunction:
    return DeviceFunction(
        name=name,
        body=body,
        source=source,
        lane=TRANSFER,
        reads=len(tile) - 1,
        writes=1,
        constants={"kIsHalf": int(dtype == "float16"), **constants},
        tile=tile,
    )
