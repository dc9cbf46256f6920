"""Vector clocks: what is ordered, and which accesses of a simulation nothing orders.

Each worker of each agent has a component; a task advances its own by one, and carries
the clock of all that happened before it. Order comes from four things alone: one task
after the other in an agent, a wait after the notifications it waited for, entering a
peer after that peer started the epoch, and an epoch of a rank after the one before.
Tickets order nothing. (On the GPU, the loads of a cluster's next task run ahead of the
end of the last one: only the verifier knows that.) An access is safe if the clock of
its task has seen the task that touched the element last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from etc_dist.ir.graph import GraphFunction
from etc_dist.ir.tensor import Tensor
from etc_dist.runtime.cpu import findings
from etc_dist.runtime.cpu.arrays import Array, shape_of, still_poisoned
from etc_dist.runtime.cpu.task import Access, Element, Task
from etc_dist.runtime.cpu.team import Observer


class Shadow:
    """Who touched each element of a rank's tensor last, as (component, tick).

    Only the rank itself reads its tensors, so readers are its own components.
    """

    def __init__(self, shape: tuple[int, ...], readers: int):
        self.writer = np.zeros(shape, np.int32)
        self.written_at = np.zeros(shape, np.int32)
        self.read_at = np.zeros((readers, *shape), np.int32)
        self.written = np.zeros(shape, np.bool_)
        """In the rank's present epoch."""


