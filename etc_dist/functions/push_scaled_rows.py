"""The transfer of an all-gather of rows in float8; CUDA half in
`kernels/functions/push_scaled_rows.cuh`."""

from __future__ import annotations

from typing import Any

from etc_dist.functions.scaled_weights import E4M3
from etc_dist.ir import DeviceFunction, Operand
from etc_dist.ir.function import TRANSFER


def _push_scaled_rows(codes: Any, scales: Any, to_codes: Any, to_scales: Any) -> None:
    to_codes[tuple(map(slice, codes.shape))] = codes
    to_scales[tuple(map(slice, scales.shape))] = scales


def push_scaled_rows() -> DeviceFunction:
    """A region of codes in float8 and one of scales in fp32 -> copies in this rank's
    memory or a peer's, as two calls of `push_rows` with one notification."""
    return DeviceFunction(
        name="push_scaled_rows",
        body=_push_scaled_rows,
        source="functions/push_scaled_rows.cuh",
        lane=TRANSFER,
        reads=2,
        writes=2,
        tile={
            0: Operand(dtype=E4M3, contiguous=True, apart=True),
            1: Operand(dtype="float32", contiguous=True, apart=True, by_element=True),
            2: Operand(contiguous=True, like=0),
            3: Operand(contiguous=True, like=1, by_element=True),
        },
    )
