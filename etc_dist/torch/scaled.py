"""The operations by a weight w [N, K] in float8 with its scales, both contiguous, as
`etc_dist.ScaledWeight`. x [..., K] and the results are bfloat16 or float16.

activations: as for `etc_dist.Matmul`: "float8" also quantizes x, for scales of blocks
of 128 x 128. No gradients: a code has none."""

from __future__ import annotations

from torch import Tensor

from etc_dist.ops.all_gather_matmul import AllGatherMatmul
from etc_dist.ops.matmul import Matmul
from etc_dist.ops.matmul_all_reduce import MatmulAllReduce
from etc_dist.ops.scaled_weight import ScaledWeight
from etc_dist.torch.ops import (
    IN_BATCHES,
    OperationCall,
    agreed_text,
    check_axis,
    operation,
    scattered,
)
from etc_dist.torch.reductions import check_sum
from etc_dist.torch.tensors import as_rows, from_rows


@operation()
def scaled_matmul(
    x: Tensor,
    w: Tensor,
    scales: Tensor,
    group_name: str = "",
    *,
    deterministic: str = "run",
    activations: str = "16-bit",
) -> OperationCall:
    """x [..., K] @ w.T -> [..., N] on each rank, without communication."""
    return OperationCall(
        group_name,
        Matmul,
        {"deterministic": deterministic, "activations": activations},
        [(as_rows(x, 0), ScaledWeight(w, scales))],
        lambda out: from_rows(out, x.shape, 0),
    )


@operation()
def scaled_matmul_reduce_scatter(
    x: Tensor,
    w: Tensor,
    scales: Tensor,
    reduce_op: str = "sum",
    scatter_dim: int = 0,
    group_name: str = "",
    *,
    activations: str = "16-bit",
) -> OperationCall:
    """x [..., K] @ w.T, summed over the ranks or averaged: this rank's part along
    `scatter_dim`, as `fused_matmul_reduce_scatter`. Ranks' sums are sent in 16 bits."""
    op = "scaled_matmul_reduce_scatter"
    check_axis(op, "x", x, scatter_dim, "scatter_dim")
    weight = ScaledWeight(w, scales)
    options = {**IN_BATCHES, "activations": activations}
    return scattered(op, ("x", x), weight, reduce_op, scatter_dim, group_name, options)


@operation()
def scaled_all_gather_matmul(
    x: Tensor,
    w: Tensor,
    scales: Tensor,
    gather_dim: int = 0,
    group_name: str = "",
    *,
    activations: str = "16-bit",
) -> OperationCall:
    """The x [..., K] of all ranks, joined along `gather_dim` in rank order, @ w.T, as
    `fused_all_gather_matmul`. With activations="float8" codes and scales are sent."""
    op = "scaled_all_gather_matmul"
    check_axis(op, "x", x, gather_dim, "gather_dim")
    return OperationCall(
        group_name,
        AllGatherMatmul,
        {**IN_BATCHES, "activations": activations},
        [(as_rows(x, gather_dim), ScaledWeight(w, scales))],
        lambda out: from_rows(out, x.shape, gather_dim),
        agreed_text(op, gather_dim),
    )


@operation()
def scaled_matmul_all_reduce(
    x: Tensor,
    w: Tensor,
    scales: Tensor,
    reduce_op: str = "sum",
    group_name: str = "",
    *,
    activations: str = "16-bit",
) -> OperationCall:
    """The sum over ranks of x [..., K] @ w.T -> [..., N], N a multiple of 8, on each
    rank, as `matmul_all_reduce`."""
    op = "scaled_matmul_all_reduce"
    check_sum(op, reduce_op)
    check_axis(op, "x", x, 0, "x")
    return OperationCall(
        group_name,
        MatmulAllReduce,
        {**IN_BATCHES, "activations": activations},
        [(as_rows(x, 0), ScaledWeight(w, scales))],
        lambda out: from_rows(out, x.shape, 0),
    )
