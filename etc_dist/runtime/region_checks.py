"""Rows and regions that GPUs do not take, at the dims of a run.

A matmul body waits for a first stage of k, so an empty k would never end its task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from etc_dist.errors import ArgumentError
from etc_dist.ir import GraphFunction, Region, Tensor
from etc_dist.ir.call import Call
from etc_dist.ir.expr import Const

Array = np.ndarray[Any, Any]


def refuse_rows(
    row_multiples: Mapping[Tensor, int], env: Mapping[str, Any], where: str
) -> None:
    """ArgumentError for rows that are not a multiple of a number of elements."""
    for tensor, multiple in row_multiples.items():
        row = int(tensor.shape[-1].evaluate(env))
        if row % multiple:
            raise ArgumentError(
                f"a row of tensor {tensor.name} cannot be stored on a GPU",
                where=where,
                wanted=f"rows of a multiple of {multiple} elements (16 bytes)",
                got=f"{tensor.shape[-1]} = {row} elements of {tensor.dtype}",
                fix="pad the arrays, or choose another size",
            )


def refuse_empty(graph: GraphFunction, env: Mapping[str, Any]) -> None:
    """ArgumentError for a task that writes something, and one of whose operands is
    empty although its function declares `not_empty`. `env`: as `graph.environment`."""
    for call in graph.calls:
        for region, axis in _not_empty(call):
            task = _empty_task(call, region, axis, dict(env))
            if task is not None:
                raise ArgumentError(
                    f"call {call.name}: a region of {call.function.name} is empty",
                    where=f"graph {graph.name}, task {task}, {region}",
                    wanted=f"at least one element on axis {axis} of "
                    f"{region.tensor.name} in each task that writes",
                    got=f"none: axis {axis} has "
                    f"{region.tensor.shape[axis].evaluate(env)} elements",
                    fix="use fewer splits at these dims, or choose other dims; only "
                    "the CPU backend adds nothing for an empty split",
                )


def _not_empty(call: Call) -> Iterator[tuple[Region, int]]:
    """The regions of `call` with the axes that may not be empty."""
    regions = (*call.reads, *call.writes)
    for n, operand in call.function.tile.items():
        front = len(regions[n].size) - len(operand.extents or ())
        for extent_idx, extent in enumerate(operand.extents or ()):
            if extent.not_empty:
                yield regions[n], front + extent_idx


def _empty_task(
    call: Call, region: Region, axis: int, env: dict[str, Any]
) -> str | None:
    """The first task of `call` that writes, and whose `region` is empty on `axis`."""
    extent = region.tensor.shape[axis]
    is_whole = region.start[axis] == Const(0) and region.size[axis] == extent
    if is_whole and int(extent.evaluate(env)) > 0:
        return None
    num_tasks = int(call.tasks.evaluate(env))
    inner = {**env, **call.coordinates(np.arange(num_tasks), env)}
    writes = np.zeros(num_tasks, bool)
    for written_region in call.writes:
        # Where it is loaded, it may have elements.
        axes = () if written_region.is_loaded else range(len(written_region.size))
        sizes = [_size(written_region, a, inner, num_tasks) for a in axes]
        writes |= np.all([size > 0 for size in sizes], axis=0)
    empty_tasks = np.flatnonzero(writes & (_size(region, axis, inner, num_tasks) <= 0))
    if not empty_tasks.size:
        return None
    place = call.coordinates(int(empty_tasks[0]), env)
    return call.label([int(n) for n in place.values()])


def _size(region: Region, axis: int, env: dict[str, Any], num_tasks: int) -> Array:
    """The size of `region` along `axis` in each task, clipped at the tensor's end."""
    parts = region.start[axis], region.size[axis], region.tensor.shape[axis]
    start, size, extent = (np.asarray(e.evaluate(env), np.int64) for e in parts)
    return np.broadcast_to(np.minimum(size, extent - start), (num_tasks,))
