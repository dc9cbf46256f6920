"""All tasks of a plan at given dims, over all ranks, as flat NumPy arrays.

Tasks are numbered rank by rank, lane by lane, call by call, in each call's order.
Elements of event tensors are numbered tensor by tensor, rank by rank. All later checks
use these numbers; only fault texts need names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from etc_dist.ir.call import Call
from etc_dist.ir.event import EventTensor
from etc_dist.ir.expr import Expr
from etc_dist.ir.tensor import Region
from etc_dist.schedule.plan import QUEUE, STRIDED, WORKERS, Lane, Plan

Array = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

NONE = -1
"""In tables of elements or tasks: no element, no task."""

WAITING, BEGINNING, EARLY, BODY = range(4)
"""The phases of a task that access memory: loads that determine its loaded waits, after
its waits without loads, its streamed operands, after its first waits, or whether it is
there at all, after its first one; other loads that determine its accesses and
notifications; reads by its body before its last wait is met; all other accesses by its
body."""
PARTLY_WAITED = (WAITING, EARLY)
"""Phases in which not all of a task's waits are met."""


@dataclass(frozen=True)
class Block:
    """The tasks of one call on one rank, numbered base .. base + count - 1.

    `env` has the rank's numbers, and the coordinates as arrays over the tasks; `index`
    has the tasks' indices in the call: all but those of surplus tasks."""

    call: Call
    lane: Lane
    rank: int
    base: int
    count: int
    env: dict[str, Any]
    index: Array

    @property
    def tasks(self) -> Array:
        """The numbers of its tasks."""
        return np.arange(self.base, self.base + self.count)

    def values(self, expr: Expr) -> Array:
        """`expr` for every task of the block."""
        return evaluate(expr, self.env, self.count)


@dataclass(frozen=True)
class Queues:
    """The sequences in which tasks are claimed, by rising position. A queue has the
    units of one worker in a strided lane, or all units of a ticket lane on one rank.
    In a queue lane the unqueued tasks that wait are one such queue, and each other task
    is a separate one: it delays no task."""

    queue: Array
    position: Array
    strided: Mask
    """The task is ordered after earlier ones of its queue. Tasks of a ticket or queue
    lane are not, as they run concurrently, nor tasks with roles:
    their loads and stores overlap those of the tasks before and after."""
    names: list[str]

    def of(self, some: Array) -> Queues:
        """The places of some of the tasks."""
        return Queues(
            self.queue[some],
            self.position[some],
            self.strided[some],
            self.names,
        )


@dataclass(frozen=True)
class Elements:
    """The numbers of event elements: tensor -> first number and shape on each rank."""

    first: dict[str, Array]
    shape: dict[str, Array]
    rank: Array
    total: int

    def name(self, element: int) -> str:
        """An element by its event tensor, index and rank, for errors."""
        for event, first in self.first.items():
            sizes = self.shape[event].prod(axis=1)
            for rank in np.flatnonzero((first <= element) & (element < first + sizes)):
                at = np.unravel_index(
                    element - int(first[rank]), tuple(self.shape[event][rank])
                )
                return f"{event}[{', '.join(str(int(i)) for i in at)}] on rank {rank}"
        raise AssertionError(f"no element {element}")

    def of(self, event: EventTensor) -> Iterator[tuple[int, int, tuple[Array, ...]]]:
        """(rank, first number, coordinates) of the tensor's elements on each rank."""
        for rank, shape in enumerate(self.shape[event.name]):
            at = np.unravel_index(np.arange(shape.prod()), tuple(shape))
            first = int(self.first[event.name][rank])
            yield rank, first, tuple(np.asarray(a, np.int64) for a in at)


@dataclass(frozen=True)
class Access:
    """One operand of one call on one rank: the boxes that its tasks access.

    Tasks with an empty box are left out. `rank` is the rank whose memory has the box.
    `gathered`: a body reads only a part of its box."""

    region: Region
    write: bool
    task: Array
    rank: Array
    low: Array  # [axes, tasks]
    high: Array
    phase: int = BODY
    gathered: bool = False

    @cached_property
    def ranks(self) -> frozenset[int]:
        """The ranks whose memory has some of the boxes."""
        return frozenset(np.bincount(self.rank).nonzero()[0].tolist())

    def on(self, rank: int) -> Access:
        """The boxes in the memory of `rank`."""
        if self.ranks == {rank}:
            return self
        is_here = self.rank == rank
        return Access(
            self.region,
            self.write,
            self.task[is_here],
            self.rank[is_here],
            self.low[:, is_here],
            self.high[:, is_here],
            self.phase,
            self.gathered,
        )


