"""Accesses by cell: the parts of a tensor that every access covers entirely or not.

The cells lie between the cuts of all axes (see `boxes.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from etc_dist.errors import ArgumentError
from etc_dist.ir.tensor import Tensor
from etc_dist.verify.boxes import Boxes, boxes_of
from etc_dist.verify.enumeration import BODY, EARLY, Array, Enumeration, Mask

MANY_CELLS, MOST_CELLS = 4_000_000, 50_000_000
"""Limits on the memory of a proof, of all tasks' accesses of one tensor: before equal
cells are left out, and after that."""


@dataclass(frozen=True)
class Cells:
    """All accesses of one tensor in one rank's memory, sorted by cell, then by level
    (see `HappensBefore`)."""

    tensor: Tensor
    rank: int
    low: list[Array]
    high: list[Array]
    cell: Array
    task: Array
    write: Mask
    phase: Array
    gathered: Mask
    """Reads that may skip the cell."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(len(low) for low in self.low)

    def verb(self, entry: int) -> str:
        if self.write[entry]:
            return "writes"
        return {BODY: "reads", EARLY: "reads early"}.get(self.phase[entry], "loads")

    def name(self, cell: int) -> str:
        parts = [
            f"{low[i]}:{high[i]}"
            for low, high, i in zip(
                self.low, self.high, np.unravel_index(cell, self.shape), strict=True
            )
        ]
        return f"{self.tensor.name}[{', '.join(parts)}] on rank {self.rank}"


def all_cells(
    tasks: Enumeration, level: Array, classes: Array, *, reduced: bool
) -> Iterator[Cells]:
    """The cells of every tensor on every rank, except those with values before the run
    that no task writes. Where cells are `reduced`, or many, those are left out that
    `classes` of tasks access as they access others."""
    place = np.empty(tasks.tasks, np.int64)
    place[np.argsort(level, kind="stable")] = np.arange(tasks.tasks)
    for tensor in tasks.plan.graph.tensors:
        mine = [a for a in tasks.accesses if a.region.tensor.name == tensor.name]
        if tensor.is_given and not any(a.write for a in mine):
            continue
        for rank, env in enumerate(tasks.environments):
            extent = [int(n.evaluate(env)) for n in tensor.shape]
            boxes = boxes_of(tensor, rank, extent, mine)
            if reduced or boxes.cells > MANY_CELLS:
                boxes = boxes.reduced(classes)
            if boxes.cells > MOST_CELLS:
                raise _too_many(tensor, boxes.cells)
            yield _cells(boxes, place)


def _cells(boxes: Boxes, place: Array) -> Cells:
    boxes = boxes.of(np.argsort(place[boxes.task], kind="stable"))
    shape = [len(low) for low in boxes.low]
    box, cell = _expand(shape, boxes.begin, boxes.end - boxes.begin)
    by_cell = np.argsort(cell, kind="stable")
    box, cell = box[by_cell], cell[by_cell]
    return Cells(
        boxes.tensor,
        boxes.rank,
        boxes.low,
        boxes.high,
        cell,
        boxes.task[box],
        boxes.write[box],
        boxes.phase[box],
        boxes.gathered[box],
    )


def _too_many(tensor: Tensor, cells: float) -> ArgumentError:
    return ArgumentError(
        f"the accesses of tensor {tensor.name} are too many to be proved",
        where=str(tensor),
        wanted=f"at most {MOST_CELLS} parts that a task accesses, over all tasks",
        got=f"{cells:.0f}",
        fix="use larger tiles, or prove it at smaller dims and run this shape with "
        "ETC_DIST_VERIFY=0",
    )


def _expand(shape: list[int], begin: Array, count: Array) -> tuple[Array, Array]:
    """(box, cell) for each cell of each box."""
    total = np.prod(count, axis=0, dtype=np.int64)
    box = np.repeat(np.arange(total.size), total)
    rest = np.arange(box.size) - np.repeat(np.cumsum(total) - total, total)
    cell = np.zeros(box.size, np.int64)
    stride = 1
    for axis in reversed(range(len(shape))):
        if (count[axis] == 1).all():
            at = begin[axis][box]
        else:
            width = count[axis][box]
            at = begin[axis][box] + rest % width
            rest = rest // width
        cell += at * stride
        stride *= shape[axis]
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
    gathered = gathered & ~write
    return replace(
        cells, cell=cell, task=task, write=write, phase=phase, gathered=gathered
    )