class RaceChecker(Observer):
    """Follows every task of all ranks; raises at the first access nothing orders.

    Also found: reads of what no task wrote, or wrote only later, second writes of an
    output element, outputs left unwritten, more notifications than expected, and a peer
    entered that need not be there any more. Of an operand that a body gathers from,
    elements may be read that no task writes.
    """

    def __init__(
        self, graph: GraphFunction, envs: Sequence[Mapping[str, Any]], components: int
    ):
        self._graph, self._envs, self._per_rank = graph, envs, components
        total = graph.world_size * components
        self._clocks = np.zeros((total, total), np.int32)
        self._started: dict[tuple[int, int], Array] = {}
        self._epochs = [0] * graph.world_size
        self._ended = [0] * graph.world_size
        self._counts: dict[Element, int] = {}
        self._seen: dict[Element, Array] = {}
        self._tasks: dict[tuple[int, int], Task] = {}
        self._entered: list[dict[int, tuple[int, str]]] = [{} for _ in envs]
        self._events = {events.name: events for events in graph.events}
        self._loading: Task | None = None
        self._loaded: dict[Task, list[Access]] = {}
        self._wanted: dict[Element, int] = {}
        self._shadows = {
            (rank, tensor.name): Shadow(shape_of(tensor, env), components)
            for rank, env in enumerate(envs)
            for tensor in _watched(graph)
        }

    # ------------------------------------------------------------- epochs of a rank

    def start(self, rank: int) -> None:
        """`rank` starts its next epoch: after all it did, and with nothing written."""
        self._epochs[rank] += 1
        rows = self._rows(rank)
        rows[:] = rows.max(axis=0)
        self._started[rank, self._epochs[rank]] = rows[0].copy()
        self._entered[rank] = {}
        for element in [e for e in self._counts if e.rank == rank]:
            del self._counts[element], self._seen[element]
        for element in [e for e in self._wanted if e.rank == rank]:
            del self._wanted[element]
        for tensor in _watched(self._graph):
            shadow = self._shadows[rank, tensor.name]
            shadow.written[:] = tensor.kind == "input"

    def finish(self, rank: int, outputs: Mapping[str, Array]) -> None:
        """`rank` ended its epoch: no peer may still be on its way to it, and every
        output element must be there."""
        end = self._rows(rank).max(axis=0)
        self._ended[rank] = self._epochs[rank]
        for component, (tick, what) in self._entered[rank].items():
            if end[component] < tick:
                raise findings.unawaited(what, rank, self._epochs[rank])
        for name, array in outputs.items():
            missing = ~self._shadows[rank, name].written
            if array.dtype.kind != "i":
                missing |= still_poisoned(array)
            if missing.any():
                raise findings.unwritten_output(self._graph, rank, name, missing)

    # ------------------------------------------------------------- a task's moments

    def wait(self, task: Task) -> None:
        self._loading = task
        self._keep(task, self._after_waits(task))

    def begin(self, task: Task) -> None:
        self._loading = task
        clock = self._after_waits(task)
        for element, wanted in task.waits or ():
            self._wanted[element] = wanted
            self._check_count(task, element)
        own = self._component(task)
        clock[own] += 1
        self._tasks[own, int(clock[own])] = task
        self._keep(task, clock)

    def enter(self, task: Task) -> None:
        self._loading = None
        clock = self._clock(task)
        for peer in task.peers:
            if self._ended[peer] >= task.epoch:
                raise findings.unawaited(task.where, peer, task.epoch)
            # A peer entered before it started orders nothing, and so becomes a race.
            started = self._started.get((peer, task.epoch), clock)
            np.maximum(clock, started, out=clock)
            own = self._component(task)
            self._entered[peer][own] = int(clock[own]), findings.told(task)
        self._keep(task, clock)
        loaded = self._loaded.pop(task, [])
        if task.idle:
            return
        for n, access in enumerate(task.reads):
            self._read(task, clock, access, "reads", n in task.call.function.gathers)
        for access in task.writes:
            self._write(task, clock, access)
            for other in loaded:
                if findings.overlap(access, other):
                    raise findings.own_load(task, access, other)

    def notify(self, task: Task, element: Element) -> None:
        clock = self._clock(task)
        self._counts[element] = self._counts.get(element, 0) + 1
        events = self._events[element.name]
        if not events.expects.is_loaded:
            env = dict(self._envs[element.rank])
            self._wanted[element] = int(events.expected(element.index, env))
        self._check_count(task, element)
        seen = self._seen.get(element)
        self._seen[element] = clock if seen is None else np.maximum(seen, clock)

    def _after_waits(self, task: Task) -> Array:
        """The clock of `task` after what it has waited for so far."""
        clock = self._clock(task)
        for element, _ in task.waits or ():
            if element in self._seen:
                np.maximum(clock, self._seen[element], out=clock)
        return clock

    def _check_count(self, task: Task, element: Element) -> None:
        """NOTE: a count that is loaded is known only once somebody waits for it."""
        count, wanted = self._counts.get(element, 0), self._wanted.get(element)
        if wanted is not None and count > wanted:
            raise findings.too_many(task, element, count, wanted)

    def loaded(self, tensor: Tensor, index: tuple[Any, ...]) -> None:
        """An expression of the task that is being resolved loads one element."""
        task = self._loading
        if task is not None:
            clock, own = self._clock(task), self._component(task)
            if not task.begun:
                clock[own] += 1
            self._tasks[own, int(clock[own])] = task
            where = tuple(int(i) for i in index)
            access = Access(tensor, task.rank, where)
            self._read(task, clock, access, "loads")
            self._loaded.setdefault(task, []).append(access)

    # --------------------------------------------------------------------- accesses

    def _read(
        self, task: Task, clock: Array, access: Access, verb: str, gathers: bool = False
    ) -> None:
        shadow = self._shadows.get((access.rank, access.tensor.name))
        if shadow is None:
            return
        at = access.index
        own = self._component(task)
        if not (gathers or np.all(shadow.written[at])):
            self._read_too_early(task, access, verb, ~shadow.written[at])
        self._after_writers(task, clock, access, verb, shadow)
        shadow.read_at[(own - task.rank * self._per_rank, *at)] = clock[own]

    def _write(self, task: Task, clock: Array, access: Access) -> None:
        shadow = self._shadows[access.rank, access.tensor.name]
        at = access.index
        self._after_writers(task, clock, access, "writes", shadow)
        first = access.rank * self._per_rank
        reads = shadow.read_at[(slice(None), *at)]
        seen = clock[first : first + self._per_rank]
        late = reads > seen.reshape(-1, *[1] * (reads.ndim - 1))
        if late.any():
            place = np.argwhere(late)[0]
            tick = int(reads[tuple(place)])
            other = self._tasks[first + int(place[0]), tick]
            element = findings.element(access, np.asarray(late.any(axis=0)))
            raise findings.race(task, "writes", other, "reads", access, element)
        self._refuse_early_reads(task, access, reads)
        if access.tensor.kind == "output" and np.any(shadow.written[at]):
            raise findings.second_write(task, access, shadow.written[at])
        own = self._component(task)
        shadow.writer[at] = own
        shadow.written_at[at] = clock[own]
        shadow.written[at] = True

    def _refuse_early_reads(self, task: Task, access: Access, reads: Array) -> None:
        """Refuse the first write of what was gathered from in the same epoch; `reads`,
        when each component read it, is known to be ordered before."""
        began = self._started.get((access.rank, task.epoch))
        if began is None or not reads.any():
            return
        first = access.rank * self._per_rank
        start = began[first : first + self._per_rank]
        early = reads > start.reshape(-1, *[1] * (reads.ndim - 1))
        early &= ~self._shadows[access.rank, access.tensor.name].written[access.index]
        if early.any():
            place = np.argwhere(early)[0]
            reader = self._tasks[first + int(place[0]), int(reads[tuple(place)])]
            element = findings.element(access, np.asarray(early.any(axis=0)))
            raise findings.read_early(task, reader, access, element)

    def _after_writers(
        self, task: Task, clock: Array, access: Access, verb: str, shadow: Shadow
    ) -> None:
        writer, tick = shadow.writer[access.index], shadow.written_at[access.index]
        late = np.asarray(clock[writer] < tick)
        if late.any():
            place = tuple(np.argwhere(late)[0])
            who = int(np.asarray(writer)[place]), int(np.asarray(tick)[place])
            element = findings.element(access, late)
            other = self._tasks[who]
            raise findings.race(task, verb, other, "writes", access, element)

    def _read_too_early(
        self, task: Task, access: Access, verb: str, missing: Array
    ) -> None:
        element = findings.element(access, missing)
        writer = findings.writer_of(
            self._graph, self._envs, access, element, task.epoch
        )
        if writer is not None:
            raise findings.race(task, verb, writer, "writes", access, element)
        raise findings.never_written(task, access, element)

    # ----------------------------------------------------------------------- clocks

    def _component(self, task: Task) -> int:
        return task.rank * self._per_rank + task.components[0]

    def _rows(self, rank: int) -> Array:
        return self._clocks[rank * self._per_rank : (rank + 1) * self._per_rank]

    def _clock(self, task: Task) -> Array:
        """A copy of what the workers of `task` have seen together."""
        rows = self._rows(task.rank)[list(task.components)]
        clock: Array = rows.max(axis=0)
        return clock

    def _keep(self, task: Task, clock: Array) -> None:
        self._rows(task.rank)[list(task.components)] = clock


class WatchedLoads:
    """A runtime tensor as expressions see it: tells the checker of every load."""

    def __init__(self, tensor: Tensor, array: Array, checker: RaceChecker):
        self._tensor, self._array, self._checker = tensor, array, checker

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._array.shape)

    def __getitem__(self, index: tuple[Any, ...]) -> Any:
        self._checker.loaded(self._tensor, index)
        return self._array[index]


def _watched(graph: GraphFunction) -> list[Tensor]:
    """Tensors that tasks write; those that none writes cannot race."""
    names = {region.tensor.name for call in graph.calls for region in call.writes}
    return [
        tensor
        for tensor in graph.tensors
        if tensor.kind != "input" or tensor.name in names
    ]
