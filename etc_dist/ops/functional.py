"""The fused collectives as functions; each keeps one operation per world and kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from etc_dist.ops.all_gather_matmul import AllGatherMatmul
from etc_dist.ops.matmul_reduce_scatter import MatmulReduceScatter
from etc_dist.ops.product import DTYPES, W_LAYOUTS, ProductOperation
from etc_dist.runtime.arrays import dtype_of
from etc_dist.world import current


def matmul_reduce_scatter(
    x: Any,
    w: Any,
    *,
    w_layout: str = "nk",
    partials: str | None = None,
    out: Any = None,
    stream: Any = None,
) -> Any:
    """Rows [rank * M / world_size, ...) of the sum over ranks of x @ w.T.

    x [M, K], w [N, K] (or [K, N] with w_layout="kn") -> [M / world_size, N]. Each
    rank's partial sum is rounded to the dtype of x, or kept in fp32 with
    partials="float32" (w [N, K] only).
    Collective; see `MatmulReduceScatter` for arrays, precision and errors."""
    own = {} if partials is None else {"partials": partials}
    return _operation(MatmulReduceScatter, x, w_layout, own)(x, w, out, stream=stream)


def all_gather_matmul(
    x: Any, w: Any, *, w_layout: str = "nk", out: Any = None, stream: Any = None
) -> Any:
    """(The rows of all ranks' x) @ w.T.

    x [M / world_size, K], w [N, K] (or [K, N] with w_layout="kn") -> [M, N].
    Collective; see `AllGatherMatmul` for arrays and errors."""
    return _operation(AllGatherMatmul, x, w_layout, {})(x, w, out, stream=stream)


def _operation(
    kind: type[ProductOperation], x: Any, w_layout: str, own: Mapping[str, Any]
) -> ProductOperation:
    """own: further arguments of the operation."""
    world = current()
    if w_layout not in W_LAYOUTS or any(v != "float32" for v in own.values()):
        return kind(w_layout=w_layout, world=world, **own)  # refused on every rank
    dtype = dtype_of(x)
    # A dtype that no operation has is refused, on every rank, by the bfloat16 one.
    key = (kind, dtype if dtype in DTYPES else DTYPES[0], w_layout, *own.values())
    kept = cast("dict[object, ProductOperation]", world.kept)
    if key not in kept:
        kept[key] = kind(dtype=key[1], w_layout=w_layout, world=world, **own)
    return kept[key]
