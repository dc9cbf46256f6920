"""RMSNorm over all heads of a row, which ranks have divided among them; CUDA half in
`kernels/functions/heads_norm.cuh`.

Each rank sends the sums of squares of its heads to all, as OLMo 2 and MiniMax-M2 need
them. On one rank `rms_norm` does."""

from __future__ import annotations

from typing import Any

import numpy as np

from etc_dist.functions.rms_norm import column_operand
from etc_dist.functions.weight_layouts import two_byte
from etc_dist.ir import DeviceFunction, Extent, Operand
from etc_dist.ir.function import TENSOR
from etc_dist.ir.operand import WORLD


def push_squares(dtype: str, ranks: int) -> DeviceFunction:
    """q and k [rows, columns] -> the sum of squares of each row of both, fp32 [2, rows,
    1], on each of `ranks` ranks. On GPUs one row."""

    def body(q: Any, k: Any, *squares: Any) -> None:
        sums = [(x.astype(np.float32) ** 2).sum(axis=1) for x in (q, k)]
        for target in squares:
            target[...] = np.stack(sums).reshape(target.shape)

    row = Operand((1, Extent(multiple=8, begins=8)), two_byte(dtype))
    squares = Operand((2, 1, 1), "float32")
    return _function("push_squares", dtype, body, [row, row], [squares] * ranks)


def norm_of_ranks(dtype: str, eps: float) -> DeviceFunction:
    """x [rows, columns], the sums of squares of each row on all ranks [rows, world],
    and gain [columns] -> the RMSNorm of the rows over the columns of all ranks, [rows,
    columns]. Squares are in fp32, all others of `dtype`. It may be written in place of
    x. On GPUs one row."""

    def body(x: Any, squares: Any, gain: Any, y: Any) -> None:
        total = np.zeros(len(x), np.float32)
        for rank in range(squares.shape[1]):
            total += squares[:, rank]
        mean = total / (squares.shape[1] * x.shape[1])
        scale = 1 / np.sqrt(mean + np.float32(eps))
        y[...] = x.astype(np.float32) * scale[:, None] * gain.astype(np.float32)

    columns = Extent(name="columns", multiple=8, begins=8)
    row = Operand((1, columns), two_byte(dtype))
    squares = Operand((1, WORLD), "float32", leading=True)
    reads, eps_of = [row, squares, column_operand(dtype)], {"kEps": float(eps)}
    return _function("norm_of_ranks", dtype, body, reads, [row], eps_of)


def _function(
    name: str,
    dtype: str,
    body: Any,
    reads: list[Operand],
    writes: list[Operand],
    constants: dict[str, float] | None = None,
) -> DeviceFunction:
    return DeviceFunction(
        name=name,
        body=body,
        source="functions/heads_norm.cuh",
        lane=TENSOR,
        reads=len(reads),
        writes=len(writes),
        constants={"kIsHalf": int(dtype == "float16"), **(constants or {})},
        tile=dict(enumerate([*reads, *writes])),
    )
