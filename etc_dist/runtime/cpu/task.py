"""One task in an agent's hands: its tile, and what it waits for, touches, notifies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from etc_dist.errors import GraphError, WaitRecord
from etc_dist.ir.event import EventRef
from etc_dist.ir.graph import Call
from etc_dist.ir.tensor import Region, Tensor


@dataclass(frozen=True)
class Element:
    """An element of an event tensor on a rank."""

    name: str
    rank: int
    index: tuple[int, ...]

    @property
    def label(self) -> str:
        return f"{self.name}[{', '.join(map(str, self.index))}]"

    def __str__(self) -> str:
        return f"{self.label} of rank {self.rank}"


@dataclass(frozen=True)
class Access:
    """A region of a tensor in a rank's memory, as a NumPy index."""

    tensor: Tensor
    rank: int
    index: tuple[slice | int, ...]


@dataclass(frozen=True)
class Need:
    """What a task waits for, how far it has come, and how far it must come.

    `element` is None for the handshake: rank `peer` must have started the epoch.
    """

    element: Element | None
    peer: int
    have: int
    want: int

    @property
    def label(self) -> str:
        return self.element.label if self.element else f"the start of rank {self.peer}"


@dataclass(eq=False)
class Task:
    """Task `t` of `call`, held by an agent from the moment it is drawn.

    `components` are the positions in the rank's vector clocks of the workers that run
    it: more than one where they run it together. What the task waits for is known once
    drawn, what it touches only once its waits are met: index expressions may load what
    other tasks wrote. `worker` is -1 in an error about a task that none has drawn yet.
    """

    rank: int
    worker: int
    lane: str
    call: Call
    t: int
    epoch: int
    components: tuple[int, ...]
    env: dict[str, Any]
    waits: tuple[tuple[Element, int], ...] | None = None
    begun: bool = False
    reads: tuple[Access, ...] = ()
    writes: tuple[Access, ...] = ()
    notifies: tuple[Element, ...] = ()
    need: Need | None = field(default=None, repr=False)

    @property
    def coordinate(self) -> tuple[int, ...]:
        return tuple(int(self.env[axis.symbol.name]) for axis in self.call.axes)

    @property
    def label(self) -> str:
        return f"{self.call.name}[{', '.join(map(str, self.coordinate))}]"

    @property
    def where(self) -> str:
        agent = f"worker {self.worker}, {self.lane} lane"
        if self.worker < 0:
            agent = "not run yet"
        return f"rank {self.rank}, {agent}: {self.label}"

    @property
    def peers(self) -> set[int]:
        """Other ranks whose memory this task writes or whose events it notifies."""
        ranks = {access.rank for access in self.writes}
        ranks |= {element.rank for element in self.notifies}
        return ranks - {self.rank}

    def record(self) -> WaitRecord | None:
        """The wait that this task is in, for an error."""
        if self.need is None:
            return None
        have, want = self.need.have, self.need.want
        return WaitRecord(
            self.rank, self.worker, self.lane, self.label, self.need.label, have, want
        )


def place(call: Call, t: int, env: Mapping[str, Any]) -> dict[str, Any]:
    """`env` with the coordinate of task `t`."""
    tile = call.coordinates(t, dict(env))
    return {**env, **{name: int(value) for name, value in tile.items()}}


class Resolver:
    """Turns the symbolic references of a rank's tasks into elements and accesses."""

    def __init__(self, rank: int, world_size: int, shapes: Mapping[str, Any]):
        self._rank, self._world_size = rank, world_size
        self._shapes = shapes

    def element(self, ref: EventRef, task: Task) -> Element:
        """The element that `ref` names; GraphError where there is none."""
        rank = self._on(ref.rank, task, str(ref))
        index = tuple(int(part.evaluate(task.env)) for part in ref.index)
        shape = self._shapes[ref.events.name]
        if any(not 0 <= i < n for i, n in zip(index, shape, strict=True)):
            raise _outside(task, str(ref), f"an index within {list(shape)}", index)
        return Element(ref.events.name, rank, index)

    def access(self, region: Region, task: Task) -> Access:
        """The part of memory that `region` names, cut off at the tensor's edge."""
        rank = self._on(region.rank, task, str(region))
        index: list[slice | int] = []
        bounds = region.bounds(task.env)
        for kept, (low, high) in zip(region.kept, bounds, strict=True):
            low, high = int(low), int(high)
            if low < 0 or (not kept and high <= low):
                starts = [start for start, _ in bounds]
                raise _outside(task, str(region), "a region of the tensor", starts)
            index.append(slice(low, max(low, high)) if kept else low)
        return Access(region.tensor, rank, tuple(index))

    def _on(self, rank: Any, task: Task, what: str) -> int:
        if rank is None:
            return self._rank
        number = int(rank.evaluate(task.env))
        if not 0 <= number < self._world_size:
            wanted = f"a rank of 0 .. {self._world_size - 1}"
            raise _outside(task, what, wanted, (number,))
        return number


def _outside(task: Task, what: str, wanted: str, got: Any) -> GraphError:
    return GraphError(
        f"call {task.call.name} refers to what is not there",
        where=f"{task.where}: {what}",
        wanted=wanted,
        got=", ".join(str(int(n)) for n in got),
        fix="correct the coordinate map of this reference",
    )
