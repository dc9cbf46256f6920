"""The gradients of the operations. The two collectives are each other's adjoint: the
gradient of a reduce-scatter is gathered, that of a gathered tensor reduced. That of an
all-reduce is all-reduced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from etc_dist.errors import ArgumentError
from etc_dist.torch import chosen_experts, ops, reductions, scaled
from etc_dist.torch.ops import IN_BATCHES, size_of
from etc_dist.torch.tensors import as_rows, from_rows

OPS = torch.ops.etc_dist
_AFTER = torch._C._after_autograd_keyset
_BELOW = _AFTER.remove(torch._C.DispatchKey.ADInplaceOrView)
_DEVICES = torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA


class _ReduceScatter(Function):
    """`fused_matmul_reduce_scatter` with gradients."""

    @staticmethod
    def forward(
        ctx: Any, A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int, group: str
    ) -> Tensor:
        ctx.save_for_backward(A, B)
        ctx.reduce_op, ctx.dim, ctx.group = reduce_op, scatter_dim, group
        return cast(
            Tensor, OPS.fused_matmul_reduce_scatter(A, B, reduce_op, scatter_dim, group)
        )

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        A, B = ctx.saved_tensors
        needs_a, needs_b = ctx.needs_input_grad[:2]
        if ctx.reduce_op == "avg":
            grad = grad / size_of(ctx.group)
        gathered_grad, (grad_a,) = OPS.fused_all_gather_matmul(
            grad, [B.t()], ctx.dim, ctx.group, return_A=needs_b
        )
        grad_b = _rows(A).t() @ _rows(gathered_grad) if needs_b else None
        return grad_a if needs_a else None, grad_b, None, None, None


class _AllGather(Function):
    """`fused_all_gather_matmul` with gradients; returns the joined A, if it is wanted,
    and then the results."""

    @staticmethod
    def forward(
        ctx: Any, A: Tensor, dim: int, group: str, return_A: bool, *Bs: Tensor
    ) -> tuple[Tensor, ...]:
        all_rows, results = OPS.fused_all_gather_matmul(
            A, list(Bs), dim, group, return_A=return_A
        )
        ctx.save_for_backward(A, *Bs)
        ctx.dim, ctx.group, ctx.return_A = dim, group, return_A
        ctx.set_materialize_grads(False)
        return (all_rows, *results) if return_A else tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        A, *Bs = ctx.saved_tensors
        dim, group = ctx.dim, ctx.group
        needs_a, _, _, _, *needs_bs = ctx.needs_input_grad
        of_joined, of_results = (grads[0], grads[1:]) if ctx.return_A else (None, grads)
        used_pairs = [
            (g, B) for g, B in zip(of_results, Bs, strict=True) if g is not None
        ]
        grad_a: Any = None
        if needs_a and used_pairs:
            grad, B = used_pairs[0]
            if len(used_pairs) > 1:
                grad, B = map(_join, zip(*used_pairs, strict=True))
            grad_a = OPS.fused_matmul_reduce_scatter(grad, B.t(), "sum", dim, group)
        if needs_a and of_joined is not None:
            part = _scatter(of_joined, dim, group)
            grad_a = part if grad_a is None else grad_a + part
        grad_bs: list[Any] = [None] * len(Bs)
        if any(needs_bs) and used_pairs:
            rows = _rows(_gather(A, dim, group)).t()
            grad_bs = [None if g is None else rows @ _rows(g) for g in of_results]
        return grad_a, None, None, None, *grad_bs


class _ExchangeRows(Function):
    """`gather_rows` or `scatter_rows` with gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: str, gathers: bool) -> Tensor:
        ctx.group, ctx.gathers = group, gathers
        op = OPS.gather_rows if gathers else OPS.scatter_rows
        return cast(Tensor, op(rows, group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        adjoint = _scatter if ctx.gathers else _gather
        return adjoint(grad, 0, ctx.group), None, None


class _Matmul(Function):
    """`matmul` with gradients."""

    @staticmethod
    def forward(
        ctx: Any, A: Tensor, B: Tensor, group: str, deterministic: str
    ) -> Tensor:
        ctx.save_for_backward(A, B)
        ctx.group, ctx.deterministic = group, deterministic
        return cast(Tensor, OPS.matmul(A, B, group, deterministic=deterministic))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        A, B = ctx.saved_tensors
        needs_a, needs_b = ctx.needs_input_grad[:2]
        grad_a = grad_b = None
        if needs_a:
            grad_a = OPS.matmul(grad, B.t(), ctx.group, deterministic=ctx.deterministic)
        if needs_b:
            grad_b = _rows(A).t() @ _rows(grad)
        return grad_a, grad_b, None, None


class _AllReduced(Function):
    """`all_reduce` with gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, op: str = "sum", group: str = "") -> Tensor:
        ctx.group = group
        return cast(Tensor, OPS.all_reduce(x, op, group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return OPS.all_reduce(grad, "sum", ctx.group), None, None


class _MatmulAllReduced(Function):
    """`matmul_all_reduce` with gradients. is_replicated: what follows is the same on
    all ranks, and so is the gradient, which is not added."""

    @staticmethod
    def forward(
        ctx: Any,
        A: Tensor,
        B: Tensor,
        op: str = "sum",
        group: str = "",
        is_replicated: bool = False,
    ) -> Tensor:
        ctx.save_for_backward(A, B)
        ctx.group, ctx.is_replicated = group, is_replicated
        return cast(Tensor, OPS.matmul_all_reduce(A, B, op, group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        A, B = ctx.saved_tensors
        needs_a, needs_b = ctx.needs_input_grad[:2]
        if not ctx.is_replicated:
            grad = OPS.all_reduce(grad, "sum", ctx.group)
        grad_a = grad_b = None
        if needs_a:
            grad_a = OPS.matmul(grad, B.t(), ctx.group, **IN_BATCHES)
        if needs_b:
            grad_b = A.flatten(0, -2).t() @ grad.flatten(0, -2)
        return grad_a, grad_b, None, None, None


def matmul_all_reduce_replicated(A: Tensor, B: Tensor, group: str) -> Tensor:
    """`matmul_all_reduce`, where what follows is the same on all ranks."""
    return cast(Tensor, _MatmulAllReduced.apply(A, B, "sum", group, True))


class _NoGradient(Function):
    """A layer without gradients: its backward pass is an error."""

    @staticmethod
    def forward(ctx: Any, op: Any, options: Any, *arguments: Any) -> Tensor:
        ctx.name = op.__name__
        ctx.fix = (
            "multiply by a weight in 16 bits, which has one"
            if ctx.name.startswith("scaled_")
            else "train with etc_dist.torch.MLP, which then runs the two collectives"
        )
        return cast(Tensor, op(*arguments, **options))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        raise ArgumentError(
            "the operation has no gradient",
            where=f"the backward pass of torch.ops.etc_dist.{ctx.name}",
            wanted="a call whose result needs no gradient",
            got="a backward pass through it",
            fix=f"call it under torch.no_grad(), or {ctx.fix}",
        )


def _apply_all_gather(
    A: Tensor, Bs: Sequence[Tensor], dim: int, group: str, *, return_A: bool = True
) -> tuple[Tensor | None, list[Tensor]]:
    results = _AllGather.apply(A, dim, group, return_A, *Bs)
    return (results[0], list(results[1:])) if return_A else (None, list(results))


def _apply_matmul(
    A: Tensor, B: Tensor, group: str = "", *, deterministic: str = "run"
) -> Tensor:
    return cast(Tensor, _Matmul.apply(A, B, group, deterministic))


def _apply_without_gradient(op: Any, *arguments: Any, **options: Any) -> Tensor:
    return cast(Tensor, _NoGradient.apply(op, options, *arguments))


def _rows(tensor: Tensor) -> Tensor:
    return tensor.flatten(0, -2)


def _join(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(tensors), dim=-1)


def _gather(shard: Tensor, dim: int, group: str) -> Tensor:
    """All ranks' parts, joined along `dim`."""
    rows = OPS.gather_rows(as_rows(shard, dim), group)
    return from_rows(rows, shard.shape, dim)


def _scatter(whole: Tensor, dim: int, group: str) -> Tensor:
    """This rank's part along `dim` of the sum over ranks."""
    if size_of(group) == 1:
        return whole
    part = OPS.scatter_rows(whole.movedim(dim, 0), group)
    return cast(Tensor, part.movedim(0, dim))


def _refuse_tangents(name: str, arguments: Sequence[Any]) -> None:
    """Raises for tensors of forward-mode derivatives, which would be lost."""
    lists = (a if isinstance(a, list | tuple) else [a] for a in arguments)
    tensors = [a for values in lists for a in values if isinstance(a, Tensor)]
    if any(forward_ad.unpack_dual(a).tangent is not None for a in tensors):
        raise ArgumentError(
            "the operation has no forward-mode derivative",
            where=f"torch.ops.etc_dist.{name}",
            wanted="tensors without tangents",
            got="a tensor with one, of torch.func.jvp or torch.autograd.forward_ad",
            fix="use reverse mode (torch.func.vjp, backward), or torch's own layers",
        )


def _kernel(
    function: Callable[..., Any], apply: Callable[..., Any]
) -> Callable[..., Any]:
    """The dispatcher's kernel for gradients: `apply` where some are needed.

    NOTE: torch.library.register_autograd would always go through the dispatcher again,
    which takes 4 us. Where a tensor's device is next in its order, here the function is
    called at once."""
    name = function.__name__

    def run(keyset: Any, *arguments: Any, **options: Any) -> Any:
        if forward_ad._current_level >= 0:
            _refuse_tangents(name, arguments)
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
            return apply(*arguments, **options)
        if (keyset & _BELOW).highestPriorityTypeId() in _DEVICES:
            return function(*arguments, **options)
        overload = getattr(OPS, name).default
        return overload.redispatch(keyset & _AFTER, *arguments, **options)

    return run


def _register() -> None:
    applied: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
        (ops.fused_matmul_reduce_scatter, _ReduceScatter.apply),
        (ops.fused_all_gather_matmul, _apply_all_gather),
        (ops.matmul, _apply_matmul),
        (reductions.all_reduce, _AllReduced.apply),
        (reductions.matmul_all_reduce, _MatmulAllReduced.apply),
        (ops.gather_rows, lambda *arguments: _ExchangeRows.apply(*arguments, True)),
        (ops.scatter_rows, lambda *arguments: _ExchangeRows.apply(*arguments, False)),
    ]
    for function in (
        reductions.all_reduce_norm,
        ops.mlp,
        ops.moe,
        chosen_experts.moe_experts,
        scaled.scaled_matmul,
        scaled.scaled_matmul_reduce_scatter,
        scaled.scaled_all_gather_matmul,
        scaled.scaled_matmul_all_reduce,
    ):
        op = getattr(OPS, function.__name__)
        applied.append((function, partial(_apply_without_gradient, op)))
    for function, apply in applied:
        kernel = _kernel(function, apply)
        ops.LIBRARY.impl(function.__name__, kernel, "Autograd", with_keyset=True)


_register()
