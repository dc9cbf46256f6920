"""RMSNorm of rows (Zhang and Sennrich, NeurIPS 2019); CUDA half in
`kernels/functions/rms_norm.cuh`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from etc_dist.functions.weight_layouts import two_byte
from etc_dist.ir import DeviceFunction, Extent, Operand
from etc_dist.ir.function import TENSOR


def normalized(x: Any, gain: Any, eps: float, offset: int = 0) -> Any:
    """x / sqrt(mean(x * x) + eps) * (gain + offset) over the last axis, in fp32."""
    x = x.astype(np.float32)
    mean = (x * x).mean(axis=-1, keepdims=True)
    gain = gain.astype(np.float32) + np.float32(offset)
    return x / np.sqrt(mean + np.float32(eps)) * gain


def rms_norm(dtype: str, eps: float) -> DeviceFunction:
    """x [rows, columns], gain [columns] -> y [rows, columns], computed in fp32 and
    rounded once. On GPUs one row."""

    def body(x: Any, gain: Any, y: Any) -> None:
        y[...] = normalized(x, gain, eps).astype(y.dtype)

    return _function("rms_norm", dtype, eps, body, reads=2, writes=1)


def add_rms_norm(
    dtype: str, eps: float, *, has_bias: bool = False, early: bool = False
) -> DeviceFunction:
    """x [rows, columns], with `has_bias` also a bias [columns], residual [rows,
    columns], gain [columns] -> their sum, rounded, and its RMSNorm, both [rows,
    columns], all of `dtype`. The sum may be written in place of x or residual. On GPUs
    one row. early: all but x may be read before the last wait."""

    def body(x: Any, *arrays: Any) -> None:
        *bias, residual, gain, total, y = arrays
        sums = x.astype(np.float32)
        for addend in (*bias, residual):
            sums = sums + addend.astype(np.float32)
        total[...] = sums.astype(total.dtype)
        y[...] = normalized(total, gain, eps).astype(y.dtype)

    reads = 3 + has_bias
    return _function(
        "add_rms_norm",
        dtype,
        eps,
        body,
        reads=reads,
        writes=2,
        other_operands={1: column_operand(dtype)} if has_bias else None,
        before=tuple(range(1, reads)) if early else (),
        constants={"kHasBias": 1} if has_bias else None,
    )


def column_operand(dtype: str) -> Operand:
    """A number for each column: a gain or a bias."""
    return Operand(
        (Extent(name="columns", multiple=8, begins=8),), two_byte(dtype), leading=True
    )


def embed_norm(
    dtype: str, eps: float, *, scale: float = 1.0, offset: int = 0
) -> DeviceFunction:
    """embedding [vocabulary, columns], ids [rows], gain [columns] -> the rows of the
    ids, multiplied by `scale` and rounded, and their RMSNorm, both [rows, columns], all
    of `dtype`, but ids in int32. An id out of range stands for 0. offset: is added to
    the gain. On GPUs one row."""

    def body(embedding: Any, ids: Any, gain: Any, x: Any, y: Any) -> None:
        rows = embedding[np.where((ids >= 0) & (ids < len(embedding)), ids, 0)]
        x[...] = (rows.astype(np.float32) * np.float32(scale)).astype(x.dtype)
        y[...] = normalized(x, gain, eps, offset).astype(y.dtype)

    constants = gain_offset(offset)
    if scale != 1:
        constants["kEmbeddingScale"] = float(scale)
    return _function(
        "embed_norm",
        dtype,
        eps,
        body,
        reads=3,
        writes=2,
        other_operands=_embedding(dtype),
        constants=constants,
    )


def gain_offset(offset: int) -> dict[str, float]:
    """The constant of a function whose gains get `offset`."""
    return {"kGainOffset": offset} if offset else {}


def embed_rows(dtype: str) -> DeviceFunction:
    """embedding [vocabulary, columns], ids [rows] -> the rows of the ids, twice [rows,
    columns], of `dtype`; ids in int32. An id out of range stands for 0. On GPUs one
    row."""

    def body(embedding: Any, ids: Any, x: Any, y: Any) -> None:
        x[...] = embedding[np.where((ids >= 0) & (ids < len(embedding)), ids, 0)]
        y[...] = x

    return _function(
        "embed_rows",
        dtype,
        0.0,
        body,
        reads=2,
        writes=2,
        other_operands=_embedding(dtype),
        constants={"kKeeps": 1},
    )


def _embedding(dtype: str) -> dict[int, Operand]:
    columns = Extent(name="columns", whole=True)
    return {
        0: Operand((Extent(whole=True), columns), two_byte(dtype)),
        1: Operand((1,), "int32", leading=True),
    }


def copy_norm(dtype: str, eps: float) -> DeviceFunction:
    """x [rows, columns], gain [columns] -> a copy of x, and its RMSNorm, both [rows,
    columns], all of `dtype`. On GPUs one row."""

    def body(x: Any, gain: Any, copy: Any, y: Any) -> None:
        copy[...] = x
        y[...] = normalized(x, gain, eps).astype(y.dtype)

    return _function("copy_norm", dtype, eps, body, reads=2, writes=2)


def _function(
    name: str,
    dtype: str,
    eps: float,
    body: Any,
    *,
    reads: int,
    writes: int,
    other_operands: Mapping[int, Operand] | None = None,
    before: tuple[int, ...] = (),
    constants: Mapping[str, float] | None = None,
) -> DeviceFunction:
    """other_operands: those that are not rows."""
    columns = Extent(name="columns", multiple=8, begins=8)
    row = Operand((1, columns), two_byte(dtype), leading=True)
    tile = dict.fromkeys(range(reads + writes), row)
    tile[reads - 1] = column_operand(dtype)
    tile |= other_operands or {}
    return DeviceFunction(
        name=name,
        body=body,
        source="functions/rms_norm.cuh",
        lane=TENSOR,
        reads=reads,
        writes=writes,
        constants={
            "kEps": float(eps),
            "kIsHalf": int(dtype == "float16"),
            **(constants or {}),
        },
        reads_before_wait=before,
        tile=tile,
    )
