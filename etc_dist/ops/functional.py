"""The operations as functions; each keeps its operations with the world."""

from __future__ import annotations

from typing import Any

from etc_dist.ops.all_gather_matmul import AllGatherMatmul
from etc_dist.ops.all_reduce import AllReduce
from etc_dist.ops.all_reduce_norm import EPS, AllReduceNorm
from etc_dist.ops.matmul import Matmul
from etc_dist.ops.matmul_all_reduce import MatmulAllReduce, MatmulAllReduceNorm
from etc_dist.ops.matmul_reduce_scatter import MatmulReduceScatter
from etc_dist.ops.operation import kept
from etc_dist.world import current


def matmul_reduce_scatter(
    x: Any,
    w: Any,
    *,
    partials: str | None = None,
    deterministic: str = "run",
    activations: str = "16-bit",
    out: Any = None,
    stream: Any = None,
) -> Any:
    """The sum over ranks of x @ w.T, of which each rank gets its share of the rows.

    x [M, K], w [N, K] -> [M / world_size, N], bfloat16 or float16; w may be a
    transposed view, or a `ScaledWeight`. partials: None rounds each rank's partial sum
    to the dtype of x, "float32" keeps it in fp32. activations: "float8" quantizes x.
    out: the array to write. stream: the stream to run on, by default the current one.

    Collective, on the current world. See `MatmulReduceScatter` for deterministic,
    activations, arrays, precision and errors."""
    options = {"deterministic": deterministic, "activations": activations}
    operation = kept(current(), MatmulReduceScatter, partials=partials, **options)
    return operation(x, w, out, stream=stream)


def all_gather_matmul(
    x: Any,
    w: Any,
    *,
    deterministic: str = "run",
    activations: str = "16-bit",
    out: Any = None,
    stream: Any = None,
) -> Any:
    """The rows of all ranks' x, in rank order, @ w.T.

    x [M / world_size, K], w [N, K] -> [M, N], bfloat16 or float16; w may be a
    transposed view, or a `ScaledWeight`. activations: "float8" quantizes x before its
    rows are sent. out: the array to write. stream: the stream to run on, by default the
    current one.

    Collective, on the current world. See `AllGatherMatmul` for deterministic,
    activations, arrays and errors."""
    options = {"deterministic": deterministic, "activations": activations}
    operation = kept(current(), AllGatherMatmul, **options)
    return operation(x, w, out, stream=stream)


def all_reduce(
    x: Any, *, reduction: str = "sum", out: Any = None, stream: Any = None
) -> Any:
    """The sum over ranks of x, on each rank.

    x [M, H] -> [M, H], bfloat16 or float16; H is a multiple of 8. reduction: "sum", the
    only one. out: the array to write, which may be x. stream: the stream to run on, by
    default the current one.

    Collective, on the current world. See `AllReduce` for precision, arrays and
    errors."""
    operation = kept(current(), AllReduce, reduction=reduction)
    return operation(x, out, stream=stream)


def all_reduce_norm(
    x: Any,
    residual: Any,
    gain: Any,
    eps: float = EPS,
    *,
    out: Any = None,
    residual_out: Any = None,
    stream: Any = None,
) -> tuple[Any, Any]:
    """The RMSNorm of residual and the sum over ranks of x, and that sum: (out,
    residual_out).

    x [M, H] is each rank's own; residual [M, H] and gain [H] are alike on all ranks ->
    [M, H] both, bfloat16 or float16; H is a multiple of 8. out, residual_out: the
    arrays to write, which may be x and residual. stream: the stream to run on, by
    default the current one.

    Collective, on the current world. See `AllReduceNorm` for precision, arrays and
    errors."""
    operation = kept(current(), AllReduceNorm, eps=eps)
    return operation(x, residual, gain, out, residual_out, stream=stream)


def matmul_all_reduce(
    x: Any,
    w: Any,
    *,
    deterministic: str = "run",
    activations: str = "16-bit",
    out: Any = None,
    stream: Any = None,
) -> Any:
    """The sum over ranks of x @ w.T, on each rank.

    x [M, K], w [N, K] -> [M, N], bfloat16 or float16; w may be a transposed view, or a
    `ScaledWeight`. N is a multiple of 8. activations: "float8" quantizes x. out: the
    array to write. stream: the stream to run on, by default the current one.

    Collective, on the current world. See `MatmulAllReduce` for deterministic,
    activations, arrays, precision and errors."""
    options = {"deterministic": deterministic, "activations": activations}
    operation = kept(current(), MatmulAllReduce, **options)
    return operation(x, w, out, stream=stream)


def matmul_all_reduce_norm(
    x: Any,
    w: Any,
    residual: Any,
    gain: Any,
    eps: float = EPS,
    *,
    deterministic: str = "run",
    activations: str = "16-bit",
    out: Any = None,
    residual_out: Any = None,
    stream: Any = None,
) -> tuple[Any, Any]:
    """The RMSNorm of residual and the sum over ranks of x @ w.T, and that sum: (out,
    residual_out).

    x [M, K], w [N, K] and activations as for `matmul_all_reduce`; residual [M, N], gain
    [N] and eps as for `all_reduce_norm` -> [M, N] both. out, residual_out: the arrays
    to write; residual_out may be residual. stream: the stream to run on, by default the
    current one.

    Collective, on the current world. See `MatmulAllReduceNorm`."""
    options = {"deterministic": deterministic, "activations": activations}
    operation = kept(current(), MatmulAllReduceNorm, eps=eps, **options)
    return operation(x, w, residual, gain, out, residual_out, stream=stream)


def matmul(
    x: Any,
    w: Any,
    *,
    deterministic: str = "run",
    activations: str = "16-bit",
    out: Any = None,
    stream: Any = None,
) -> Any:
    """x @ w.T on each rank, without communication.

    x [M, K], w [N, K] -> [M, N], bfloat16 or float16; w may be a transposed view, or a
    `ScaledWeight`. activations: "float8" quantizes x. out: the array to write. stream:
    the stream to run on, by default the current one.

    All ranks of the current world make the same call. See `Matmul` for deterministic,
    activations, arrays and errors."""
    options = {"deterministic": deterministic, "activations": activations}
    operation = kept(current(), Matmul, **options)
    return operation(x, w, out, stream=stream)
