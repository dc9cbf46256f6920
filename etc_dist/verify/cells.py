"""Accesses by cell: the parts of a tensor that every access covers entirely or not.

A tensor is cut along every start and end of a box that some task accesses. The cells
lie between the cuts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from etc_dist.errors import ArgumentError
from etc_dist.ir.tensor import Tensor
from etc_dist.verify.enumeration import BODY, EARLY, Access, Array, Enumeration, Mask

MOST_CELLS = 50_000_000
"""A limit on the memory of a proof: of all tasks' accesses of one tensor."""


@dataclass(frozen=True)
class Cells:
    """All accesses of one tensor in one rank's memory, sorted by cell, then by level
    (see `HappensBefore`)."""

    tensor: Tensor
    rank: int
    cuts: list[Array]
    cell: Array
    task: Array
    write: Mask
    phase: Array
    gathered: Mask
    """Reads that may skip the cell."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(len(c) - 1 for c in self.cuts)

    def verb(self, entry: int) -> str:
        if self.write[entry]:
            return "writes"
        return {BODY: "reads", EARLY: "reads early"}.get(self.phase[entry], "loads")

    def name(self, cell: int) -> str:
        parts = [
            f"{cuts[i]}:{cuts[i + 1]}"
            for cuts, i in zip(
                self.cuts, np.unravel_index(cell, self.shape), strict=True
            )
        ]
        return f"{self.tensor.name}[{', '.join(parts)}] on rank {self.rank}"


def all_cells(tasks: Enumeration, level: Array) -> Iterator[Cells]:
    """The cells of every tensor on every rank, except those with values before the run
    that no task writes."""
    place = np.empty(tasks.tasks, np.int64)
    place[np.argsort(level, kind="stable")] = np.arange(tasks.tasks)
    for tensor in tasks.plan.graph.tensors:
        mine = [a for a in tasks.accesses if a.region.tensor.name == tensor.name]
        if tensor.is_given and not any(a.write for a in mine):
            continue
        for rank, env in enumerate(tasks.environments):
            extent = [int(n.evaluate(env)) for n in tensor.shape]
            yield _cells(tensor, rank, extent, mine, place)


def _cells(
    tensor: Tensor, rank: int, extent: list[int], accesses: list[Access], place: Array
) -> Cells:
    here = [(a, np.flatnonzero(a.rank == rank)) for a in accesses]
    axes = len(extent)

    def gather(parts: list[Array], empty: Array) -> Array:
        return np.concatenate([empty, *parts], axis=-1)

    none = np.zeros((axes, 0), np.int64)
    low = gather([a.low[:, at] for a, at in here], none)
    high = gather([a.high[:, at] for a, at in here], none)
    task = gather([a.task[at] for a, at in here], np.zeros(0, np.int64))
    sizes = [at.size for _, at in here]
    write = np.repeat([a.write for a, _ in here], sizes).astype(bool)
    phase = np.repeat([a.phase for a, _ in here], sizes).astype(np.int64)
    gathered = np.repeat([a.gathered for a, _ in here], sizes).astype(bool)
    by_level = np.argsort(place[task], kind="stable")
    low, high, task = low[:, by_level], high[:, by_level], task[by_level]
    write, phase, gathered = write[by_level], phase[by_level], gathered[by_level]
    cuts = [
        np.unique(np.concatenate(([0, extent[k]], low[k], high[k])))
        for k in range(axes)
    ]
    begin = [np.searchsorted(c, part) for c, part in zip(cuts, low, strict=True)]
    end = [np.searchsorted(c, part) for c, part in zip(cuts, high, strict=True)]
    count = [e - b for b, e in zip(begin, end, strict=True)]
    total = np.prod(count, axis=0, dtype=np.float64)
    if total.sum() > MOST_CELLS:
        raise _too_many(tensor, total.sum())
    box, cell = _expand(cuts, begin, count, total.astype(np.int64))
    by_cell = np.argsort(cell, kind="stable")
    box = box[by_cell]
    cell = cell[by_cell]
    kinds = write[box], phase[box], gathered[box]
    return Cells(tensor, rank, cuts, cell, task[box], *kinds)


def _too_many(tensor: Tensor, cells: float) -> ArgumentError:
    return ArgumentError(
        f"the accesses of tensor {tensor.name} are too many to be proved",
        where=str(tensor),
        wanted=f"at most {MOST_CELLS} parts that a task accesses, over all tasks",
        got=f"{cells:.0f}",
        fix="use larger tiles, or prove it at smaller dims and run this shape with "
        "ETC_DIST_VERIFY=0",
    )


def _expand(
    cuts: list[Array], begin: list[Array], count: list[Array], total: Array
) -> tuple[Array, Array]:
    """(box, cell) for each cell of each box."""
    box = np.repeat(np.arange(total.size), total)
    rest = np.arange(box.size) - np.repeat(np.cumsum(total) - total, total)
    cell = np.zeros(box.size, np.int64)
    stride = 1
    for axis in reversed(range(len(cuts))):
        if (count[axis] == 1).all():
            at = begin[axis][box]
        else:
            width = count[axis][box]
            at = begin[axis][box] + rest % width
            rest = rest // width
        cell += at * stride
        stride *= len(cuts[axis]) - 1
    return box, cell


def merged(cells: Cells) -> Cells:
    """One entry for each task in a cell: a write if any operand writes, with the first
    phase in which it accesses the cell, gathered if all its reads there are."""
    if not cells.cell.size:
        return cells
    new = np.ones(cells.cell.size, bool)
    new[1:] = (np.diff(cells.cell) != 0) | (np.diff(cells.task) != 0)
    at = np.flatnonzero(new)
    if at.size == new.size:
        return cells
    write = np.logical_or.reduceat(cells.write, at)
    phase = np.minimum.reduceat(cells.phase, at)
    cell, task = cells.cell[at], cells.task[at]
    gathered = np.logical_and.reduceat(cells.gathered | cells.write, at)
    kinds = write, phase, gathered & ~write
    return Cells(cells.tensor, cells.rank, cells.cuts, cell, task, *kinds)
