"""Dense matrix multiplication; CUDA half in `kernels/functions/matmul.cuh`.

All compute x @ w.T (w stored [n, k]) or x @ w (w stored [k, n]) on one 256 x 256 tile
with fp32 accumulation, by a cluster of two workers, 128 rows each. `matmul_store`
writes the tile into a tensor of this rank; `matmul_send` forwards the tile to its
owner. The library's operations use the tiles of `tile_matmul.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from etc_dist.errors import GraphError
from etc_dist.ir import DeviceFunction, Extent, Operand, Region, Tensor, TmaBox
from etc_dist.ir.function import COMPUTE, FORWARD, LOAD, STORE, TENSOR

TILE = 256
"""Rows and columns of a tile on the GPU."""
STAGE_K = 64
"""Elements of k in one stage of the shared-memory ring."""
W_LAYOUTS = ("nk", "kn")
"""How weights are stored: [n, k] or [k, n]."""
CHUNK_COLUMNS = 64
"""Columns of a TMA box of weights that are stored [k, n]."""
WORKER_ROWS = 128
IMAGE_BYTES = WORKER_ROWS * TILE * 2
"""The shared-memory image of a worker's half of a tile, as it is sent."""


def two_byte(dtype: str) -> str:
    """The dtype that a CUDA body made for `dtype` reads: float16, else bfloat16."""
    return "float16" if dtype == "float16" else "bfloat16"


def weight_shape(w_layout: str, n: Any, k: Any) -> tuple[Any, Any]:
    """The shape of w."""
    return (n, k) if w_layout == "nk" else (k, n)


def weight_columns(
    w_layout: str, w: Tensor, columns: Any, k_span: Any = slice(None)
) -> Region:
    """The part of w that some columns of x @ w.T need, of all k or a part of it."""
    return w[columns, k_span] if w_layout == "nk" else w[k_span, columns]


def silu(values: Any) -> Any:
    """values / (1 + exp(-values)), in fp32."""
    # exp(80) is large enough for it to be 0 in any dtype here, and does not overflow.
    return values / (1 + np.exp(-np.maximum(values, -80)))


def _multiply_nk(x: Any, w: Any, y: Any) -> None:
    product = x.astype(np.float32) @ w.astype(np.float32).T
    y[: product.shape[0], : product.shape[1]] = product.astype(y.dtype)


def _multiply_kn(x: Any, w: Any, y: Any) -> None:
    product = x.astype(np.float32) @ w.astype(np.float32)
    y[: product.shape[0], : product.shape[1]] = product.astype(y.dtype)


DEPTH = Extent(name="k", multiple=STAGE_K, not_empty=True)
ROWS, COLUMNS = (Extent(TILE, name=name, clipped=True) for name in ("rows", "columns"))


def _tile(dtype: str, *sizes: Extent | int, **fields: Any) -> Operand:
    return Operand(sizes, two_byte(dtype), leading=True, **fields)


def _matmul(name: str, w_layout: str, dtype: str, **fields: Any) -> DeviceFunction:
    _check(name, w_layout, dtype)
    weight = weight_shape(w_layout, COLUMNS, DEPTH)
    tile = {0: (ROWS, DEPTH), 1: weight, 2: (ROWS, COLUMNS), **fields.pop("tile", {})}
    boxes = {
        0: TmaBox(WORKER_ROWS, STAGE_K),
        1: TmaBox(TILE // 2, STAGE_K)
        if w_layout == "nk"
        else TmaBox(STAGE_K, CHUNK_COLUMNS),
    }
    boxes.update(fields.pop("boxes", {}))
    layouts = fields.pop("layouts", {})
    return DeviceFunction(
        name=name,
        body=_multiply_nk if w_layout == "nk" else _multiply_kn,
        source="functions/matmul.cuh",
        lane=TENSOR,
        reads=2,
        writes=1,
        cluster=2,
        roles=fields.pop("roles", (LOAD, COMPUTE, STORE)),
        shared=IMAGE_BYTES // 2,
        boxes=boxes,
        tile={
            # NOTE: one worker can store a tile while the other one still loads.
            n: _tile(dtype, *tile[n], layout=layouts.get(n, ""), apart=n < 2)
            for n in tile
        },
        constants={
            "kWeightIsKN": int(w_layout == "kn"),
            "kIsHalf": int(dtype == "float16"),
        },
        **fields,
    )


def _check(name: str, w_layout: str, dtype: str) -> None:
    for option, value, known in (
        ("w_layout", w_layout, W_LAYOUTS),
        ("dtype", dtype, ("bfloat16", "float16", "float32")),  # the last on the CPU
    ):
        if value not in known:
            raise GraphError(
                f"{option} of {name}() is unknown",
                where=f"{name}({w_layout!r}, {dtype!r})",
                wanted=" or ".join(map(repr, known)),
                got=repr(value),
                fix='"nk" computes x @ w.T, "kn" x @ w; both in bfloat16 or float16',
            )


def matmul_store(w_layout: str, dtype: str) -> DeviceFunction:
    """x tile [256, k], w tile [256, k] or [k, 256] -> y tile, in this rank's memory.
    Each worker notifies for its own rows, hence two parts."""
    return _matmul("matmul_store", w_layout, dtype, boxes={2: TmaBox(64, 64)}, parts=2)


def matmul_send(w_layout: str, dtype: str) -> DeviceFunction:
    """As `matmul_store`, but the tile goes to its owner's slot, as two shared-memory
    images (64 KB, one a worker), each forwarded by two warps while the next tile is
    computed; each warp notifies for its half, hence four parts. A slot is the last two
    axes of a symmetric tensor [..., 256, 256]; its elements are not row-major, and only
    `sum_slots` reads them."""
    image = Extent(TILE, whole=True)
    return _matmul(
        "matmul_send",
        w_layout,
        dtype,
        tile={2: (image, image)},
        layouts={2: "matmul_send"},
        parts=4,
        roles=(LOAD, COMPUTE, STORE, FORWARD),
    )
