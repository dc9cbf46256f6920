"""The operations `torch.ops.etc_dist`; the collectives have the signatures of
`torch.ops.symm_mem`.

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
from etc_dist.ops.matmul import Matmul
from etc_dist.ops.matmul_reduce_scatter import MatmulReduceScatter
from etc_dist.ops.operation import Operation
from etc_dist.torch.tensors import as_array, as_rows, as_weight, from_rows
from etc_dist.world import World, current, of_group

Kept = TypeVar("Kept", bound=Operation)

REDUCTIONS = ("sum", "avg")
LIBRARY = torch.library.Library("etc_dist", "DEF")
SCHEMAS = (
    "fused_matmul_reduce_scatter(Tensor A, Tensor B, str reduce_op, int scatter_dim, "
    "str group_name) -> Tensor",
    "fused_all_gather_matmul(Tensor A, Tensor[] Bs, int gather_dim, str group_name, *, "
    "bool return_A=True) -> (Tensor?, Tensor[])",
    'matmul(Tensor A, Tensor B, str group_name="") -> Tensor',
    'mlp(Tensor x, Tensor gate, Tensor up, Tensor down, str group_name="") -> Tensor',
    "moe(Tensor x, Tensor router, Tensor gate_up, Tensor down, int top_k, "
    'bool normalize=True, str parallel="tensor", str group_name="") -> Tensor',
    "gather_rows(Tensor rows, str group_name) -> Tensor",
)
# The name that replaces the other one, where torch has it.
_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_open: dict[str, World] = {}
"""The worlds of the last calls, by the name of their group."""


def fused_matmul_reduce_scatter(
    A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> Tensor:
    """The sum (or the average) over the ranks of a group of A [..., K] @ B [K, N], of
    which each rank gets its part along `scatter_dim`. Collective.

    bfloat16 or float16. B may be a transposed view; other strides, and a `scatter_dim`
    that is not the outermost axis in memory, cost a copy. Precision and errors as for
    `etc_dist.MatmulReduceScatter`."""
    world = world_of(group_name)
    try:
        _check_dims(A, B, scatter_dim, "scatter_dim")
        if reduce_op not in REDUCTIONS:
            raise _refusal("reduce_op", f"{' or '.join(REDUCTIONS)}", repr(reduce_op))
        x, w = as_rows(A, scatter_dim), as_weight(B)
        if A.shape[scatter_dim] % world.size:
            got = f"{A.shape[scatter_dim]} on {world.size} ranks"
            raise _refusal("A.shape[scatter_dim]", "a multiple of the ranks", got)
        out = A.new_empty(x.shape[0] // world.size, w.shape[0])
    except Exception as error:
        refuse(world, error, "fused_matmul_reduce_scatter")
    kept(world, MatmulReduceScatter)(as_array(x), as_array(w), as_array(out))
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
    """A [..., K] of all ranks, joined along `gather_dim` in rank order, @ each of Bs
    [K, N]. Collective; Bs as B of `fused_matmul_reduce_scatter`.

    Each of Bs gathers A again, since that is hidden by its GEMM. With `return_A`, the
    first result is the joined A, gathered by torch.distributed; otherwise None."""
    world = world_of(group_name)
    try:
        for B in Bs:
            _check_dims(A, B, gather_dim, "gather_dim")
        x, ws = as_rows(A, gather_dim), [as_weight(B) for B in Bs]
        rows = x.shape[0] * world.size
        outs = [A.new_empty(rows, w.shape[0]) for w in ws]
    except Exception as error:
        refuse(world, error, "fused_all_gather_matmul")
    multiply, source = kept(world, AllGatherMatmul), as_array(x)
    for w, out in zip(ws, outs, strict=True):
        multiply(source, as_array(w), as_array(out))
    joined = None
    if return_A:
        joined = from_rows(gather_rows(x, group_name), A.shape, gather_dim)
    return joined, [from_rows(out, A.shape, gather_dim) for out in outs]


def matmul(A: Tensor, B: Tensor, group_name: str = "") -> Tensor:
    """A [..., K] @ B [K, N] on each rank, without communication; all ranks make the
    same call. The group "" is the current world. B as in
    `fused_matmul_reduce_scatter`."""
    world = world_of(group_name)
    try:
        _check_dims(A, B, 0, "A")
        x, w = as_rows(A, 0), as_weight(B)
        out = A.new_empty(x.shape[0], w.shape[0])
    except Exception as error:
        refuse(world, error, "matmul")
    kept(world, Matmul)(as_array(x), as_array(w), as_array(out))
    return from_rows(out, A.shape, 0)


def mlp(
    x: Tensor, gate: Tensor, up: Tensor, down: Tensor, group_name: str = ""
) -> Tensor:
    """`etc_dist.MLP` of a rank's shards of the weights: x [..., H] -> [..., H], each
    rank its own rows. The group "" is the current world. Layers of one shape share
    their program and buffers."""
    world = world_of(group_name)
    try:
        rows = as_rows(x, 0)
        out = torch.empty_like(rows)
    except Exception as error:
        refuse(world, error, "mlp")
    arrays = map(as_array, (rows, gate, up, down, out))
    kept(world, SharedMLP)(*arrays)
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
) -> Tensor:
    """`etc_dist.MoE` of these weights: x [..., H] -> [..., H]. With parallel="tensor"
    on several ranks x is [M, H], and the result this rank's part of the rows. The group
    "" is the current world. Layers of one shape share their program and buffers."""
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


def gather_rows(rows: Tensor, group_name: str) -> Tensor:
    """The rows [M, K] of all ranks, in rank order, by torch.distributed.

    NOTE: not its functional collectives, which gloo does not serve on GPUs."""
    world = world_of(group_name)
    if world.size == 1:
        return rows.clone()
    rows = rows.contiguous()
    group = dist.distributed_c10d._resolve_process_group(world.group_name)
    out = rows.new_empty(rows.shape[0] * world.size, rows.shape[1])
    _gather(out, rows, group=group)
    return out


def _check_dims(A: Tensor, B: Tensor, dim: int, name: str) -> None:
    axes = A.dim()
    if axes < 2 or B.dim() != 2:
        shapes = f"A {list(A.shape)}, B {list(B.shape)}"
        raise _refusal("A, B", "A [..., K] of two axes or more, and B [K, N]", shapes)
    if not 0 <= dim < axes - 1:
        raise _refusal(name, f"0 to {axes - 2}, an axis of A but the last", str(dim))


def refuse(world: World, error: Exception, name: str) -> NoReturn:
    """Raise the error on all ranks."""
    world.refuse(as_refusal(error, f"the arguments of {name}"))


def _refusal(name: str, wanted: str, got: str) -> ArgumentError:
    return ArgumentError(
        f"the argument {name} cannot be used",
        where="an operation of torch.ops.etc_dist",
        wanted=f"{name}: {wanted}",
        got=got,
        fix="correct it; nothing was launched on any rank",
    )


FUNCTIONS: tuple[Callable[..., Any], ...] = (
    fused_matmul_reduce_scatter,
    fused_all_gather_matmul,
    matmul,
    mlp,
    moe,
    gather_rows,
)


def _register() -> None:
    for schema, function in zip(SCHEMAS, FUNCTIONS, strict=True):
        LIBRARY.define(schema, tags=(torch.Tag.needs_exact_strides,))
        for device in ("CPU", "CUDA"):
            LIBRARY.impl(function.__name__, function, device)


_register()
