"""The operations `torch.ops.etc_dist`; the collectives have the signatures of
`torch.ops.symm_mem` (torch/distributed/_symmetric_memory).

Of all of them: tensors are bfloat16 or float16 (all of one dtype), on the device of the
world; results have the dtype of the first argument. A group is named by
`group.group_name`; "" is the current world. All ranks of the group make the same calls.
Wrong arguments of any rank raise ArgumentError on all, before a launch; a group over
which no world was started raises WorldError. W is the number of ranks.

deterministic="batch": a row has the same bits for any M. The collectives and
moe_experts always have them.

NOTE: registered by torch.library.Library, since a call of a function that the decorator
`custom_op` has registered takes longer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import Tensor
from torch import distributed as dist

from etc_dist.errors import ArgumentError, as_refusal
from etc_dist.layers.mlp import SharedMLP
from etc_dist.layers.moe import SharedMoE
from etc_dist.ops.all_gather_matmul import AllGatherMatmul
from etc_dist.ops.deterministic import BATCH
from etc_dist.ops.matmul import Matmul
from etc_dist.ops.matmul_reduce_scatter import MatmulReduceScatter
from etc_dist.ops.operation import Operation
from etc_dist.torch.tensors import as_array, as_rows, as_weight, from_rows
from etc_dist.world import World, current, of_group
from etc_dist.world.agreement import sign

Kept = TypeVar("Kept", bound=Operation)

REDUCTIONS = ("sum", "avg")
LIBRARY = torch.library.Library("etc_dist", "DEF")
SCHEMAS = (
    "fused_matmul_reduce_scatter(Tensor A, Tensor B, str reduce_op, int scatter_dim, "
    "str group_name) -> Tensor",
    "fused_all_gather_matmul(Tensor A, Tensor[] Bs, int gather_dim, str group_name, *, "
    "bool return_A=True) -> (Tensor?, Tensor[])",
    'matmul(Tensor A, Tensor B, str group_name="", *, str deterministic="run") '
    "-> Tensor",
    'mlp(Tensor x, Tensor gate, Tensor up, Tensor down, str group_name="", *, '
    'str deterministic="run") -> Tensor',
    "moe(Tensor x, Tensor router, Tensor gate_up, Tensor down, int top_k, "
    'bool normalize=True, str parallel="tensor", str group_name="", *, '
    'str deterministic="run") -> Tensor',
    "gather_rows(Tensor rows, str group_name) -> Tensor",
    "scatter_rows(Tensor rows, str group_name) -> Tensor",
)
# The names that replace the other ones, where torch has them.
_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_open: dict[str, World] = {}
"""The worlds of the last calls, by the name of their group."""


def fused_matmul_reduce_scatter(
    A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> Tensor:
    """A [..., K] @ B [K, N], summed over the ranks ("sum") or averaged ("avg"). Returns
    this rank's part along `scatter_dim`, an axis of A but the last, in a multiple of W:
    A [M, K] and scatter_dim 0 give [M / W, N]. With gradients.

    B may be a transposed view; other strides of B, and a `scatter_dim` that is not the
    outermost axis of A in memory, cost a copy. A rank's product is rounded to the
    dtype; the products are added in fp32, in rank order. "avg" divides the rounded sum:
    in float16 that must be within +-65504."""
    op = "fused_matmul_reduce_scatter"
    world = world_of(group_name)
    try:
        _check_dims(op, A, B, scatter_dim, "scatter_dim")
        if reduce_op not in REDUCTIONS:
            wanted = " or ".join(REDUCTIONS)
            raise refusal(op, "reduce_op", wanted, repr(reduce_op))
        x, w = as_rows(A, scatter_dim), as_weight(B)
        if A.shape[scatter_dim] % world.size:
            got = str(A.shape[scatter_dim])
            wanted = f"a multiple of {world.size}, the number of ranks"
            raise refusal(op, "A.shape[scatter_dim]", wanted, got)
        out = A.new_empty(x.shape[0] // world.size, w.shape[0])
    except Exception as error:
        refuse(world, error, op)
    agree_on(world, op, scatter_dim, reduce_op)
    kept(world, MatmulReduceScatter, deterministic=BATCH)(
        as_array(x), as_array(w), as_array(out)
    )
    if reduce_op == "avg":
        out /= world.size
    return from_rows(out, A.shape, scatter_dim)


def fused_all_gather_matmul(
    A: Tensor,
    Bs: Sequence[Tensor],
    gather_dim: int,
    group_name: str,
    *,
    return_A: bool = True,
) -> tuple[Tensor | None, list[Tensor]]:
    """The A [..., K] of all ranks, joined along `gather_dim` in rank order, @ each B
    [K, N] of Bs. Returns (joined A, products): A [M, K] and gather_dim 0 give products
    [W M, N]. `gather_dim` is an axis of A but the last. With gradients.

    Each B gathers A again, overlapped with its GEMM. The joined A is gathered by
    torch.distributed; without `return_A` it is None. Copies as for
    `fused_matmul_reduce_scatter`; accumulated in fp32, rounded once."""
    op = "fused_all_gather_matmul"
    world = world_of(group_name)
    try:
        for B in Bs:
            _check_dims(op, A, B, gather_dim, "gather_dim")
        x, ws = as_rows(A, gather_dim), [as_weight(B) for B in Bs]
        rows = x.shape[0] * world.size
        outs = [A.new_empty(rows, w.shape[0]) for w in ws]
    except Exception as error:
        refuse(world, error, op)
    agree_on(world, op, gather_dim)
    multiply, source = kept(world, AllGatherMatmul, deterministic=BATCH), as_array(x)
    for w, out in zip(ws, outs, strict=True):
        multiply(source, as_array(w), as_array(out))
    joined = None
    if return_A:
        joined = from_rows(gather_rows(x, group_name), A.shape, gather_dim)
    return joined, [from_rows(out, A.shape, gather_dim) for out in outs]


def matmul(
    A: Tensor, B: Tensor, group_name: str = "", *, deterministic: str = "run"
) -> Tensor:
    """A [..., K] @ B [K, N] -> [..., N] on each rank, without communication. With
    gradients. Copies as for `fused_matmul_reduce_scatter`; accumulated in fp32, rounded
    once."""
    op = "matmul"
    world = world_of(group_name)
    try:
        _check_dims(op, A, B, 0, "A")
        x, w = as_rows(A, 0), as_weight(B)
        out = A.new_empty(x.shape[0], w.shape[0])
    except Exception as error:
        refuse(world, error, op)
    multiply = kept(world, Matmul, deterministic=deterministic)
    multiply(as_array(x), as_array(w), as_array(out))
    return from_rows(out, A.shape, 0)


def mlp(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    group_name: str = "",
    *,
    deterministic: str = "run",
) -> Tensor:
    """(silu(x @ gate.T) * (x @ up.T)) @ down.T of the rows of all ranks, as
    `etc_dist.MLP`. x [..., H]: this rank's rows, equally many on all ranks; gate and up
    [I / W, H], down [H, I / W]: its shards, contiguous. Returns [..., H], for the same
    rows. No gradients. Calls of one shape share a program and its buffers."""
    world = world_of(group_name)
    try:
        rows = as_rows(x, 0)
        out = torch.empty_like(rows)
    except Exception as error:
        refuse(world, error, "mlp")
    arrays = map(as_array, (rows, gate, up, down, out))
    kept(world, SharedMLP, deterministic=deterministic)(*arrays)
    return out.view(x.shape)


def moe(
    x: Tensor,
    router: Tensor,
    gate_up: Tensor,
    down: Tensor,
    top_k: int,
    normalize: bool = True,
    parallel: str = "tensor",
    group_name: str = "",
    *,
    deterministic: str = "run",
) -> Tensor:
    """A mixture of experts with its router, as `etc_dist.MoE`: router [E, H]. No
    gradients. Calls of one shape share a program and its buffers.

    parallel="tensor": gate_up [E, 2 I / W, H] and down [E, H, I / W] are shards of each
    expert; x [M, H] is the same on all ranks, M a multiple of W, and the result
    [M / W, H] this rank's part of the rows. parallel="expert": gate_up [E / W, 2 I, H]
    and down [E / W, H, I] are this rank's experts; x [..., H] are its tokens, equally
    many on all ranks, and the result has the shape of x. On one rank both give the
    shape of x. top_k, normalize and limits: as for `etc_dist.MoE`."""
    world = world_of(group_name)
    try:
        rows = as_rows(x, 0)
        is_part = parallel == "tensor" and world.size > 1
        out = rows.new_empty(
            rows.shape[0] // (world.size if is_part else 1), rows.shape[1]
        )
        options = {
            "experts": router.shape[0],
            "hidden": gate_up.shape[2],
            "inner": gate_up.shape[1] // 2,
            "top_k": top_k,
            "normalize": normalize,
            "parallel": parallel,
            "deterministic": deterministic,
        }
    except Exception as error:
        refuse(world, error, "moe")
    layer = kept(world, SharedMoE, **options)
    layer(*map(as_array, (rows, router, gate_up, down, out)))
    return out if is_part else out.view(x.shape)


def world_of(group_name: str) -> World:
    """The world of a process group, by its name; "" for the current world."""
    world = _open.get(group_name)
    if world is None or world.broken:  # also if it was closed
        world = of_group(group_name) if group_name else current()
        _open[group_name] = world
    return world


def kept(world: World, kind: type[Kept], **options: Any) -> Kept:
    """The operation of `world` with these options, made at the first use."""
    key = "torch", kind, *options.values()
    found = world.kept.get(key)
    if found is None:
        found = world.kept[key] = kind(world=world, **options)
    return cast(Kept, found)


def agree_on(world: World, op: str, dim: int, reduce_op: str = REDUCTIONS[0]) -> None:
    """Compare options that no program has. ArgumentError on all ranks if they differ:
    a rank with the defaults goes on to the launch, which is another call."""
    if (dim, reduce_op) != (0, REDUCTIONS[0]):
        text = f"{op}(along axis {dim}, {reduce_op})"
        world.match_call(sign(text), lambda: text)


def gather_rows(rows: Tensor, group_name: str) -> Tensor:
    """The rows [M, K] of all ranks, in rank order, by torch.distributed.

    NOTE: not its functional collectives, which gloo does not serve on GPUs."""
    world = world_of(group_name)
    if world.size == 1:
        return rows.clone()
    return _exchange("gather_rows", _gather, rows, world, len(rows) * world.size)


def scatter_rows(rows: Tensor, group_name: str) -> Tensor:
    """This rank's part of the sum over ranks of rows [M, K], by torch.distributed."""
    world = world_of(group_name)
    if world.size == 1:
        return rows.clone()
    return _exchange("scatter_rows", _scatter, rows, world, len(rows) // world.size)


def _exchange(
    name: str, collective: Callable[..., Any], rows: Tensor, world: World, count: int
) -> Tensor:
    """`count` rows of a collective of torch.distributed."""
    rows = rows.contiguous()
    text = f"{name} of {list(rows.shape)} {rows.dtype}"
    world.match_call(sign(text), lambda: text)  # before a wait without our limit
    group = dist.distributed_c10d._resolve_process_group(world.group_name)
    out = rows.new_empty(count, *rows.shape[1:])
    collective(out, rows, group=group)
    return out


def _check_dims(op: str, A: Tensor, B: Tensor, dim: int, name: str) -> None:
    axes = A.dim()
    if axes < 2 or B.dim() != 2:
        shapes = f"A {list(A.shape)}, B {list(B.shape)}"
        wanted = "A [..., K] of two axes or more, and B [K, N]"
        raise refusal(op, "A, B", wanted, shapes)
    if not 0 <= dim < axes - 1:
        wanted = f"0 to {axes - 2}, an axis of A but the last"
        raise refusal(op, name, wanted, str(dim))


def refuse(world: World, error: Exception, name: str) -> NoReturn:
    """Raise the error on all ranks."""
    world.refuse(as_refusal(error, f"the arguments of {name}"))


def refusal(op: str, name: str, wanted: str, got: str) -> ArgumentError:
    return ArgumentError(
        f"the argument {name} cannot be used",
        where=f"torch.ops.etc_dist.{op}",
        wanted=f"{name}: {wanted}",
        got=got,
        fix=f"correct {name}; nothing was launched on any rank",
    )


FUNCTIONS: tuple[Callable[..., Any], ...] = (
    fused_matmul_reduce_scatter,
    fused_all_gather_matmul,
    matmul,
    mlp,
    moe,
    gather_rows,
    scatter_rows,
)


def _register() -> None:
    for schema, function in zip(SCHEMAS, FUNCTIONS, strict=True):
        LIBRARY.define(schema, tags=(torch.Tag.needs_exact_strides,))
        for device in ("CPU", "CUDA"):
            LIBRARY.impl(function.__name__, function, device)


_register()
