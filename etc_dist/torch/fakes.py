"""Shapes and strides of the results, for tracing without data."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import _get_group_size_by_name

from etc_dist.torch.ops import LIBRARY
from etc_dist.torch.tensors import from_rows
from etc_dist.world import current


def fused_matmul_reduce_scatter(
    A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> Tensor:
    rows = _rows(A) // size_of(group_name)
    return from_rows(A.new_empty(rows, B.shape[1]), A.shape, scatter_dim)


def fused_all_gather_matmul(
    A: Tensor,
    Bs: Sequence[Tensor],
    gather_dim: int,
    group_name: str,
    *,
    return_A: bool = True,
) -> tuple[Tensor | None, list[Tensor]]:
    rows = _rows(A) * size_of(group_name)
    widths = [A.shape[-1]] * return_A + [B.shape[1] for B in Bs]
    made = [from_rows(A.new_empty(rows, n), A.shape, gather_dim) for n in widths]
    return (made[0], made[1:]) if return_A else (None, made)


def matmul(
    A: Tensor, B: Tensor, group_name: str = "", *, deterministic: str = "run"
) -> Tensor:
    return from_rows(A.new_empty(_rows(A), B.shape[1]), A.shape, 0)


def mlp(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    group_name: str = "",
    *,
    deterministic: str = "run",
) -> Tensor:
    return x.new_empty(x.shape)


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
    size = size_of(group_name) if parallel == "tensor" else 1
    return x.new_empty(x.shape if size == 1 else (_rows(x) // size, x.shape[-1]))


def scatter_rows(rows: Tensor, group_name: str) -> Tensor:
    return rows.new_empty(rows.shape[0] // size_of(group_name), *rows.shape[1:])


def gather_rows(rows: Tensor, group_name: str) -> Tensor:
    return rows.new_empty(rows.shape[0] * size_of(group_name), rows.shape[1])


def size_of(group_name: str) -> int:
    """The ranks of a group, by its name; "" for the current world."""
    return _get_group_size_by_name(group_name) if group_name else current().size


def _rows(tensor: Tensor) -> int:
    return prod(tensor.shape[:-1])


def _register() -> None:
    for function in (
        fused_matmul_reduce_scatter,
        fused_all_gather_matmul,
        matmul,
        mlp,
        moe,
        gather_rows,
        scatter_rows,
    ):
        name = f"etc_dist::{function.__name__}"
        torch.library.register_fake(name, function, lib=LIBRARY)


_register()
