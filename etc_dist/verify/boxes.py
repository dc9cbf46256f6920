"""The accesses of one tensor as boxes, and their reduction to those that differ.

A tensor is cut along every start and end of a box that some task accesses. The slices
of an axis lie between its cuts. Two slices are equal if boxes of the same kinds cover
them, in the same slices of the other axes: it suffices to check one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import numpy.typing as npt

from etc_dist.verify.enumeration import NONE, PARTLY_WAITED, Access, Array, Mask
from etc_dist.verify.equal_rows import first_rows, row_numbers
from etc_dist.verify.happens_before import HappensBefore

FEW = 4096
"""Kinds of boxes whose random bits are kept."""


@dataclass(frozen=True)
class Boxes:
    """The boxes low .. high - 1 that tasks access of one tensor, in one rank's memory.
    `operand` has the position of a box in `accesses`."""

    accesses: Sequence[Access]
    low: Array  # [axes, boxes]
    high: Array
    task: Array
    operand: Array

    @property
    def write(self) -> Mask:
        """Of each box, whether it is written."""
        return np.array([a.write for a in self.accesses], bool)[self.operand]

    @property
    def phase(self) -> Array:
        """Of each box, the phase of a task that accesses it."""
        return np.array([a.phase for a in self.accesses], np.int64)[self.operand]

    @property
    def gathered(self) -> Mask:
        """Of each box, whether other data select its elements."""
        return np.array([a.gathered for a in self.accesses], bool)[self.operand]

    def of(self, some: Array | Mask) -> Boxes:
        """Some of the boxes."""
        return Boxes(
            self.accesses,
            self.low[:, some],
            self.high[:, some],
            self.task[some],
            self.operand[some],
        )

    def reduced(self, extent: Sequence[int], order: HappensBefore) -> Cut:
        """The boxes that differ in this order, cut: all writes, one of the reads of
        each kind that have the same box, and no slice that is equal to another one."""
        kind = _kinds(self.accesses, self.task, self.operand, order)
        is_needed = self.write
        is_needed[first_rows((kind, *self.low, *self.high))] = True
        return self.of(is_needed).cut(extent, kind[is_needed]).without_equal_slices()

    def cut(self, extent: Sequence[int], kind: Array | None = None) -> Cut:
        """The boxes in a tensor with these extents, cut along all of their sides."""
        cuts = []
        for size, low, high in zip(extent, self.low, self.high, strict=True):
            sides = np.concatenate(([0, size], low, high))
            cuts.append(sides[first_rows([sides])])
        kind = self.task if kind is None else kind
        return Cut(self, kind, [c[:-1] for c in cuts], [c[1:] for c in cuts])


@dataclass(frozen=True)
class Cut:
    """Boxes, the kind of each one (see `_kinds`; by default its task), and the bounds
    of the slices of each axis."""

    boxes: Boxes
    kind: Array
    low: list[Array]
    high: list[Array]

    @cached_property
    def begin(self) -> Array:
        """[axes, boxes]: the first slice of each box."""
        sides = zip(self.low, self.boxes.low, strict=True)
        begin = [np.searchsorted(low, at) for low, at in sides]
        return np.reshape(begin, self.boxes.low.shape)  # no axes for a scalar

    @cached_property
    def end(self) -> Array:
        """[axes, boxes]: the slice after the last one of each box."""
        sides = zip(self.high, self.boxes.high, strict=True)
        end = [np.searchsorted(high, at, "right") for high, at in sides]
        return np.reshape(end, self.boxes.high.shape)

    @property
    def shape(self) -> list[int]:
        """The number of cells along each axis."""
        return [len(low) for low in self.low]

    @property
    def cells(self) -> float:
        """The number of cells of all boxes."""
        return float(np.prod(self.end - self.begin, axis=0, dtype=np.float64).sum())

    def without_equal_slices(self) -> Cut:
        """Without slices that are equal to another slice of their axis, and without the
        boxes that lie in them."""
        cut = self
        # The axis with the most slices first: fewer boxes may be left for the others.
        for axis in np.argsort(self.shape)[::-1]:
            if self.shape[axis] > 1 and self.boxes.task.size:
                cut = cut._only(axis, cut._different_slices(axis))
        return cut

    def _different_slices(self, axis: int) -> Array:
        other_axes = [k for k in range(len(self.low)) if k != axis]
        columns = self.kind, *self.begin[other_axes], *self.end[other_axes]
        number = row_numbers(columns)
        # A slice is identified by the sum of 128 random bits of each of its boxes.
        random = _random_bits(int(number.max()) + 1)
        count = self.shape[axis]
        sums = np.zeros((2, count + 1), np.uint64)
        for row, bits in zip(sums, random[:, number], strict=True):
            np.add.at(row, self.begin[axis], bits)
            np.subtract.at(row, self.end[axis], bits)
        sums = np.cumsum(sums, axis=1, dtype=np.uint64)[:, :count]
        order = np.lexsort(sums)
        sums = sums[:, order]
        is_new = np.ones(count, bool)
        is_new[1:] = (sums[:, 1:] != sums[:, :-1]).any(axis=0)
        return np.sort(order[is_new])

    def _only(self, axis: int, slices: Array) -> Cut:
        if len(slices) == self.shape[axis]:
            return self
        low, high = list(self.low), list(self.high)
        low[axis], high[axis] = low[axis][slices], high[axis][slices]
        cut = Cut(self.boxes, self.kind, low, high)
        is_filled = cut.end[axis] > cut.begin[axis]
        return Cut(self.boxes.of(is_filled), self.kind[is_filled], low, high)


def _random_bits(count: int) -> npt.NDArray[np.uint64]:
    """128 random bits of each number: [2, at least count]."""
    return _few_random_bits() if count <= FEW else _new_random_bits(count)


def _new_random_bits(count: int) -> npt.NDArray[np.uint64]:
    shape = 2, count
    return np.random.default_rng(0).integers(2**64, size=shape, dtype=np.uint64)


@cache
def _few_random_bits() -> npt.NDArray[np.uint64]:
    return _new_random_bits(FEW)


def boxes_of(accesses: Sequence[Access], rank: int, axes: int) -> Boxes:
    """The boxes of a tensor's `accesses` that are in the memory of `rank`."""
    here = [access.on(rank) for access in accesses if rank in access.ranks]
    none = np.zeros((axes, 0), np.int64)
    low = np.concatenate([none, *(a.low for a in here)], axis=1)
    high = np.concatenate([none, *(a.high for a in here)], axis=1)
    task = np.concatenate([np.zeros(0, np.int64), *(a.task for a in here)])
    operand = np.repeat(np.arange(len(here)), [a.task.size for a in here])
    return Boxes(here, low, high, task, operand)


def _kinds(
    accesses: Sequence[Access], task: Array, operand: Array, order: HappensBefore
) -> Array:
    """A number for each box, equal for boxes of an operand that are in the same order
    with all others: those of tasks of one class, and reads of tasks that wait for an
    element which all writers notify.

    Tasks that access the tensor by several operands, and write it, are apart: two
    operands of one task need no order, and those of two tasks do."""
    node = order.node[task]
    pair = row_numbers((node, operand))
    examples = first_rows([pair])
    node, operand = node[examples], operand[examples]
    write = np.array([a.write for a in accesses], bool)[operand]
    operands, writes = np.bincount(node), np.bincount(node, write)
    is_apart = (writes > 0) & (operands > 1)
    is_apart = is_apart[node]
    writers = np.flatnonzero(writes)
    if writers.size:
        early = np.array([a.phase in PARTLY_WAITED for a in accesses], bool)[operand]
        late, soon = (order.after_all(writers, early=e) for e in (False, True))
        node = np.where(np.where(early, soon[node], late[node]), NONE, node)
    kind = row_numbers((node, operand))[pair]
    if not is_apart.any():
        return kind
    return row_numbers((kind, np.where(is_apart[pair], task, NONE)))
