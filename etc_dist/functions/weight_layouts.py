"""What functions of matrix multiplication share: dtypes and layouts of weights."""

from __future__ import annotations

from typing import Any

import numpy as np

from etc_dist.ir import Extent, Region, Tensor

STAGE_K = 64
"""Elements of k in a box of a stage of the shared-memory ring."""
DTYPES = ("bfloat16", "float16", "float32")
"""The dtypes of x and w; builds for GPUs refuse the last one."""
W_LAYOUTS = ("nk", "kn")
"""How weights are stored: [n, k] or [k, n]."""
CHUNK_COLUMNS = 64
"""Columns of a TMA box of weights that are stored [k, n]."""
DEPTH = Extent(name="k", multiple=STAGE_K, not_empty=True)


def two_byte(dtype: str) -> str:
    """The dtype that a CUDA body made for `dtype` reads: float16, else bfloat16."""
    return "float16" if dtype == "float16" else "bfloat16"


def weight_shape(w_layout: str, n: Any, k: Any) -> tuple[Any, Any]:
    """The shape of w."""
    return (k, n) if w_layout == "kn" else (n, k)


def weight_columns(
    w_layout: str,
    w: Tensor,
    columns: Any,
    k_span: Any = slice(None),
    place: tuple[Any, ...] = (),
) -> Region:
    """The part of w that some columns of x @ w.T need, of all k or a part of it. place:
    of w in a stack."""
    return w[(*place, *weight_shape(w_layout, columns, k_span))]


def silu(values: Any) -> Any:
    """values / (1 + exp(-values)), in fp32."""
    # exp(80) is large enough for it to be 0 in any dtype here, and does not overflow.
    return values / (1 + np.exp(-np.maximum(values, -80)))
