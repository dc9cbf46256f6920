"""The operands of one task: sizes that must be equal or complete, and regions that must
be apart.

Code generation compares sizes as expressions (`codegen/tiles.py`). A region that the
edge of its tensor clips is smaller, which only the numbers of a shape show."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from functools import cached_property
from itertools import pairwise

import numpy as np

from etc_dist.errors import GraphError
from etc_dist.ir.expr import Const, Expr, wrap
from etc_dist.ir.operand import WORLD, Extent
from etc_dist.ir.tensor import Region
from etc_dist.verify.enumeration import Array, Block, Enumeration, Mask, rows, task_name
from etc_dist.verify.unchecked import missing
from etc_dist.verify.violations import Fault, Tally

ONE, EQUAL, INDEX = Const(1), Extent(), Extent(1)
Axis = tuple[int, int]
"""An operand by position, and one of its axes."""


def check_operands(tasks: Enumeration, known_tensors: Container[str]) -> list[Fault]:
    """A fault for each call with a task whose operands do not have the sizes or places
    that its device function declares. `known_tensors` have known values."""
    tally = Tally()
    for block in tasks.blocks:
        if block.count and block.call.function.tile:
            # Expressions without a value have been reported.
            with suppress(ArithmeticError, IndexError):
                _Operands(block, known_tensors, tasks.plan.graph.world_size).check(
                    tally
                )
    return tally.faults()


class _Operands:
    """The operands of all tasks of a block."""

    def __init__(self, block: Block, known_tensors: Container[str], world: int):
        self.block, self.call, self.known_names = block, block.call, known_tensors
        self.world = world
        self.regions = (*block.call.reads, *block.call.writes)
        self.tile = block.call.function.tile

    def check(self, tally: Tally) -> None:
        for first, second, extent in self.equal_axes():
            is_same = not extent.is_scaled and self.axis(*first) == self.axis(*second)
            if not is_same and self.known(first[0], second[0]):
                self.compare(first, second, extent, tally)
        for axis, size in self.exact_axes():
            if self.known(axis[0]):
                self.measure(axis, size, tally)
        for axis, most in self.limited_axes():
            if self.axis(*axis)[1] != most and self.known(axis[0]):
                self.limit(axis, most, tally)
        for axis, unit in self.placed_axes():
            if self.known(axis[0]):
                self.place(axis, unit, tally)
        writes = range(len(self.call.reads), len(self.regions))
        for n in (n for n, operand in self.tile.items() if operand.apart):
            for write in writes:
                is_same = self.regions[n].tensor.may_be(self.regions[write].tensor)
                if is_same and n != write and self.known(n, write):
                    self.separate(n, write, tally)

    def known(self, *operands: int) -> bool:
        return not any(
            missing(self.regions[n].parts, self.known_names) for n in operands
        )

    def axis(self, n: int, k: int) -> tuple[Expr, Expr, Expr]:
        region = self.regions[n]
        return region.start[k], region.size[k], region.tensor.shape[k]

    def declared(self) -> Iterator[tuple[Axis, Extent]]:
        """The axes with their extents; axes in front of them have one index each."""
        for n, operand in self.tile.items():
            if operand.extents is None:
                continue
            front = len(self.regions[n].start) - len(operand.extents)
            extents = (INDEX,) * front + operand.extents
            for k, extent in enumerate(extents) if front >= 0 else ():
                yield (n, k), extent

    def exact_axes(self) -> Iterator[tuple[Axis, int]]:
        """Axes with a size that the edge of a tensor must not clip."""
        for axis, extent in self.declared():
            if extent.is_exact and self.regions[axis[0]].kept_axes[axis[1]]:
                yield axis, self.world if extent.size is None else extent.size

    def limited_axes(self) -> Iterator[tuple[Axis, Expr]]:
        """Axes of which a task has at most so many elements, by the numbers of a
        shape."""
        for axis, extent in self.declared():
            if isinstance(extent.most, Expr):
                yield axis, extent.most

    def placed_axes(self) -> Iterator[tuple[Axis, Expr]]:
        """Axes of which a task has elements from a multiple of a number on, by the
        numbers of a shape."""
        for axis, extent in self.declared():
            if isinstance(extent.begins, Expr):
                yield axis, extent.begins

    def equal_axes(self) -> Iterator[tuple[Axis, Axis, Extent]]:
        """Pairs of axes of different operands that must have equal sizes, or of which
        the second one is scaled as its extent says."""
        axes_by_name: dict[str, list[Axis]] = {}
        for axis, extent in self.declared():
            if extent.name and extent.name != WORLD and not extent.is_scaled:
                axes_by_name.setdefault(extent.name, []).append(axis)
        for n, operand in self.tile.items():
            if operand.like is not None:
                yield from ((*axes, EQUAL) for axes in self.like(operand.like, n))
        for axes in axes_by_name.values():
            yield from ((*pair, EQUAL) for pair in pairwise(axes))
        for axis, extent in self.declared():
            if extent.is_scaled and extent.name in axes_by_name:
                yield axes_by_name[extent.name][0], axis, extent

    def like(self, first: int, second: int) -> Iterator[tuple[Axis, Axis]]:
        """Pairs of the axes of two operands, without those of one element."""
        axes = [
            [(n, k) for k, size in enumerate(self.regions[n].size) if size != ONE]
            for n in (first, second)
        ]
        if len(axes[0]) == len(axes[1]):  # others are refused for GPUs
            yield from zip(*axes, strict=True)

    def box(self, region: Region) -> tuple[Array, Array]:
        """The first index of the region in each task, and the index after its last."""
        parts = (region.start, region.size, region.tensor.shape)
        low, size, extent = (rows(self.block, part) for part in parts)
        return low, np.maximum(np.minimum(low + size, extent), low)

    @cached_property
    def runs(self) -> Mask:
        """The tasks whose bodies run: those that may have something to write."""
        runs = np.full(self.block.count, not self.call.writes)
        for n, region in enumerate(self.call.writes, len(self.call.reads)):
            if not self.known(n):
                return np.ones(self.block.count, bool)
            low, high = self.box(region)
            runs |= (high > low).all(axis=0)
        return runs

    def running(self, tasks: Array) -> Array:
        """Those of `tasks` whose bodies run."""
        return tasks[self.runs[tasks]] if tasks.size else tasks

    def sizes(self, axis: Axis) -> Array:
        """The size of a region along an axis in each task, clipped at the edge."""
        low, size, end = map(self.block.values, self.axis(*axis))
        clipped: Array = np.maximum(np.minimum(size, end - low), 0)
        return clipped

    def compare(self, first: Axis, second: Axis, extent: Extent, tally: Tally) -> None:
        sizes = [self.sizes(axis) for axis in (first, second)]
        per = self.block.values(wrap(1 if extent.per is None else extent.per))
        bad = np.flatnonzero(-(-sizes[0] // per) * extent.times != sizes[1])
        bad = self.running(bad)
        if bad.size:
            t = int(bad[0])
            has = " and ".join(
                f"{size[t]} along axis {k} of {self.regions[n]}"
                for size, (n, k) in zip(sizes, (first, second), strict=True)
            )
            must = f"be {extent}" if extent.is_scaled else "be equal"
            text = f"{task_name(self.block, t)} has {has}, which must {must}"
            fix = "clip both regions at the same index, or write the rest elsewhere"
            fault = Fault(GraphError, text, fix, int(bad.size))
            tally.add(("sizes", self.call.name, first, second), fault)

    def measure(self, axis: Axis, size: int, tally: Tally) -> None:
        """NOTE: the CPU backend also runs regions of other sizes."""
        low, lengths, extent = map(self.block.values, self.axis(*axis))
        is_cut = (lengths == size) & (low + lengths > extent)

        def has(t: int) -> str:
            num_left = max(int(extent[t] - low[t]), 0)
            of_axis = f"along axis {axis[1]} of {self.regions[axis[0]]}"
            return f"has {num_left} of {size} {of_axis}, which must be complete"

        fix = "make the tensor larger, or give tasks only complete regions"
        self._refuse(is_cut, "complete", axis, has, fix, tally)

    def limit(self, axis: Axis, most: Expr, tally: Tally) -> None:
        sizes, limits = self.sizes(axis), self.block.values(most)

        def has(t: int) -> str:
            return f"has {sizes[t]} {self._of_tile(axis)} has at most {limits[t]}"

        fix = "give each task at most one tile, or choose a larger tile"
        self._refuse(sizes > limits, "limit", axis, has, fix, tally)

    def place(self, axis: Axis, unit: Expr, tally: Tally) -> None:
        first, units = self.block.values(self.axis(*axis)[0]), self.block.values(unit)
        remainders = np.where(units == 0, first, first % np.maximum(units, 1))

        def begins(t: int) -> str:
            place = f"a multiple of {units[t]}" if units[t] else "0"
            return f"begins at {first[t]} {self._of_tile(axis)} begins at {place}"

        fix = "begin each region at a multiple of the tile's size"
        self._refuse(remainders != 0, "place", axis, begins, fix, tally)

    def _of_tile(self, axis: Axis) -> str:
        n, k = axis
        function = self.call.function.name
        return f"along axis {k} of {self.regions[n]}, of which a tile of {function}"

    def _refuse(
        self,
        is_bad: Mask,
        kind: str,
        axis: Axis,
        text_of: Callable[[int], str],
        fix: str,
        tally: Tally,
    ) -> None:
        """Report the running tasks for which `is_bad`, by the text of the first one."""
        bad = self.running(np.flatnonzero(is_bad))
        if bad.size:
            t = int(bad[0])
            text = f"{task_name(self.block, t)} {text_of(t)}"
            fault = Fault(GraphError, text, fix, int(bad.size))
            tally.add((kind, self.call.name, axis), fault)

    def separate(self, n: int, write: int, tally: Tally) -> None:
        boxes, ranks = [], []
        for region in (self.regions[n], self.regions[write]):
            boxes.append(self.box(region))
            place = Const(self.block.rank) if region.rank is None else region.rank
            ranks.append(self.block.values(place))
        (low, high), (write_low, write_high) = boxes
        is_shared = np.minimum(high, write_high) > np.maximum(low, write_low)
        bad = np.flatnonzero(is_shared.all(axis=0) & (ranks[0] == ranks[1]) & self.runs)
        if bad.size:
            text = (
                f"{task_name(self.block, int(bad[0]))} writes {self.regions[write]}, "
                f"which overlaps {self.regions[n]}: on GPUs other threads may still "
                "read it"
            )
            fix = "write to another tensor, and copy it back by a later task"
            fault = Fault(GraphError, text, fix, int(bad.size))
            tally.add(("apart", self.call.name, n, write), fault)
