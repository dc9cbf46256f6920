"""Accesses by cell: the parts of a tensor that every access covers entirely or not.

The cells lie between the cuts of all axes (see `boxes.py`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator
from dataclasses import dataclass, replace

import numpy as np

from etc_dist.errors import ArgumentError
from etc_dist.ir.tensor import Tensor
from etc_dist.verify.boxes import Cut, boxes_of
from etc_dist.verify.enumeration import BODY, EARLY, Array, Enumeration, Mask
from etc_dist.verify.happens_before import HappensBefore

MANY_CELLS, MOST_CELLS = 4_000_000, 50_000_000
"""Limits on the memory of a proof, of all tasks' accesses of one tensor: before equal
cells are left out, and after that."""
FEW_CELLS = 1000
"""As many take less time than to find equal ones."""


@dataclass(frozen=True)
class Cells:
    """All accesses of one tensor in one rank's memory, by cell, then by level."""

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
        """The number of cells along each axis."""
        return tuple(len(low) for low in self.low)

    def verb(self, entry: int) -> str:
        """What a task does with the cells of an entry, for errors."""
        if self.write[entry]:
            return "writes"
        return {BODY: "reads", EARLY: "reads early"}.get(self.phase[entry], "loads")

    def name(self, cell: int) -> str:
        """A cell as a region of its tensor, for errors."""
        parts = [
            f"{low[i]}:{high[i]}"
            for low, high, i in zip(
                self.low, self.high, np.unravel_index(cell, self.shape), strict=True
            )
        ]
        return f"{self.tensor.name}[{', '.join(parts)}] on rank {self.rank}"


def all_cells(
    tasks: Enumeration, order: HappensBefore, names: Container[str], *, reduced: bool
) -> Iterator[Cells]:
    """The cells of the tensors `names` on every rank, except those with values before
    the run that no task writes; and of each input with the output that may be in its
    place, as a state. Where cells are `reduced`, or many, those are left out that are
    equal to others in this order."""
    place = np.empty(tasks.tasks, np.int64)
    place[np.argsort(order.level[order.node], kind="stable")] = np.arange(tasks.tasks)
    accesses = defaultdict(list)
    for access in tasks.accesses:
        accesses[access.region.tensor.name].append(access)
    groups = [(t, accesses[t.name]) for t in tasks.plan.graph.tensors]
    groups += [
        (replace(output, name=output.over, kind="state"), group + accesses[output.over])
        for output, group in groups
        if output.over
    ]
    for tensor, group in groups:
        if tensor.name not in names:
            continue
        if tensor.is_given and not any(a.write for a in group):
            continue
        for rank, env in enumerate(tasks.environments):
            extent = [int(n.evaluate(env)) for n in tensor.shape]
            boxes = boxes_of(group, rank, len(extent))
            cut = boxes.cut(extent)
            # Of flagged tensors events order all, which are left out of `order`.
            most = FEW_CELLS if reduced else MANY_CELLS
            if cut.cells > most and not tensor.flagged:
                cut = boxes.reduced(extent, order)
            if cut.cells > MOST_CELLS:
                raise _too_many(tensor, cut.cells)
            yield _cells(tensor, rank, cut, place)


def _cells(tensor: Tensor, rank: int, cut: Cut, place: Array) -> Cells:
    by_place = np.argsort(place[cut.boxes.task], kind="stable")
    begin, end = cut.begin[:, by_place], cut.end[:, by_place]
    box, cell = _expand(cut.shape, begin, end - begin)
    by_cell = np.argsort(cell, kind="stable")
    boxes = cut.boxes.of(by_place[box[by_cell]])
    return Cells(
        tensor,
        rank,
        cut.low,
        cut.high,
        cell[by_cell],
        boxes.task,
        boxes.write,
        boxes.phase,
        boxes.gathered,
    )


def _too_many(tensor: Tensor, cells: float) -> ArgumentError:
    return ArgumentError(
        f"the accesses of tensor {tensor.name} are too many to be proved",
        where=str(tensor),
        wanted=f"at most {MOST_CELLS} parts that a task accesses, equal ones once",
        got=f"{cells:.0f}",
        fix="use larger tiles, or prove it at smaller dims and run this shape with "
        "ETC_DIST_VERIFY=0",
    )


def _expand(shape: list[int], begin: Array, count: Array) -> tuple[Array, Array]:
    """(box, cell) for each cell of each box."""
    total = np.prod(count, axis=0, dtype=np.int64)
    box = np.repeat(np.arange(total.size), total)
    index = np.arange(box.size) - np.repeat(np.cumsum(total) - total, total)
    cell = np.zeros(box.size, np.int64)
    stride = 1
    for axis in reversed(range(len(shape))):
        if (count[axis] == 1).all():
            at = begin[axis][box]
        else:
            width = count[axis][box]
            at = begin[axis][box] + index % width
            index = index // width
        cell += at * stride
        stride *= shape[axis]
    return box, cell


def merged(cells: Cells) -> Cells:
    """One entry for each task in a cell: a write if any operand writes, with the first
    phase in which it accesses the cell, gathered if all its reads there are."""
    if not cells.cell.size:
        return cells
    new = np.ones(cells.cell.size, bool)
    cell, task = cells.cell, cells.task
    new[1:] = (cell[1:] != cell[:-1]) | (task[1:] != task[:-1])
    at = np.flatnonzero(new)
    if at.size == new.size:
        return cells
    write = np.logical_or.reduceat(cells.write, at)
    phase = np.minimum.reduceat(cells.phase, at)
    cell, task = cells.cell[at], cells.task[at]
    is_gathered = np.logical_and.reduceat(cells.gathered | cells.write, at)
    is_gathered = is_gathered & ~write
    return replace(
        cells, cell=cell, task=task, write=write, phase=phase, gathered=is_gathered
    )
