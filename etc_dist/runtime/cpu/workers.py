"""The simulated workers of one rank: they claim units and run their tasks.

A `LaneWorker` runs the tasks of one lane, one at a time. It keeps a unit of the plan
until its task has run. `step` runs a task at once; a prediction takes its units and
ready tasks, and ends each one later."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

import numpy as np

from etc_dist.errors import WaitRecord
from etc_dist.ir.call import Call
from etc_dist.ir.tensor import numpy_dtype
from etc_dist.runtime.cpu.body import run_body
from etc_dist.runtime.cpu.ready_queue import ReadyQueue
from etc_dist.runtime.cpu.storage import Array
from etc_dist.runtime.cpu.task import (
    ArrayAccess,
    Element,
    Resolver,
    Task,
    TaskBlock,
    UnmetWait,
    range_error,
)
from etc_dist.runtime.trace import TaskRecord
from etc_dist.schedule.plan import QUEUE, STRIDED, TICKET, WORKERS, Lane, Plan

SHOWN = 16
"""The number of groups of a rank that an error names."""
BLOCK, MOST_BLOCKS = 128, 32
"""Tasks of a call that are evaluated together, and the blocks that a rank keeps."""
MOST_UNITS = 4096
"""The units of a rank that are kept."""


class Memory(Protocol):
    """The arrays and events of a rank and of its peers."""

    def array(self, name: str, rank: int) -> Array:
        """The storage of a tensor on `rank`."""

    def have(self, element: Element) -> int:
        """Notifications of an element of this rank in this epoch."""

    def counts(self, name: str, rank: int) -> Array:
        """The same for all elements of an event tensor, in its shape, on this rank."""

    def notify(self, element: Element) -> None:
        """Add one to an element of any rank."""

    def awaited(self, task: Task) -> Iterable[int]:
        """The ranks that must have started this epoch before `task` runs."""

    def started(self, rank: int) -> int:
        """The epoch that `rank` last started; epochs count from 1."""

    def is_far(self, rank: int) -> bool:
        """Whether `rank` is reached by messages only; by default none is."""
        return False

    def far_put(self, access: ArrayAccess, data: Array, element: Element) -> None:
        """Send what a task writes to a far rank, with its notification."""
        raise AssertionError("no rank is far")


@dataclass(eq=False)
class LaneWorker:
    """A worker that runs units of the first of `lanes`, and of the next one once all
    units of a lane are taken."""

    worker: int
    lanes: Sequence[Lane]
    unit: list[Task] = field(default_factory=list)
    """The tasks of its current unit that have not run."""
    is_done: bool = False

    @property
    def lane(self) -> Lane:
        """The lane whose units it runs now."""
        return self.lanes[0]


def make_lane_workers(plan: Plan, workers: int) -> list[LaneWorker]:
    """The lane workers of one rank; all ranks have the same."""
    plan.expect_workers(workers)
    return [
        LaneWorker(worker_idx, plan.lanes[lane_idx:])
        for lane_idx, lane in enumerate(plan.lanes)
        for worker_idx in range(workers)
    ]


class Blocks:
    """The blocks of tasks at `env`, of which the last ones are kept."""

    def __init__(self, env: Mapping[str, Any]):
        self._env = dict(env)
        self._kept_blocks: dict[tuple[str, int], TaskBlock] = {}

    def of(self, call: Call, t: int) -> TaskBlock:
        """The block of tasks that has task `t`."""
        number = t // BLOCK
        block = self._kept_blocks.get((call.name, number))
        if block is None:
            if len(self._kept_blocks) == MOST_BLOCKS:
                del self._kept_blocks[next(iter(self._kept_blocks))]
            first = number * BLOCK
            count = min(BLOCK, int(call.tasks.evaluate(self._env)) - first)
            block = TaskBlock(call, first, count, self._env)
            self._kept_blocks[call.name, number] = block
        return block


class SizedPlan:
    """What a plan does on one rank in all runs at the numbers of `env`, for any data:
    its units, and the blocks of calls that load nothing."""

    def __init__(self, plan: Plan, env: Mapping[str, Any]):
        self.blocks = Blocks(env)
        self._env = dict(env)
        self._lanes = {lane.name: lane.at(self._env) for lane in plan.lanes}
        self._units: dict[tuple[str, int], tuple[Call, int]] = {}

    def unit(self, lane: Lane, index: int) -> tuple[Call, int] | None:
        """The task of a unit of a lane: its call and number, if there is one."""
        unit = self._units.get((lane.name, index))
        if unit is None:
            unit = self._lanes[lane.name].find(index, self._env)
            if unit is not None and len(self._units) < MOST_UNITS:
                self._units[lane.name, index] = unit
        return unit


class Workers:
    """The lane workers of one rank in one epoch, over `memory`.

    `env` has the rank's dims, derived numbers, the number of workers, and the arrays
    that expressions load from. `seed` determines the order in which units of a queue
    lane are taken, if the plan does not. `shape`: that of other runs at the same
    numbers."""

    def __init__(
        self,
        plan: Plan,
        env: Mapping[str, Any],
        rank: int,
        epoch: int,
        lane_workers: Sequence[LaneWorker],
        memory: Memory,
        seed: int = 0,
        shape: SizedPlan | None = None,
    ):
        self.plan, self.rank, self.epoch, self.env = plan, rank, epoch, dict(env)
        self.lane_workers = lane_workers
        self.records: list[TaskRecord] = []
        """The tasks that have run, in this order."""
        self.read: set[str] = set()
        """The names of the tensors that their bodies have read, other than those of
        which other data selects elements."""
        self._memory = memory
        self._tickets = {lane.name: 0 for lane in plan.lanes}
        self._units = {worker: self._units_of(worker) for worker in lane_workers}
        self._resolver = Resolver(rank, plan.graph, self.env)
        self._shape, self._blocks = shape or SizedPlan(plan, env), Blocks(env)
        chance = random.Random(f"{seed} {rank} {epoch}")

        def counts(name: str) -> Array:
            return memory.counts(name, rank)

        self._queues = {
            lane.name: ReadyQueue(lane, self.env, counts, chance)
            for lane in plan.lanes
            if lane.policy == QUEUE
        }

    @property
    def live(self) -> list[LaneWorker]:
        """The workers that have not ended."""
        return [worker for worker in self.lane_workers if not worker.is_done]

    @property
    def done(self) -> bool:
        """Whether all tasks have run."""
        return not self.live

    def unmet_waits(self) -> list[WaitRecord]:
        """The waits of tasks in current units, and of the first unready groups."""
        tasks = [task for worker in self.lane_workers for task in worker.unit]
        groups = (
            (self.plan.lane(name), call, t)
            for name, queue in self._queues.items()
            for call, t in queue.waiting()
        )
        tasks += [self._pending_task(*group) for group in islice(groups, SHOWN)]
        records = (task.record() for task in tasks)
        return [record for record in records if record is not None]

    def step(self, worker: LaneWorker) -> bool:
        """Take a unit, run one of its tasks, or end; False if nothing is possible."""
        num_tasks = len(worker.unit)
        if not num_tasks and not self.take(worker):
            return False
        task = self.next_task(worker)
        if task is not None:
            self._run(task)
        return len(worker.unit) < num_tasks or not num_tasks

    def take(self, worker: LaneWorker) -> bool:
        """Give `worker` its next unit, or end it; False if no unit is ready."""
        unit = self._next_unit(worker)
        if unit is None:
            return False
        worker.unit, worker.is_done = unit, not unit
        return True

    def next_task(self, worker: LaneWorker) -> Task | None:
        """Remove a task that may run now from the unit of `worker`, and the surplus
        ones before it; None if no task is ready."""
        for task in list(worker.unit):
            is_surplus = self._is_surplus(task)
            if is_surplus or self._ready(task):
                worker.unit.remove(task)
                if not is_surplus:
                    return task
        return None

    def _next_unit(self, worker: LaneWorker) -> list[Task] | None:
        """The next unit: [] if none is left for this worker, None if none is ready."""
        if worker.lane.policy != QUEUE:
            return next(self._units[worker], [])
        for lane in worker.lanes:
            queue = self._queues[lane.name]
            queue.release()
            if queue.num_left:
                index = queue.take()
                return None if index is None else self._unit(worker, lane, index)
        return []

    def _units_of(self, worker: LaneWorker) -> Iterator[list[Task]]:
        """The units of `worker` in lanes without queues, computed as they are taken."""
        own_lane = worker.lane
        if own_lane.policy == STRIDED:
            workers = self.env[WORKERS.name]
            for unit_idx in range(worker.worker, self._total(own_lane), workers):
                if unit := self._unit(worker, own_lane, unit_idx):
                    yield unit
        for lane in worker.lanes:
            if lane.policy != TICKET:
                continue
            total = self._total(lane)
            while self._tickets[lane.name] < total:
                unit_idx = self._tickets[lane.name]
                self._tickets[lane.name] += 1
                yield self._unit(worker, lane, unit_idx)

    def _total(self, lane: Lane) -> int:
        return int(lane.total.evaluate(self.env))

    def _unit(self, worker: LaneWorker, lane: Lane, index: int) -> list[Task]:
        place_in_call = self._shape.unit(lane, index)
        if place_in_call is None:
            return []
        call, t = place_in_call
        return [
            Task(
                self.rank,
                worker.worker,
                worker.lane.name,
                call,
                t,
                self.epoch,
                self._block(call, t),
            )
        ]

    def _block(self, call: Call, t: int) -> TaskBlock:
        """The block of tasks that has task `t`, of this run alone if it may load."""
        has_loads = call.is_loaded or any(v.is_loaded for _, v in call.values)
        loads = has_loads or call.limited is not None
        return (self._blocks if loads else self._shape.blocks).of(call, t)

    def _pending_task(self, lane: Lane, call: Call, t: int) -> Task:
        """A task of a group that is not ready, with its first unmet wait."""
        block = TaskBlock(call, t, 1, self.env)
        task = Task(self.rank, -1, lane.name, call, t, self.epoch, block)
        free, loaded_waits = call.free_waits, call.loaded_waits
        task.waits = (
            *self._resolver.waits(free, task),
            *self._resolver.waits(loaded_waits, task),
        )
        self._met(task)
        return task

    def _is_surplus(self, task: Task) -> bool:
        """Whether `task` is known not to exist, by the count of its grid, which may be
        valid only after the first wait."""
        limited, count = task.call.limited, task.call.count
        if limited is None or count is None or task.has_begun:
            return False
        for element, want in self._resolver.waits(task.call.known_after, task):
            if self._memory.have(element) < want:
                return False
        return int(task.env[limited.symbol.name]) >= int(count.evaluate(task.env))

    def _ready(self, task: Task) -> bool:
        """Whether `task` may run now; if not, `task.unmet` is its first unmet wait."""
        if task.waits is None and not task.call.is_loaded:
            self._resolver.complete(task)
        if task.waits is None:
            task.waits = self._resolver.waits(task.call.free_waits, task)
        if not self._met(task):
            return False
        if not task.knows_waits:
            task.knows_waits, loaded_waits = True, task.call.loaded_waits
            task.waits = (*task.waits, *self._resolver.waits(loaded_waits, task))
            if not self._met(task):
                return False
        if not task.has_begun:
            self._begin(task)
        for peer in sorted(self._memory.awaited(task)):
            peer_epoch = self._memory.started(peer)
            if peer_epoch < self.epoch:
                task.unmet = UnmetWait(None, peer, peer_epoch, self.epoch)
                return False
        return True

    def _met(self, task: Task) -> bool:
        task.unmet = None
        for element, want in task.waits or ():
            have = self._memory.have(element)
            if have < want:
                task.unmet = UnmetWait(element, self.rank, have, want)
                return False
        return True

    def _begin(self, task: Task) -> None:
        task.has_begun, call, resolver = True, task.call, self._resolver
        task.reads = resolver.accesses(call.reads, task)
        task.writes = resolver.accesses(call.writes, task)
        task.notifies = resolver.elements(call.notifies, task)
        task.most = dict(resolver.waits(call.limited_notifies, task))

    def _run(self, task: Task) -> None:
        if any(self._memory.is_far(access.rank) for access in task.writes):
            (access,), (element,) = task.writes, task.notifies
            data = np.empty(access.shape, numpy_dtype(access.tensor.dtype))
            self._record(task, data)
            self._memory.far_put(access, data, element)
            return
        self._record(task)
        for element, most in task.most.items():
            count = self._memory.have(element) + task.notifies.count(element)
            if count > most:
                wanted = f"{most} notifications of {element}, as many as its count says"
                raise range_error(task, wanted, f"{count} or more")
        for element in task.notifies:
            self._memory.notify(element)

    def _record(self, task: Task, far: Array | None = None) -> None:
        """Run the body of `task` and record its CPU time. `far`: what it writes, in
        place of memory of a far rank."""
        began, cpu_time = time.monotonic_ns(), time.thread_time_ns()
        if not task.idle:
            self.read.update(
                a.tensor.name
                for n, a in enumerate(task.reads)
                if not a.empty and n not in task.call.function.gathers
            )
            views = [
                # NOTE: the ellipsis keeps a view where every axis is one integer.
                self._memory.array(a.tensor.name, a.rank)[(*a.index, ...)]
                for a in (*task.reads, *(() if far is not None else task.writes))
            ]
            views += [] if far is None else [far]
            run_body(task, views)
        end = began + time.thread_time_ns() - cpu_time
        name, tile = task.call.name, task.coordinate
        loops = task.call.loop_names
        self.records.append(
            TaskRecord(
                task.rank, task.worker, task.lane, began, end, name, task.t, tile, loops
            )
        )
