"""One task that a worker runs: its tile, waits, accesses and notifications."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, TypeVar

import numpy as np

from etc_dist.errors import EtcDistError, GraphError, RangeRecord, WaitRecord
from etc_dist.ir.call import Call
from etc_dist.ir.event import EventRef, EventTensor
from etc_dist.ir.expr import ZERO, Expr
from etc_dist.ir.graph import GraphFunction
from etc_dist.ir.loads import INT32, overflowing
from etc_dist.ir.tensor import Region, Tensor
from etc_dist.runtime.cpu.storage import shape_of
from etc_dist.runtime.device_faults import out_of_range

T = TypeVar("T", EventRef, Region)
R = TypeVar("R")
ALL = "all"
"""What a block has found for whole tasks."""
Values = Callable[..., list[int]]
"""(expression, its part of a reference as text): its values in the tasks of a block."""
Resolve = Callable[[T, "Task", Values], Sequence[R | None]]
"""(reference, task, values): what it names in the tasks of a block; None: nothing."""


# NOTE: not frozen: creating one would take twice as long.
@dataclass(slots=True, unsafe_hash=True)
class Element:
    """An element of an event tensor on a rank."""

    name: str
    rank: int
    index: tuple[int, ...]

    @property
    def label(self) -> str:
        """Its name and index, as text."""
        return f"{self.name}[{', '.join(map(str, self.index))}]"

    def __str__(self) -> str:
        return f"{self.label} of rank {self.rank}"


@dataclass(slots=True)
class ArrayAccess:
    """A region of a tensor in a rank's memory, as a NumPy index."""

    tensor: Tensor
    rank: int
    index: tuple[slice | int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the region."""
        return tuple(i.stop - i.start for i in self.index if isinstance(i, slice))

    @property
    def empty(self) -> bool:
        """Whether it has no elements."""
        return any(isinstance(i, slice) and i.stop <= i.start for i in self.index)

    @property
    def nbytes(self) -> int:
        """Of the region."""
        return prod(self.shape) * self.tensor.itemsize


@dataclass(frozen=True, slots=True)
class UnmetWait:
    """A wait of a task, with the current and the expected count. `element` is None for
    the handshake: rank `peer` must have started the epoch."""

    element: Element | None
    peer: int
    have: int
    want: int

    @property
    def label(self) -> str:
        """The event, as text."""
        return self.element.label if self.element else f"the start of rank {self.peer}"


class TaskBlock:
    """`count` tasks of `call`, from `first` on, which are resolved together.
    cached_values: the results for all of them, by the id of a reference and the
    function that resolves it; [] where each task is resolved alone."""

    def __init__(self, call: Call, first: int, count: int, env: dict[str, Any]):
        self.first, self.count, self._own_env = first, count, env
        tasks: Any = np.arange(first, first + count) if count > 1 else first
        tiles = call.coordinates(tasks, env)
        self._env = {**env, **tiles}
        columns = zip(*map(self._spread, tiles.values()), strict=True)
        self._tiles = [dict(zip(tiles, tile, strict=True)) for tile in columns] or [{}]
        self.cached_values: dict[Hashable, Sequence[Any]] = {}

    def tile_of(self, t: int) -> dict[str, int]:
        """The coordinate of task `t`, by name."""
        return self._tiles[t - self.first]

    def env_of(self, t: int) -> dict[str, Any]:
        """The environment with the coordinate of task `t`."""
        return {**self._own_env, **self.tile_of(t)}

    def values(self, expr: Expr, of: str = "") -> list[int]:
        """The value of `expr` in each task."""
        return self._spread(expr.evaluate(self._env))

    def _spread(self, value: Any) -> list[int]:
        is_array = isinstance(value, np.ndarray)
        return value.tolist() if is_array else [int(value)] * self.count


@dataclass(eq=False)
class Task:
    """Task `t` of `call`, from the moment a worker takes its unit.

    Index expressions may load results of other tasks. So loaded waits are evaluated
    after all other waits (`knows_waits`), accesses and notifications after all waits
    (`has_begun`). `worker` is -1 in an error about a task that no worker has taken."""

    rank: int
    worker: int
    lane: str
    call: Call
    t: int
    epoch: int
    block: TaskBlock
    waits: Sequence[tuple[Element, int]] | None = None
    knows_waits: bool = False
    has_begun: bool = False
    reads: Sequence[ArrayAccess] = ()
    writes: Sequence[ArrayAccess] = ()
    notifies: Sequence[Element] = ()
    most: Mapping[Element, int] = field(default_factory=dict)
    """The expected count of each element where that count is loaded."""
    unmet: UnmetWait | None = field(default=None, repr=False)

    @cached_property
    def env(self) -> dict[str, Any]:
        """The values of all symbols, and the arrays that expressions load from."""
        return self.block.env_of(self.t)

    @property
    def coordinate(self) -> tuple[int, ...]:
        """The tile of the call."""
        return tuple(self.block.tile_of(self.t).values())

    @property
    def label(self) -> str:
        """The call and the tile, as text."""
        return self.call.label(self.coordinate)

    @property
    def where(self) -> str:
        """The task and the worker that runs it, for errors."""
        return f"rank {self.rank}, worker {self.worker}, {self.lane} lane: {self.label}"

    @property
    def idle(self) -> bool:
        """Whether all its writes are empty: then it only waits and notifies."""
        return bool(self.writes) and all(access.empty for access in self.writes)

    @cached_property
    def peers(self) -> set[int]:
        """Other ranks whose memory this task writes or whose events it notifies."""
        ranks = {access.rank for access in self.writes}
        ranks |= {element.rank for element in self.notifies}
        return ranks - {self.rank}

    def record(self) -> WaitRecord | None:
        """The unmet wait of this task, for an error."""
        if self.unmet is None:
            return None
        have, want = self.unmet.have, self.unmet.want
        return WaitRecord(
            self.rank, self.worker, self.lane, self.label, self.unmet.label, have, want
        )


class Resolver:
    """Evaluates the symbolic references of a rank's tasks."""

    def __init__(self, rank: int, graph: GraphFunction, env: Mapping[str, Any]):
        self._rank, self._world_size = rank, graph.world_size
        size = graph.local_size
        self._near = range(rank - rank % size, rank - rank % size + size)
        shaped: list[EventTensor | Tensor] = [*graph.events, *graph.tensors]
        self._shapes = {item.name: shape_of(item, env) for item in shaped}

    def waits(
        self, refs: Sequence[EventRef], task: Task
    ) -> Sequence[tuple[Element, int]]:
        """The elements that the task waits for, with the notifications that each needs.
        If one is out of range: ArgumentError for a loaded index, else GraphError."""
        return self._resolve(refs, task, self._waits)

    def elements(self, refs: Sequence[EventRef], task: Task) -> Sequence[Element]:
        """The elements of `refs` that the task notifies; errors as for `waits`."""
        return self._resolve(refs, task, self._elements)

    def accesses(self, regions: Sequence[Region], task: Task) -> Sequence[ArrayAccess]:
        """The regions, clipped at the tensor's edge; errors as for `waits`.
        NOTE: only a start without loads may be beyond the edge."""
        return self._resolve(regions, task, self._accesses)

    def complete(self, task: Task) -> None:
        """Fill in a task of a call without loads, unless a reference is faulty in some
        task of its block."""
        call, block = task.call, task.block
        if ALL not in block.cached_values:
            parts = [
                self._rows_of(call.free_waits, task, self._waits),
                self._rows_of(call.reads, task, self._accesses),
                self._rows_of(call.writes, task, self._accesses),
                self._rows_of(call.notifies, task, self._elements),
            ]
            block.cached_values[ALL] = [*zip(*parts, strict=all(parts))]
        if rows := block.cached_values[ALL]:
            parts = rows[task.t - block.first]
            task.waits, task.reads, task.writes, task.notifies = parts
            task.knows_waits = task.has_begun = True

    def _resolve(
        self, refs: Sequence[T], task: Task, resolve: Resolve[T, R]
    ) -> Sequence[R]:
        """What `resolve` finds for `refs` of the call: with the block, or in the task
        alone."""
        at = task.t - task.block.first
        results: list[R | None] = []
        for ref in refs:
            column = self._together(ref, task, resolve)
            results += [column[at]] if column else resolve(ref, task, _alone(ref, task))
        return [result for result in results if result is not None]

    def _rows_of(
        self, refs: Sequence[T], task: Task, resolve: Resolve[T, R]
    ) -> Sequence[tuple[R, ...]]:
        """What `resolve` finds for all of `refs` in each task of a block; [] if any of
        them is faulty in some task."""
        columns = [self._together(ref, task, resolve) for ref in refs]
        return _rows(columns, task.block.count) if all(columns) else []

    def _together(
        self, ref: T, task: Task, resolve: Resolve[T, R]
    ) -> Sequence[R | None]:
        """What `resolve` finds in each task of a block; [] if `ref` depends on loads,
        or is faulty in some task."""
        columns, key = task.block.cached_values, (id(ref), resolve.__name__)
        column = columns.get(key)
        if column is None:
            column = []
            if not _depends_on_loads(ref):
                # A division by zero raises.
                with suppress(ArithmeticError, GraphError), np.errstate(divide="raise"):
                    column = resolve(ref, task, task.block.values)
            columns[key] = column
        return column

    def _waits(
        self, ref: EventRef, task: Task, values: Values
    ) -> Sequence[tuple[Element, int] | None]:
        elements = self._elements(ref, task, values)
        counts = [0] * len(elements)
        if any(elements):
            counts = values(ref.expects, "the expected count of ")
        pairs = zip(elements, counts, strict=True)
        return [(element, want) if element else None for element, want in pairs]

    def _elements(
        self, ref: EventRef, task: Task, values: Values
    ) -> Sequence[Element | None]:
        holds = values(ref.holds, "the condition of ")
        if not any(holds):
            return [None] * len(holds)
        rank, shape = ref.rank, self._shapes[ref.events.name]
        columns = [values(ref.guarded(part)) for part in ref.index]
        for column, extent in zip(columns, shape, strict=True):
            if min(column) < 0 or max(column) >= extent:
                wanted = f"an index within {list(shape)}"
                index = tuple(column[0] for column in columns)
                raise _outside(task, ref, wanted, index, ref.is_loaded)
        rank = None if rank is None else ref.guarded(rank)
        ranks = self._ranks(rank, task, ref, values)
        places = _rows(columns, len(holds))
        return [
            Element(ref.events.name, rank, place) if does_hold else None
            for does_hold, rank, place in zip(holds, ranks, places, strict=True)
        ]

    def _accesses(
        self, region: Region, task: Task, values: Values
    ) -> Sequence[ArrayAccess]:
        axes: list[Sequence[Any]] = []
        shape = self._shapes[region.tensor.name]
        for start, size, end, is_kept in zip(
            region.start, region.size, shape, region.kept_axes, strict=True
        ):
            lows, is_loaded = values(start), start.is_loaded
            most = end - (not is_kept)
            if min(lows) < 0 or (max(lows) > most and (is_loaded or not is_kept)):
                wanted = f"a start of 0 .. {most}"
                raise _outside(task, region, wanted, (lows[0],), is_loaded)
            pairs = [*zip(lows, values(size), strict=True)]
            clipped = {pair: _clipped(*pair, end) for pair in {*pairs}}
            axes.append([clipped[pair] for pair in pairs] if is_kept else lows)
        ranks = self._ranks(region.rank, task, region, values)
        places = zip(ranks, _rows(axes, len(ranks)), strict=True)
        return [ArrayAccess(region.tensor, rank, place) for rank, place in places]

    def _ranks(
        self, rank: Expr | None, task: Task, what: EventRef | Region, values: Values
    ) -> Sequence[int]:
        if rank is None:
            return [self._rank] * len(values(ZERO))
        numbers, far, num_near = values(rank), task.call.function.far, len(self._near)
        for number in {*numbers}:
            if not 0 <= number < self._world_size:
                wanted = f"a rank of 0 .. {self._world_size - 1}"
            elif number in self._near or (
                far and (number - self._rank) % num_near == 0
            ):
                continue
            else:
                wanted = f"a rank of this host, {self._near[0]} .. {self._near[-1]}"
                wanted += ", or a partner" * far
            raise _outside(task, what, wanted, (number,), rank.is_loaded)
        return numbers


def _depends_on_loads(ref: EventRef | Region) -> bool:
    """Whether loads select the element or region, or count its notifications."""
    return ref.is_loaded or (isinstance(ref, EventRef) and ref.expects.is_loaded)


def _rows(columns: Sequence[Sequence[R | None]], count: int) -> list[tuple[R, ...]]:
    """The `count` rows of `columns`, without the elements that are None."""
    if not columns:
        return [()] * count
    rows: Iterable[tuple[Any, ...]] = zip(*columns, strict=True)
    if all(map(all, columns)):  # none is None
        return [*rows]
    return [tuple(part for part in row if part is not None) for row in rows]


def _alone(what: EventRef | Region, task: Task) -> Values:
    return lambda expr, of="": [_value(expr, task, what, of)]


def _clipped(low: int, size: int, end: int) -> slice:
    low = min(low, end)
    return slice(low, max(low, min(low + size, end)))


def _value(expr: Expr, task: Task, what: EventRef | Region, of: str = "") -> int:
    """The value of `expr` in `what`; ArgumentError for a load out of range, and for
    arithmetic on loaded numbers that exceeds the 32 bits that it has on GPUs."""
    if not expr.is_loaded:
        return int(expr.evaluate(task.env))
    try:
        for part in overflowing(expr, task.env):
            value = int(part.evaluate(task.env))
            if not INT32[0] <= value <= INT32[1]:
                wanted = f"index arithmetic within 32 bits, in {of}{what}"
                raise range_error(task, wanted, f"{part} = {value}")
        return int(expr.evaluate(task.env))
    except (IndexError, ZeroDivisionError) as error:
        raise range_error(task, f"loads in range, in {of}{what}", str(error)) from error


def range_error(task: Task, wanted: str, got: str) -> EtcDistError:
    """The error for a task whose data does not fit its graph."""
    return out_of_range(
        [
            RangeRecord(
                task.rank, task.worker, task.lane, task.label, wanted=wanted, got=got
            )
        ]
    )


def _outside(
    task: Task,
    what: EventRef | Region,
    wanted: str,
    indices: tuple[int, ...],
    is_loaded: bool,
) -> EtcDistError:
    numbers = ", ".join(map(str, indices))
    if is_loaded:
        return range_error(task, f"{wanted}, in {what}", numbers)
    return GraphError(
        f"an index of call {task.call.name} is out of range",
        where=f"{task.where}: {what}",
        wanted=wanted,
        got=numbers,
        fix="correct the index expression of this region or event in g.call()",
    )
