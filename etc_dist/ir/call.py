"""A call: a device function over a grid of tasks."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from etc_dist.ir.event import EventRef
from etc_dist.ir.expr import Const, Expr, Load, Symbol
from etc_dist.ir.function import DeviceFunction
from etc_dist.ir.loads import loads_of, notifier_counts
from etc_dist.ir.tensor import Region

RANK = Symbol("rank", "rank")
TASK = Symbol("t", "task")


@dataclass(frozen=True)
class Coordinate:
    """One axis of a call's grid: its symbol and its symbolic extent. `count`, if given,
    is loaded: coordinates from there on have no tasks."""

    symbol: Symbol
    extent: Expr
    count: Load | None = None

    def __str__(self) -> str:
        if self.count is None:
            return f"{self.symbol}: {self.extent}"
        return f"{self.symbol}: {self.count}, at most {self.extent}"


@dataclass(frozen=True)
class UpTo:
    """The extent of an axis: the loaded `count`, at most `bound`."""

    bound: Expr | int
    count: Load | None


def up_to(bound: Expr | int, count: Load) -> UpTo:
    """An extent that is known at run time: `count`, as in `counts.load(0)`, and at most
    `bound`, which loads nothing. A count below 0 is one of 0."""
    return UpTo(bound, count)


class Grid(tuple[Symbol, ...]):
    """The coordinate symbols of a grid; `axes` has their extents."""

    axes: tuple[Coordinate, ...]

    def __new__(cls, axes: Sequence[Coordinate]) -> Grid:
        grid = super().__new__(cls, [a.symbol for a in axes])
        grid.axes = tuple(axes)
        return grid


@dataclass(frozen=True)
class Call:
    """A device function over a grid of tasks.

    `order` maps the task index t (0 .. tasks - 1) to a coordinate, a bijection onto the
    grid: the sequence in which the lane takes the tasks. Task t begins no earlier than
    t times `pace` nanoseconds after its worker (0: at once); a field of the call, since
    the lane begins tasks, not the body, and the dims of a run determine the number. The
    first `loops` axes are those of the loops around the call: the tasks of a turn are
    contiguous.

    If an axis has a count, tasks at coordinates from there on are *surplus*: they do
    not exist. The count is known once the first wait is met, or, from an array of the
    caller, at once."""

    name: str
    function: DeviceFunction
    axes: tuple[Coordinate, ...]
    reads: tuple[Region, ...]
    writes: tuple[Region, ...]
    waits: tuple[EventRef, ...]
    notifies: tuple[EventRef, ...]
    order: tuple[Expr, ...]
    pace: Expr
    loops: int = 0
    values: tuple[tuple[str, Expr], ...] = ()
    """Keyword-only parameters of the body -> what they get, in place of the dim or
    number of their name."""
    even: bool = False
    """Whether tasks of equal work come first, then those that write nothing."""
    streams_after: int | None = None
    """The number of waits after which the indices are valid that a task loads, and its
    streamed operands may be loaded; None: all."""

    @property
    def loop_axes(self) -> tuple[Coordinate, ...]:
        """Internal: the axes of the loops around the call, the outermost first."""
        return self.axes[: self.loops]

    @property
    def loop_names(self) -> tuple[str, ...]:
        """Internal: the names of the coordinates of its loops, the outermost first."""
        return tuple(axis.symbol.name for axis in self.loop_axes)

    @property
    def tasks(self) -> Expr:
        """The number of tasks on one rank, surplus ones included."""
        return size_of(self.axes)

    @functools.cached_property
    def limited(self) -> Coordinate | None:
        """Internal: the axis with a count."""
        return next((axis for axis in self.axes if axis.count is not None), None)

    @property
    def count(self) -> Load | None:
        """Internal: the loaded count of the limited axis."""
        return None if self.limited is None else self.limited.count

    @property
    def waits_for_count(self) -> bool:
        """Internal: whether tasks know the count once their first wait is met: it is
        alike for all tasks of a turn, and loads nothing."""
        if self.limited is None:
            return False
        first, axis_names = (
            self.waits[:1],
            {a.symbol.name for a in self.axes[self.loops :]},
        )
        names = {s.name for ref in first for part in ref.parts for s in part.symbols}
        return bool(first) and first[0] in self.free_waits and not names & axis_names

    @property
    def knows_count(self) -> bool:
        """Internal: whether tasks know the count: after their first wait, or at
        once."""
        is_given = self.count is not None and self.count.is_given
        return self.waits_for_count or is_given

    @property
    def block(self) -> tuple[Expr, Expr]:
        """Internal: tasks of one coordinate of the limited axis, and of all: surplus
        tasks are the last ones of each block of so many."""
        after = self.axes[[axis.count is not None for axis in self.axes].index(True) :]
        return size_of(after[1:]), size_of(after)

    @functools.cached_property
    def free_waits(self) -> tuple[EventRef, ...]:
        """Internal: the waits without loads: a task waits for these first."""
        return tuple(w for w in self.waits if not (w.is_loaded or w.expects.is_loaded))

    @functools.cached_property
    def loaded_waits(self) -> tuple[EventRef, ...]:
        """Internal: the waits whose element or expected count is loaded; the loads are
        valid once all of `free_waits` are met."""
        return tuple(w for w in self.waits if w.is_loaded or w.expects.is_loaded)

    @functools.cached_property
    def known_after(self) -> tuple[EventRef, ...]:
        """Internal: the wait after which tasks know the count, if there is one."""
        return self.waits[:1] if self.waits_for_count else ()

    @functools.cached_property
    def limited_notifies(self) -> tuple[EventRef, ...]:
        """Internal: the notifications of elements whose expected count is loaded."""
        return tuple(
            ref
            for ref in self.notifies
            if any(count.is_loaded for count in notifier_counts(ref))
        )

    @functools.cached_property
    def is_loaded(self) -> bool:
        """Internal: whether waits, accesses or notifications of a task depend on
        loads."""
        return bool(waiting_loads(self) or working_loads(self))

    def keywords(self, env: Mapping[str, Any]) -> dict[str, Any]:
        """Internal: the values of the body's keyword-only parameters, without
        defaults."""
        values = {name: int(value.evaluate(env)) for name, value in self.values}
        regions = (*self.reads, *self.writes)
        for name, (operand, axis) in self.function.starts.items():
            values[name] = int(regions[operand].start[axis].evaluate(env))
        value_by_name = {**env, **values}
        return {
            n: value_by_name[n] for n in self.function.keywords if n in value_by_name
        }

    def coordinates(self, t: Any, env: dict[str, Any]) -> dict[str, Any]:
        """Internal: coordinate name -> value of task `t` (an int or an array of
        them)."""
        inner = {**env, TASK.name: t}
        return {
            axis.symbol.name: part.evaluate(inner)
            for axis, part in zip(self.axes, self.order, strict=True)
        }

    def label(self, coordinate: Sequence[int]) -> str:
        """Internal: a task as text, for errors: its call and coordinate, with names of
        loops."""
        return task_label(self.name, self.loop_names, coordinate)

    def show(self) -> str:
        """The call as text, a line for each kind of argument."""
        axes = ", ".join(map(str, self.axes))
        lines = [f"call {self.name}: {self.function.name} [{axes}]"]
        lines.append(f"  lane {self.function.lane}")
        if self.loops:
            lines.append(f"  in loops {', '.join(self.loop_names)}")
        lines.append(f"  order t -> ({', '.join(map(str, self.order))})")
        lines += [f"  {name} = {value}" for name, value in self.values]
        if self.pace != Const(0):
            lines.append(f"  pace {self.pace} ns")
        if self.even:
            lines.append("  even")
        if self.streams_after is not None:
            lines.append(f"  streams after {self.streams_after} of its waits")
        if self.function.loads_before_wait:
            lines.append("  loads before its last wait")
        for n, region in enumerate(self.reads):
            verb = "gathers from" if n in self.function.gathers else "reads"
            verb += " early" * (n in self.function.reads_before_wait)
            lines.append(f"  {verb} {region}")
        for word, items in (
            ("writes", self.writes),
            ("waits", self.waits),
            ("notifies", self.notifies),
        ):
            lines += [f"  {word} {item}" for item in items]
        return "\n".join(lines)


def task_label(call: str, loops: Sequence[str], coordinate: Sequence[int]) -> str:
    """A task as text; its first coordinates are those of `loops`."""
    names = [*(f"{name}=" for name in loops), *[""] * (len(coordinate) - len(loops))]
    parts = (f"{name}{n}" for name, n in zip(names, coordinate, strict=True))
    return f"{call}[{', '.join(parts)}]"


def size_of(axes: Sequence[Coordinate]) -> Expr:
    """The number of coordinates on `axes`."""
    count: Expr = Const(1)
    for axis in axes:
        count = count * axis.extent
    return count


def row_major(axes: Sequence[Coordinate], index: Expr) -> tuple[Expr, ...]:
    """The coordinates on `axes` at a row-major index."""
    parts: list[Expr] = []
    for axis in reversed(axes[1:]):
        parts.append(index % axis.extent)
        index = index // axis.extent
    return (index, *reversed(parts)) if axes else ()


def waiting_loads(call: Call) -> tuple[Load, ...]:
    """The loads that determine a task's loaded waits, valid after `free_waits`, and
    whether there is a task, valid after the first wait."""
    return loads_of(waiting_exprs(call))


def working_loads(call: Call) -> tuple[Load, ...]:
    """The loads of a task's accesses and notifications; valid after all its waits."""
    return loads_of(working_exprs(call))


def waiting_exprs(call: Call) -> Iterator[Expr]:
    """The expressions of a task's loaded waits, and the count of its grid."""
    if call.count is not None:
        yield call.count
    for wait in call.loaded_waits:
        yield from (*wait.parts, wait.expects)


def working_exprs(call: Call) -> Iterator[Expr]:
    """The expressions of a task's accesses and notifications."""
    for region in (*call.reads, *call.writes):
        yield from region.parts
    for ref in call.notifies:
        yield from (*ref.parts, *notifier_counts(ref))
