"""The sums over ranks that every rank gets, as operations of torch."""

from __future__ import annotations

from torch import Tensor

from etc_dist.ops.all_reduce import AllReduce
from etc_dist.ops.all_reduce_norm import EPS, AllReduceNorm
from etc_dist.ops.matmul_all_reduce import MatmulAllReduce
from etc_dist.torch.ops import IN_BATCHES, OperationCall, check_dims, operation, refusal
from etc_dist.torch.tensors import as_rows, as_weight, from_rows


@operation()
def all_reduce(
    x: Tensor, reduce_op: str = "sum", group_name: str = ""
) -> OperationCall:
    """The sum over ranks of x, of any shape with a multiple of 8 elements: a new
    tensor. reduce_op: "sum", the only one. Precision as for `etc_dist.AllReduce`. With
    gradients."""
    check_sum("all_reduce", reduce_op)
    rows = x.reshape(1, -1)
    return OperationCall(
        group_name, AllReduce, {}, [(rows.contiguous(),)], lambda y: y.view(x.shape)
    )


@operation("(Tensor, Tensor)")
def all_reduce_norm(
    x: Tensor, residual: Tensor, gain: Tensor, eps: float = EPS, group_name: str = ""
) -> OperationCall:
    """The RMSNorm of residual and the sum over ranks of x, and that sum, as
    `etc_dist.all_reduce_norm`: new tensors of the shape of x [..., H]. residual, of the
    same shape, and gain [H] are alike on all ranks. No gradients."""
    if x.dim() == 0:
        raise refusal("all_reduce_norm", "x", "one axis or more, [..., H]", "[]")
    if residual.shape != x.shape:
        wanted = f"the shape of x, {list(x.shape)}"
        raise refusal("all_reduce_norm", "residual", wanted, str(list(residual.shape)))
    rows = [tensor.reshape(-1, x.shape[-1]).contiguous() for tensor in (x, residual)]

    def finish(y: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        return y.view(x.shape), total.view(x.shape)

    options = {"eps": eps}
    inputs = [(*rows, gain.contiguous())]
    return OperationCall(group_name, AllReduceNorm, options, inputs, finish)


@operation()
def matmul_all_reduce(
    A: Tensor, B: Tensor, reduce_op: str = "sum", group_name: str = ""
) -> OperationCall:
    """The sum over ranks of A [..., K] @ B [K, N] -> [..., N], N a multiple of 8, on
    each rank. With gradients. B and copies as for `fused_matmul_reduce_scatter`;
    reduce_op: "sum", the only one."""
    check_sum("matmul_all_reduce", reduce_op)
    check_dims("matmul_all_reduce", A, B, 0, "A")
    return OperationCall(
        group_name,
        MatmulAllReduce,
        IN_BATCHES,
        [(as_rows(A, 0), as_weight(B))],
        lambda y: from_rows(y, A.shape, 0),
    )


def check_sum(op: str, reduce_op: str) -> None:
    """Refuse reductions other than a sum."""
    if reduce_op != "sum":
        raise refusal(op, "reduce_op", "sum", repr(reduce_op))
