"""The errors of a simulation: what was found, between whom, and at which element."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from etc_dist.errors import EtcDistError, GraphError, RaceError
from etc_dist.ir.graph import GraphFunction
from etc_dist.runtime.cpu.arrays import Array, shape_of
from etc_dist.runtime.cpu.task import Access, Element, Resolver, Task, place


def told(task: Task) -> str:
    """The task, and whom it tells that it is done."""
    events = ", ".join(map(str, task.notifies)) or "no event"
    return f"{task.where}, which notifies {events}"


def element(access: Access, mask: Array) -> tuple[int, ...]:
    """Coordinates in the tensor of the first True of `mask`, a mask of the region."""
    inside = iter(np.argwhere(np.asarray(mask))[0])
    return tuple(
        part.start + int(next(inside)) if isinstance(part, slice) else part
        for part in access.index
    )


def race(
    task: Task,
    verb: str,
    other: Task,
    other_verb: str,
    access: Access,
    at: tuple[int, ...],
) -> RaceError:
    """`task` does `verb` to an element that `other` touches, and nothing orders it."""
    waits = ", ".join(str(e) for e, _ in task.waits or ()) or "nothing"
    again = "" if other.epoch == task.epoch else f" (epoch {other.epoch})"
    return RaceError(
        f"two tasks touch {_name(access, at)} in no order",
        where=f"{task.where} {verb} it (epoch {task.epoch}), having waited for {waits}",
        wanted=f"a wait for what follows {told(other)}",
        got=f"{other.where} {other_verb} it{again}, with no event in between",
        fix="let one task notify an event that the other waits for",
    )


def own_load(task: Task, access: Access, loaded: Access) -> RaceError:
    at = tuple(int(i) for i in loaded.index if not isinstance(i, slice))
    return RaceError(
        f"{_name(access, at)} is written by the task whose maps load it",
        where=task.where,
        wanted="maps that mean the same before and after the body",
        got="a body that writes what they load",
        fix="write to another tensor, or let another task write",
    )


def second_write(task: Task, access: Access, mask: Array) -> GraphError:
    return GraphError(
        f"{_name(access, element(access, mask))} is written twice",
        where=task.where,
        wanted="one write to each output element in an epoch",
        got="a second one",
        fix="make the write regions of the tasks disjoint",
    )


def never_written(task: Task, access: Access, at: tuple[int, ...]) -> GraphError:
    return GraphError(
        f"{_name(access, at)} is read, and no task writes it",
        where=task.where,
        wanted="reads of inputs and of what tasks wrote in the same epoch",
        got="an element that nothing fills",
        fix="correct the region that is read, or write the rest of the tensor",
    )


def read_early(
    task: Task, reader: Task, access: Access, at: tuple[int, ...]
) -> GraphError:
    return GraphError(
        f"{_name(access, at)} is read before {task.label} writes it",
        where=f"{reader.where} (epoch {reader.epoch})",
        wanted="reads of what is written before",
        got=f"{task.where}, after it, is the first to write it",
        fix="let the reader wait for the writer",
    )


def unwritten_output(
    graph: GraphFunction, rank: int, name: str, missing: Array
) -> GraphError:
    first = ", ".join(map(str, np.argwhere(missing)[0]))
    return GraphError(
        f"output {name} is not complete",
        where=f"graph {graph.name}, rank {rank}: {name}[{first}] is the first",
        wanted=f"all {missing.size} elements written",
        got=f"{int(missing.sum())} were not",
        fix="let the grid and the bodies of the writing calls cover the tensor",
    )


def too_many(task: Task, element: Element, count: int, expected: int) -> GraphError:
    return GraphError(
        f"{element} is notified more often than expected",
        where=task.where,
        wanted=f"{expected} notifications in an epoch",
        got=f"{count}, the last by this task",
        fix="correct `expects` of the event tensor or the notifying coordinate map",
    )


def unawaited(what: str, rank: int, epoch: int) -> GraphError:
    return GraphError(
        f"rank {rank} may end an epoch while a peer still enters it",
        where=f"epoch {epoch}: {what}",
        wanted=f"a task of rank {rank} that waits for an event notified by this one",
        got="nothing there that waits for it",
        fix="wait for what peers do to a rank before its epoch ends",
    )


def writer_of(
    graph: GraphFunction,
    envs: Sequence[Mapping[str, Any]],
    access: Access,
    at: tuple[int, ...],
    epoch: int,
) -> Task | None:
    """A task, of any rank, that writes element `at` of what `access` touches.

    Walks all tasks: for the words of an error only. Left out are tasks whose regions
    are not known yet.
    """
    for rank, env in enumerate(envs):
        shapes = {events.name: shape_of(events, env) for events in graph.events}
        resolver = Resolver(rank, graph.world_size, shapes)
        for call in graph.calls:
            if all(r.tensor.name != access.tensor.name for r in call.writes):
                continue
            for t in range(int(call.tasks.evaluate(env))):
                lane = call.function.lane
                tile = place(call, t, env)
                task = Task(rank, -1, lane, call, t, epoch, (0,), tile)
                try:
                    told = (resolver.element(r, task) for r in call.notifies)
                    task.notifies = tuple(told)
                    writes = [resolver.access(region, task) for region in call.writes]
                except EtcDistError:
                    continue
                if any(_covers(write, access, at) for write in writes):
                    return task
    return None


def overlap(write: Access, load: Access) -> bool:
    """Whether `write` covers the one element of `load`."""
    at = tuple(int(i) for i in load.index if not isinstance(i, slice))
    return _covers(write, load, at)


def _covers(write: Access, access: Access, at: tuple[int, ...]) -> bool:
    if (write.tensor.name, write.rank) != (access.tensor.name, access.rank):
        return False
    return all(
        part.start <= i < part.stop if isinstance(part, slice) else part == i
        for part, i in zip(write.index, at, strict=True)
    )


def _name(access: Access, at: tuple[int, ...]) -> str:
    where = ", ".join(map(str, at))
    return f"{access.tensor.name}[{where}] of rank {access.rank}"
