"""All ranks in one process: one step of one worker at a time, in a seeded order."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from etc_dist.errors import ArgumentError, DeadlockError, GraphError, WaitRecord
from etc_dist.ir.dims import checked_dims
from etc_dist.runtime.cpu import storage
from etc_dist.runtime.cpu.storage import Array
from etc_dist.runtime.cpu.task import Element, Task
from etc_dist.runtime.cpu.workers import (
    SHOWN,
    LaneWorker,
    Memory,
    Workers,
    make_lane_workers,
)
from etc_dist.runtime.trace import TaskRecord
from etc_dist.schedule.plan import WORKERS, Plan
from etc_dist.verify.verify import verify


@dataclass(frozen=True)
class Simulation:
    """The outputs of the last epoch and the states after it, by rank, and all tasks in
    the order they ran in."""

    outputs: list[dict[str, Array]]
    tasks: list[TaskRecord]


def simulate(
    plan: Plan,
    inputs: Sequence[Mapping[str, Array]],
    dims: Mapping[str, int],
    *,
    seed: int = 0,
    workers: int = 4,
    epochs: int = 1,
    check: bool = True,
) -> Simulation:
    """Run `plan` on `inputs`, by rank and tensor name, `epochs` times, in an order that
    depends on `seed`. There is no barrier between epochs. States are copied.

    Raises ArgumentError for inputs or data that do not fit, and DeadlockError if no
    task can run. With `check` the run is verified with the data that its index
    expressions loaded (see `verify`), and outputs must be complete."""
    graph = plan.graph
    if len(inputs) != graph.world_size:
        raise ArgumentError(
            "a simulation needs the inputs of every rank",
            where=f"graph {graph.name}",
            wanted=f"inputs of {graph.world_size} ranks",
            got=f"inputs of {len(inputs)}",
            fix="pass one mapping from name to array for each rank",
        )
    make_lane_workers(plan, workers)  # refuses workers that do not fit
    dims = checked_dims(graph, dims)
    run = _SimulatedRun(plan, inputs, dims, workers, epochs, seed)
    run.finish()
    arrays = run.memory.arrays
    if check:
        tensors = {t.name: [a[t.name] for a in arrays] for t in graph.loaded_tensors()}
        verify(plan, dims, workers, tensors)
        _check_complete(plan, arrays)
    names = [tensor.name for tensor in (*graph.outputs(), *graph.states())]
    outputs = [{name: by_name[name] for name in names} for by_name in arrays]
    return Simulation(outputs, run.tasks)


class ProcessMemory(Memory):
    """All ranks' arrays and events in this process; implements `Memory`."""

    def __init__(self, plan: Plan, envs: Sequence[Mapping[str, Any]]):
        self._shapes = [
            {events.name: storage.shape_of(events, env) for events in plan.graph.events}
            for env in envs
        ]
        self._counts: list[dict[str, Array]] = [{} for _ in envs]
        self.arrays: list[dict[str, Array]] = [{} for _ in envs]
        self.epochs = [0] * len(envs)
        for rank in range(len(envs)):
            self._clear(rank)

    def start(self, rank: int) -> None:
        """Start the next epoch of `rank`, with its counters at zero."""
        self._clear(rank)
        self.epochs[rank] += 1

    def array(self, name: str, rank: int) -> Array:
        return self.arrays[rank][name]

    def have(self, element: Element) -> int:
        return int(self._counts[element.rank][element.name][element.index])

    def counts(self, name: str, rank: int) -> Array:
        return self._counts[rank][name]

    def notify(self, element: Element) -> None:
        self._counts[element.rank][element.name][element.index] += 1

    def awaited(self, task: Task) -> set[int]:
        return task.peers

    def started(self, rank: int) -> int:
        return self.epochs[rank]

    def _clear(self, rank: int) -> None:
        shapes = self._shapes[rank].items()
        self._counts[rank] = {name: np.zeros(shape, np.int64) for name, shape in shapes}


_Step = tuple[int, LaneWorker | None]
"""A rank, and one of its workers; None: the rank starts its next epoch."""


