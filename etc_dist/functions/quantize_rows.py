"""Quantizing rows to float8; CUDA half in `kernels/functions/quantize_rows.cuh`.

A group is 128 elements of a row. With most = max |x| of the group, in fp32 and at least
2**-100, its scale is most / 448, and the code of x is x * (448 / most), rounded to the
nearest float8 and at most 448. Codes of zeros are 0. The codes of NaN and infinity are
NaN, 0x7f; an infinity lets those of its group's other elements be 0."""

from __future__ import annotations

from typing import Any

import numpy as np

from etc_dist.functions.scaled_weights import BLOCK, E4M3, MOST_E4M3
from etc_dist.functions.weight_layouts import two_byte
from etc_dist.ir import DeviceFunction, Extent, Operand
from etc_dist.ir.function import TENSOR
from etc_dist.ir.tensor import numpy_dtype

ROWS = 8
"""Of a task on GPUs, at most."""
LEAST = 2.0**-100
"""By smaller numbers 448 is not divided: the quotient may not be finite."""


def quantized(x: Any) -> tuple[Any, Any]:
    """Codes [rows, k] and scales [rows, ceil(k / 128)] of x [rows, k]."""
    wide = x.astype(np.float32)
    starts = np.arange(0, wide.shape[1], BLOCK)
    most = np.fmax.reduceat(np.abs(wide), starts, axis=1)
    most = np.fmax(most, np.float32(LEAST))
    with np.errstate(invalid="ignore"):
        factors = (np.float32(MOST_E4M3) / most).repeat(BLOCK, 1)
        wide *= factors[:, : wide.shape[1]]
    wide[np.isnan(wide)] = np.nan  # of one sign, as on GPUs
    codes = np.clip(wide, -MOST_E4M3, MOST_E4M3).astype(numpy_dtype(E4M3))
    return codes, most / np.float32(MOST_E4M3)


def _quantize(x: Any, codes: Any, scales: Any) -> None:
    codes[...], scales[...] = quantized(x)


def quantize_rows(dtype: str, lane: str = TENSOR) -> DeviceFunction:
    """x [rows, k] of `dtype` -> codes [rows, k] and scales [rows, ceil(k / 128)]. On
    GPUs up to ROWS rows, and k is a multiple of 16. On the tensor lane a warp has a
    row."""
    rows = Extent(name="rows", most=ROWS)
    k = Extent(name="k", multiple=8, begins=8, whole=True)
    blocks = Extent(name="k", per=BLOCK, whole=True)
    return DeviceFunction(
        name="quantize_rows",
        body=_quantize,
        source="functions/quantize_rows.cuh",
        lane=lane,
        reads=1,
        writes=2,
        shared=0,
        constants={"kIsHalf": int(dtype == "float16")},
        tile={
            0: Operand((rows, k), two_byte(dtype), leading=True),
            1: Operand((rows, k), E4M3, leading=True),
            2: Operand((rows, blocks), "float32", leading=True, by_element=True),
        },
    )