@dataclass(frozen=True)
class Enumeration:
    """All tasks of a plan at given dims and a number of workers.

    wait, notify: [tasks, most of any call] element numbers, padded with NONE.
    count_events: elements after which the counts of loaded extents are known; workers
    wait for them, even if all tasks turn out to be surplus. unknown_*: names that
    depend on runtime tensors without given values."""

    plan: Plan
    environments: tuple[dict[str, Any], ...]
    blocks: tuple[Block, ...]
    rank: Array
    queues: Queues
    elements: Elements
    wait: Array
    notify: Array
    accesses: tuple[Access, ...]
    count_events: Array
    unknown_events: frozenset[str]
    unknown_counts: frozenset[str]
    unknown_writes: frozenset[str]

    @property
    def tasks(self) -> int:
        """The number of tasks of all ranks."""
        return len(self.rank)

    @cached_property
    def free_wait(self) -> Array:
        """`wait` without loaded waits, and without the last waits of tasks that read or
        stream early, or whose grid has a loaded extent."""
        free = self.wait.copy()
        for block in self.blocks:
            end = len(block.call.waits) - block.call.function.begins_early
            if block.call.streams_after is not None:
                end = block.call.streams_after
            if block.call.waits_for_count:
                end = 1
            for k, ref in enumerate(block.call.waits):
                if k >= end or ref in block.call.loaded_waits:
                    free[block.base : block.base + block.count, k] = NONE
        return free

    @cached_property
    def turn(self) -> tuple[Array, Array]:
        """Of each task: the number of its loops, NONE without, and of its turn."""
        loops, turn = np.full((2, self.tasks), NONE)
        loop_numbers: dict[tuple[str, ...], int] = {}
        for block in self.blocks:
            here = slice(block.base, block.base + block.count)
            if axes := block.call.loop_axes:
                loops[here] = loop_numbers.setdefault(
                    block.call.loop_names, len(loop_numbers)
                )
                turn[here] = 0
                for axis in axes:
                    turn[here] *= int(axis.extent.evaluate(block.env))
                    turn[here] += block.values(axis.symbol)
        return loops, turn

    def is_later_turn(self, first: Array, second: Array) -> Mask:
        """Whether the second task is in the same loops, in a later turn."""
        loops, turn = self.turn
        is_same = (loops[first] == loops[second]) & (loops[first] != NONE)
        later: Mask = is_same & (turn[second] > turn[first])
        return later

    def block(self, task: int) -> Block:
        """The block of a task."""
        bases = [b.base for b in self.blocks]
        return self.blocks[int(np.searchsorted(bases, task, side="right")) - 1]

    def name(self, task: int) -> str:
        """A task as text: call, coordinate, rank."""
        block = self.block(task)
        return task_name(block, task - block.base)


def task_name(block: Block, t: int) -> str:
    """Task t of a block by its call, coordinate and rank, for errors."""
    at = ", ".join(
        f"{a.symbol}={int(np.broadcast_to(block.env[a.symbol.name], block.count)[t])}"
        for a in block.call.axes
    )
    return f"{block.call.name}[{at}] on rank {block.rank}"


def evaluate(expr: Expr, env: dict[str, Any], count: int) -> Array:
    """`expr` as `count` numbers; IndexError for a load out of range."""
    value = expr.evaluate(env)
    if isinstance(value, int):
        return np.full(count, value, np.int64)
    values = np.asarray(value, np.int64)
    return values if values.shape == (count,) else np.broadcast_to(values, (count,))


def rows(block: Block, exprs: Sequence[Expr]) -> Array:
    """The values of `exprs`: [expressions, tasks]."""
    values = np.empty((len(exprs), block.count), np.int64)
    for row, expr in enumerate(exprs):
        values[row] = expr.evaluate(block.env)
    return values


def place(plan: Plan, blocks: list[Block], workers: int) -> Queues:
    """Every task's place in the queues of its lane."""
    total = sum(b.count for b in blocks)
    queue, position = (np.zeros(total, np.int64) for _ in range(2))
    strided = np.zeros(total, bool)
    names: list[str] = []
    lanes: dict[tuple[str, int], Lane] = {}
    first_queue: dict[tuple[str, int], int] = {}
    for block in blocks:
        key = block.lane.name, block.rank
        if key not in lanes:
            # Calls whose tasks cannot be counted are left out.
            counted_calls = [b.call for b in blocks if (b.lane.name, b.rank) == key]
            lanes[key] = replace(block.lane, calls=tuple(counted_calls))
        lane = lanes[key]
        here = slice(block.base, block.base + block.count)
        if lane.policy == QUEUE and block.call.name not in lane.claimed_calls:
            queue[here] = np.arange(len(names), len(names) + block.count)
            names += [f"the {lane.name} lane of rank {block.rank}"] * block.count
            continue
        queues = workers if lane.policy == STRIDED else 1
        if key not in first_queue:
            first_queue[key] = len(names)
            names += _queue_names(lane, block.rank, queues)
        env = {**block.env, WORKERS.name: workers}
        unit = lane.position(block.call, block.index, env)
        queue[here] = first_queue[key] + unit % queues
        position[here] = unit // queues
        strided[here] = lane.policy == STRIDED and not block.call.function.roles
    return Queues(queue, position, strided, names)


def _queue_names(lane: Lane, rank: int, workers: int) -> list[str]:
    if lane.policy != STRIDED:
        return [f"the {lane.name} lane of rank {rank}"]
    name = f"the {lane.name} lane of worker"
    return [f"{name} {n} on rank {rank}" for n in range(workers)]
