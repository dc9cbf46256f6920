"""A check of loaded indices; CUDA half in `kernels/functions/expect_in_range.cuh`."""

from __future__ import annotations

from typing import Any

import numpy as np

from etc_dist.ir import DeviceFunction
from etc_dist.ir.function import TRANSFER


def expect_in_range() -> DeviceFunction:
    """Reads an element of any dtype at loaded indices -> nothing: out of range, it ends
    the run with an error that names the call."""

    def body(element: Any) -> None:
        np.shape(element)

    return DeviceFunction(
        name="expect_in_range",
        body=body,
        source="functions/expect_in_range.cuh",
        lane=TRANSFER,
        reads=1,
        writes=0,
    )