class _SimulatedRun:
    """The state of one simulation."""

    def __init__(
        self,
        plan: Plan,
        inputs: Sequence[Mapping[str, Array]],
        dims: Mapping[str, int],
        workers: int,
        epochs: int,
        seed: int,
    ):
        self._plan, self._count, self._epochs = plan, workers, epochs
        self._seed, self._chance = seed, random.Random(seed)
        # Depending on the seed, ranks run far ahead of the others or alternate.
        self._stickiness = self._chance.choice((0.0, 0.5, 0.95))
        graph = plan.graph
        self._envs = [
            graph.environment({**dims, **graph.own_rows_of(rank_inputs)}, rank)
            | {WORKERS.name: workers}
            for rank, rank_inputs in enumerate(inputs)
        ]
        self.memory = ProcessMemory(plan, self._envs)
        for rank, env in enumerate(self._envs):
            where = f"graph {graph.name}, rank {rank}"
            arrays = storage.bind(graph.given(), inputs[rank], env, where)
            arrays |= {t.name: arrays[t.name].copy() for t in graph.states()}
            for tensor in graph.tensors:
                if not tensor.is_given:
                    arrays[tensor.name] = storage.poisoned(tensor, env)
            self.memory.arrays[rank] = arrays
            env.update(storage.loads(graph, arrays))
        self._workers: list[Workers | None] = [None for _ in self._envs]
        self.tasks: list[TaskRecord] = []

    def finish(self) -> None:
        """Take steps until all ranks have run all epochs."""
        last = 0
        while steps := self._steps():
            first = []
            if self._chance.random() < self._stickiness:
                first = [step for step in steps if step[0] == last]
                steps = [step for step in steps if step[0] != last]
            tried = chain(self._drawn(first), self._drawn(steps))
            ran = next((step[0] for step in tried if self._take(*step)), None)
            if ran is None:
                running = filter(None, self._workers)
                waits = [w for workers in running for w in workers.unmet_waits()]
                raise deadlock(self._plan, waits)
            last = ran

    def _steps(self) -> list[_Step]:
        """The steps that may be possible next."""
        steps: list[_Step] = []
        for rank, workers in enumerate(self._workers):
            live = [] if workers is None else workers.live
            steps += [(rank, worker) for worker in live]
            if not live and self.memory.epochs[rank] < self._epochs:
                steps.append((rank, None))
        return steps

    def _drawn(self, steps: list[_Step]) -> Iterator[_Step]:
        """All steps, in a random order."""
        while steps:
            at = int(self._chance.random() * len(steps))
            steps[at], steps[-1] = steps[-1], steps[at]
            yield steps.pop()

    def _take(self, rank: int, worker: LaneWorker | None) -> bool:
        """Take a step; False if it is not possible."""
        workers = self._workers[rank]
        if workers is None or worker is None:
            return self._start(rank)
        return workers.step(worker)

    def _start(self, rank: int) -> bool:
        """Start the next epoch of a rank, with poisoned results."""
        for tensor in self._plan.graph.tensors:
            if not tensor.is_given:
                storage.poison(self.memory.arrays[rank][tensor.name])
        self.memory.start(rank)
        env, epoch = self._envs[rank], self.memory.epochs[rank]
        lane_workers = make_lane_workers(self._plan, self._count)
        workers = Workers(
            self._plan, env, rank, epoch, lane_workers, self.memory, self._seed
        )
        workers.records = self.tasks
        self._workers[rank] = workers
        return True


def deadlock(plan: Plan, waits: Sequence[WaitRecord]) -> DeadlockError:
    """The error for unmet waits of a plan of which no task can run."""
    lines = [str(wait) for wait in waits[:SHOWN]]
    if len(waits) > SHOWN:
        lines.append(f"and {len(waits) - SHOWN} more")
    return DeadlockError(
        "no task can run",
        where=f"graph {plan.graph.name}",
        wanted="waits that are all met",
        got="\n          ".join(lines),
        fix="correct expects= of these events, the indices in waits= and "
        "notifies=, or order= of the calls",
    )


def _check_complete(plan: Plan, arrays: Sequence[Mapping[str, Array]]) -> None:
    for rank, by_name in enumerate(arrays):
        for tensor in plan.graph.outputs():
            array = by_name[tensor.name]
            missing = storage.still_poisoned(array)
            if array.dtype.kind == "i" or not missing.any():
                continue
            first = ", ".join(map(str, np.argwhere(missing)[0]))
            raise GraphError(
                f"output {tensor.name} is not complete",
                where=f"graph {plan.graph.name}, rank {rank}",
                wanted=f"all {missing.size} elements written",
                got=f"{int(missing.sum())} unwritten, the first at [{first}]",
                fix="make the writes= of the calls cover the whole output",
            )
