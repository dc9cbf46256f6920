"""One task that a worker runs: its tile, waits, accesses and notifications."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from etc_dist.errors import EtcDistError, GraphError, RangeRecord, WaitRecord
from etc_dist.ir.call import Call
from etc_dist.ir.event import EventRef, EventTensor
from etc_dist.ir.expr import Expr
from etc_dist.ir.graph import GraphFunction
from etc_dist.ir.loads import INT32, overflowing
from etc_dist.ir.tensor import Region, Tensor
from etc_dist.runtime.cpu.arrays import shape_of
from etc_dist.runtime.device_faults import out_of_range


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class Access:
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


@dataclass(frozen=True)
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


@dataclass(eq=False)
class Task:
    """Task `t` of `call`, from the moment a worker takes its unit.

    Index expressions may load results of other tasks. So loaded waits are evaluated
    after all other waits (`knows_waits`), accesses and notifications after all waits
    (`begun`). `worker` is -1 in an error about a task that no worker has taken."""

    rank: int
    worker: int
    lane: str
    call: Call
    t: int
    epoch: int
    env: dict[str, Any]
    waits: tuple[tuple[Element, int], ...] | None = None
    knows_waits: bool = False
    begun: bool = False
    reads: tuple[Access, ...] = ()
    writes: tuple[Access, ...] = ()
    notifies: tuple[Element, ...] = ()
    most: Mapping[Element, int] = field(default_factory=dict)
    """The expected count of each element where that count is loaded."""
    unmet: UnmetWait | None = field(default=None, repr=False)

    @property
    def coordinate(self) -> tuple[int, ...]:
        """The tile of the call."""
        return tuple(int(self.env[axis.symbol.name]) for axis in self.call.axes)

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

    @property
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
        row = self.rank, self.worker, self.lane, self.label
        return WaitRecord(*row, self.unmet.label, have, want)


def place(call: Call, t: int, env: dict[str, Any]) -> dict[str, Any]:
    """`env` with the coordinate of task `t`."""
    tile = call.coordinates(t, env)
    return {**env, **{name: int(value) for name, value in tile.items()}}


class Resolver:
    """Evaluates the symbolic references of a rank's tasks."""

    def __init__(self, rank: int, graph: GraphFunction, env: Mapping[str, Any]):
        self._rank, self._world_size = rank, graph.world_size
        size = graph.local_size
        self._near = range(rank - rank % size, rank - rank % size + size)
        shaped: list[EventTensor | Tensor] = [*graph.events, *graph.tensors]
        self._shapes = {each.name: shape_of(each, env) for each in shaped}

    def holds(self, ref: EventRef, task: Task) -> bool:
        """Whether the task waits for `ref`, or notifies it."""
        return _value(ref.holds, task, ref, "the condition of ") != 0

    def element(self, ref: EventRef, task: Task) -> Element:
        """The element `ref`. If it is out of range: ArgumentError for a loaded index,
        else GraphError."""
        rank = self._on(ref.rank, task, ref)
        index = tuple(_value(part, task, ref) for part in ref.index)
        shape = self._shapes[ref.events.name]
        if any(not 0 <= i < n for i, n in zip(index, shape, strict=True)):
            wanted = f"an index within {list(shape)}"
            raise _outside(task, ref, wanted, index, ref.is_loaded)
        return Element(ref.events.name, rank, index)

    def expected(self, ref: EventRef, task: Task) -> int:
        """The notifications that the element needs."""
        return _value(ref.expects, task, ref, "the expected count of ")

    def access(self, region: Region, task: Task) -> Access:
        """The region, clipped at the tensor's edge; errors as for `element`.
        NOTE: only a start without loads may be beyond the edge."""
        rank = self._on(region.rank, task, region)
        index: list[slice | int] = []
        shape = self._shapes[region.tensor.name]
        for start, size, end, kept in zip(
            region.start, region.size, shape, region.kept, strict=True
        ):
            low = _value(start, task, region)
            loaded = start.is_loaded
            if low < 0 or (low > end - (not kept) and (loaded or not kept)):
                wanted = f"a start of 0 .. {end - (not kept)}"
                raise _outside(task, region, wanted, (low,), loaded)
            low = min(low, end)
            high = min(low + _value(size, task, region), end)
            index.append(slice(low, max(low, high)) if kept else low)
        return Access(region.tensor, rank, tuple(index))

    def _on(self, rank: Expr | None, task: Task, what: EventRef | Region) -> int:
        if rank is None:
            return self._rank
        number = _value(rank, task, what)
        if not 0 <= number < self._world_size:
            wanted = f"a rank of 0 .. {self._world_size - 1}"
            raise _outside(task, what, wanted, (number,), rank.is_loaded)
        if number not in self._near:
            far = task.call.function.far
            if not far or (number - self._rank) % len(self._near):
                wanted = f"a rank of this host, {self._near[0]} .. {self._near[-1]}"
                wanted += ", or a partner" * far
                raise _outside(task, what, wanted, (number,), rank.is_loaded)
        return number


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
    row = task.rank, task.worker, task.lane, task.label
    return out_of_range([RangeRecord(*row, wanted, got)])


def _outside(
    task: Task, what: EventRef | Region, wanted: str, got: tuple[int, ...], loaded: bool
) -> EtcDistError:
    numbers = ", ".join(map(str, got))
    if loaded:
        return range_error(task, f"{wanted}, in {what}", numbers)
    return GraphError(
        f"an index of call {task.call.name} is out of range",
        where=f"{task.where}: {what}",
        wanted=wanted,
        got=numbers,
        fix="correct the index expression of this region or event in g.call()",
    )
