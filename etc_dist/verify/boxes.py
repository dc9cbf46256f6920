"""The accesses of one tensor as boxes, and their reduction to those that differ.

A tensor is cut along every start and end of a box that some task accesses. The slices
of an axis lie between its cuts. Two slices are equal if the same operands of the same
classes of tasks access them, and the same slices of the other axes: it suffices to
check one of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from etc_dist.ir.tensor import Tensor
from etc_dist.verify.enumeration import Access, Array, Mask
from etc_dist.verify.rows import first_rows, row_numbers


@dataclass(frozen=True)
class Boxes:
    """All accesses of one tensor in one rank's memory. A box has the slices begin ..
    end - 1 of each axis; `operand` has its position in `accesses`.

    low, high: the bounds of each slice, by axis."""

    tensor: Tensor
    rank: int
    accesses: list[Access]
    low: list[Array]
    high: list[Array]
    begin: Array  # [axes, boxes]
    end: Array
    task: Array
    operand: Array

    @property
    def cells(self) -> float:
        """The number of cells of all boxes."""
        return float(np.prod(self.end - self.begin, axis=0, dtype=np.float64).sum())

    @property
    def write(self) -> Mask:
        return np.array([a.write for a in self.accesses], bool)[self.operand]

    @property
    def phase(self) -> Array:
        return np.array([a.phase for a in self.accesses], np.int64)[self.operand]

    @property
    def gathered(self) -> Mask:
        return np.array([a.gathered for a in self.accesses], bool)[self.operand]

    def of(self, some: Array | Mask) -> Boxes:
        """Some of the boxes."""
        begin, end = self.begin[:, some], self.end[:, some]
        task, operand = self.task[some], self.operand[some]
        return replace(self, begin=begin, end=end, task=task, operand=operand)

    def reduced(self, classes: Array) -> Boxes:
        """Without reads that another task of the class makes as well, and without
        slices that are equal to another slice of their axis."""
        if not self.task.size:
            return self
        kind = self._kinds(classes)
        needed = self.write
        needed[first_rows((kind, *self.begin, *self.end))] = True
        boxes, kind = self.of(needed), kind[needed]
        for axis in range(len(self.low)):
            boxes, kind = boxes._without_equal_slices(axis, kind)
        return boxes

    def _kinds(self, classes: Array) -> Array:
        """A number for each box, equal for the same operand of tasks of one class.

        Tasks that access the tensor by several operands, and write it, are apart: two
        operands of one task need no order, and those of two tasks do."""
        count = int(classes.max()) + 1
        operands, writes = np.zeros((2, count), np.int64)
        for n, access in enumerate(self.accesses):
            present = np.zeros(count, bool)
            present[classes[self.task[self.operand == n]]] = True
            operands += present
            writes += present & access.write
        is_apart = (writes > 0) & (operands > 1)
        owner = classes[self.task]
        apart = np.where(is_apart[owner], self.task + 1, 0)
        return row_numbers((owner, self.operand, apart))

    def _without_equal_slices(self, axis: int, kind: Array) -> tuple[Boxes, Array]:
        count = len(self.low[axis])
        if count < 2:
            return self, kind
        others = [k for k in range(len(self.low)) if k != axis]
        number = row_numbers((kind, *self.begin[others], *self.end[others]))
        # A slice is identified by the sum of 128 random bits of each of its accesses.
        shape = 2, int(number.max()) + 1
        random = np.random.default_rng(0).integers(2**64, size=shape, dtype=np.uint64)
        sums = np.zeros((2, count + 1), np.uint64)
        for row, bits in zip(sums, random[:, number], strict=True):
            np.add.at(row, self.begin[axis], bits)
            np.subtract.at(row, self.end[axis], bits)
        sums = np.cumsum(sums, axis=1, dtype=np.uint64)[:, :count]
        order = np.lexsort(sums)
        is_new = (np.diff(sums[:, order], axis=1) != 0).any(axis=0)
        kept = np.sort(order[np.concatenate(([True], is_new))])
        begin, end = self.begin.copy(), self.end.copy()
        for side in (begin, end):
            side[axis] = np.searchsorted(kept, side[axis])
        low, high = list(self.low), list(self.high)
        low[axis], high[axis] = low[axis][kept], high[axis][kept]
        boxes = replace(self, low=low, high=high, begin=begin, end=end)
        some = end[axis] > begin[axis]
        return boxes.of(some), kind[some]


def boxes_of(
    tensor: Tensor, rank: int, extent: list[int], accesses: list[Access]
) -> Boxes:
    """The boxes of a tensor's `accesses` in the memory of `rank`."""
    here = [(a, np.flatnonzero(a.rank == rank)) for a in accesses]

    def gather(parts: list[Array], empty: Array) -> Array:
        return np.concatenate([empty, *parts], axis=-1)

    none = np.zeros((len(extent), 0), np.int64)
    low = gather([a.low[:, at] for a, at in here], none)
    high = gather([a.high[:, at] for a, at in here], none)
    task = gather([a.task[at] for a, at in here], np.zeros(0, np.int64))
    operand = np.repeat(np.arange(len(here)), [at.size for _, at in here])
    cuts = []
    for size, begin, end in zip(extent, low, high, strict=True):
        sides = np.concatenate(([0, size], begin, end))
        cuts.append(sides[first_rows([sides])])
        begin[:], end[:] = np.split(row_numbers([sides])[2:], 2)
    bounds = [c[:-1] for c in cuts], [c[1:] for c in cuts]
    return Boxes(tensor, rank, accesses, *bounds, low, high, task, operand)
