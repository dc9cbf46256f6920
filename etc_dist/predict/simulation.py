"""The run of one rank by the workers of the CPU backend, in the time of a machine.

All ranks do the same, so rank 0 stands for every rank: when a task of rank 0 sends to
another rank, the same task of other ranks sends to rank 0, and both arrive at the same
time. Each rank has one network card. All far ranks count as started when the last of
their messages of the handshake has arrived."""

from __future__ import annotations

import gc
import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from etc_dist.errors import ArgumentError
from etc_dist.ir.call import RANK, Call
from etc_dist.ir.dims import checked_dims
from etc_dist.ir.expr import Expr
from etc_dist.ir.function import TENSOR
from etc_dist.predict.machine import Link, Machine
from etc_dist.runtime.cpu.simulate import ProcessMemory, deadlock
from etc_dist.runtime.cpu.task import Element, Task, TaskBlock
from etc_dist.runtime.cpu.workers import LaneWorker, Workers
from etc_dist.schedule.plan import QUEUE, WORKERS, Plan

TRANSFER_WARPS, WARPS = 2, 10
"""Warps of a worker in the transfer lane: before and after the compute warps join it,
at the end of the tensor lane."""
MOST_TASKS = 2_000_000
"""Of a call on a rank: as many are simulated in minutes."""


class Times(Protocol):
    """How long tasks take, in microseconds."""

    def task_us(self, task: Task) -> float:
        """The time of a task that writes something."""


@dataclass(frozen=True)
class PredictedRun:
    """A predicted run. tensor_us: the work of the tensor lane, spread over all workers
    of a rank. near_us, far_us: the bytes that leave a rank, at the rate of the links.
    messages: to other hosts, without the handshake."""

    hosts: int
    ranks: int
    us: float
    tensor_us: float
    near_us: float
    far_us: float
    far_bytes: int
    messages: int

    @property
    def bounds(self) -> dict[str, float]:
        """What no order of the tasks can make shorter: microseconds by name."""
        return {
            "GEMM": self.tensor_us,
            "near bytes": self.near_us,
            "far bytes": self.far_us,
        }

    @property
    def bound_us(self) -> float:
        """The largest bound, in microseconds."""
        return max(self.bounds.values())

    @property
    def bound_by(self) -> str:
        """The name of the largest bound."""
        return max(self.bounds, key=lambda name: self.bounds[name])


def simulate_run(
    plan: Plan, dims: Mapping[str, int], times: Times, machine: Machine
) -> PredictedRun:
    """Simulate one run of a static plan. ArgumentError for dims that do not fit, for
    tasks that depend on data, and if ranks have different numbers of tasks;
    DeadlockError if its tasks do not end."""
    dims = checked_dims(plan.graph, dims)
    _refuse_data(plan)
    # NOTE: every number of the environment may be an array over the ranks.
    of_ranks = plan.graph.of_rank(dims, 0)
    of_ranks[RANK.name] = np.arange(plan.graph.world_size)
    for symbol, value in plan.graph.derived:
        of_ranks[symbol.name] = value.evaluate(of_ranks)
    for call in plan.graph.calls:
        _refuse_counts(plan, call, np.unique(call.tasks.evaluate(of_ranks)))
    return _TimedRun(plan, dims, of_ranks, times, machine).finish()


class _Server:
    """A link, which serves messages in their order. nbytes: sent so far."""

    def __init__(self, link: Link):
        self.link, self.free = link, 0.0
        self.messages = self.nbytes = 0

    def send(self, now: float, nbytes: int) -> float:
        """When a message that is sent now arrives."""
        self.messages, self.nbytes = self.messages + 1, self.nbytes + nbytes
        self.free = max(now, self.free) + self.link.service_us(nbytes)
        return self.free + self.link.latency_us

    @property
    def bytes_us(self) -> float:
        """The time of all bytes at the rate of the link."""
        return self.nbytes / self.link.bytes_per_us


class _TimedRun:
    """The state of a simulation."""

    def __init__(
        self,
        plan: Plan,
        dims: Mapping[str, int],
        of_ranks: dict[str, Any],
        times: Times,
        machine: Machine,
    ):
        graph, tensor = plan.graph, plan.lane(TENSOR)
        self._plan, self._times, self._machine = plan, times, machine
        self._of_ranks = of_ranks
        self._near, self._far = _Server(machine.near), _Server(machine.far)
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._events = 0
        env = graph.environment(dims, 0)
        self._memory = ProcessMemory(plan, [env])
        self._memory.epochs = [1] + [0] * (graph.world_size - 1)
        self._tensor = [LaneWorker(n, [tensor]) for n in range(machine.workers)]
        other_lanes = [lane for lane in plan.lanes if lane is not tensor]
        self._warps = [
            LaneWorker(warp_idx // WARPS, other_lanes)
            for warp_idx in range(machine.workers * WARPS)
        ]
        lane_workers = [*self._tensor, *self._warps]
        env[WORKERS.name] = machine.workers
        self._workers = Workers(plan, env, 0, 1, lane_workers, self._memory)
        self._running: dict[LaneWorker, int] = defaultdict(int)
        self._waiting: dict[Element | int, dict[LaneWorker, int]] = defaultdict(dict)
        self._end_us = self._tensor_us = 0.0

    def finish(self) -> PredictedRun:
        """Run all tasks."""
        near, ranks = self._plan.graph.local_size, self._plan.graph.world_size
        hosts = ranks // near
        arrivals = [self._far.send(0.0, 0) for _ in range(hosts - 1)]
        starts = [(self._machine.near.latency_us, range(1, near))]
        starts += [(arrival_us, range(near, ranks)) for arrival_us in arrivals[-1:]]
        for when, peers in starts:
            self._at(when + self._machine.poll_us, partial(self._start, peers))
        for worker in self._tensor:
            self._at(0.0, partial(self._advance, worker))
        for worker_idx in range(self._machine.workers):
            for warp in self._transfer_warps(worker_idx):
                self._at(0.0, partial(self._advance, warp))
        with _paused_collections():
            while self._heap:
                now, _, act = heapq.heappop(self._heap)
                act(now)
        if not self._workers.done:
            raise deadlock(self._plan, self._workers.unmet_waits())
        return PredictedRun(
            hosts,
            ranks,
            us=self._machine.launch_us + self._end_us,
            tensor_us=self._tensor_us / len(self._tensor),
            near_us=self._near.bytes_us,
            far_us=self._far.bytes_us,
            far_bytes=self._far.nbytes,
            messages=self._far.messages - len(arrivals),
        )

    def _at(self, when: float, act: Callable[[float], None]) -> None:
        self._events += 1
        heapq.heappush(self._heap, (when, self._events, act))

    def _transfer_warps(self, worker: int) -> Sequence[LaneWorker]:
        return self._warps[worker * WARPS :][:TRANSFER_WARPS]

    # ----------------------------------------------------------------------- events

    def _start(self, peers: Sequence[int], now: float) -> None:
        for rank in peers:
            self._memory.epochs[rank] = 1
            self._wake(rank, 1, now)

    def _notify(self, elements: Sequence[Element], now: float) -> None:
        for element in elements:
            self._memory.notify(element)
            self._wake(element, self._memory.have(element), now)

    def _wake(self, cause: Element | int, have: int, now: float) -> None:
        """Continue the lane workers that wait for an element, or for a rank."""
        waiting = self._waiting.pop(cause, {})
        for worker, want in waiting.items():
            if want <= have:
                self._advance(worker, now)
            else:
                self._waiting[cause][worker] = want

    # ------------------------------------------------------------------------ tasks

    def _advance(self, worker: LaneWorker, now: float) -> None:
        """Begin the tasks of a lane worker's unit that can run."""
        lane = worker.lane
        while not self._running[worker]:
            if not worker.unit:
                self._workers.take(worker)
            ready = self._workers.next_task(worker)
            if ready is None:
                break
            us = 0.0 if ready.idle else self._times.task_us(ready)
            due = ready.t * int(ready.call.pace.evaluate(self._workers.env)) / 1e3
            self._begin(worker, max(now, due) + us, partial(self._complete, ready))
            if lane.name == TENSOR:
                self._tensor_us += us
        for task in worker.unit:
            if task.unmet is not None:
                cause = task.unmet.element or task.unmet.peer
                self._waiting[cause][worker] = task.unmet.want
        if worker.is_done and lane.name == TENSOR:
            self._join(worker, now)

    def _begin(
        self, worker: LaneWorker, end: float, act: Callable[[float], None]
    ) -> None:
        """Occupy a lane worker until `end`."""
        self._running[worker] += 1

        def stop(now: float) -> None:
            self._running[worker] -= 1
            act(now)
            self._advance(worker, now)

        self._at(end, stop)

    def _join(self, worker: LaneWorker, now: float) -> None:
        """The compute warps of a worker run the transfer lane."""
        for warp in self._warps[worker.worker * WARPS :][TRANSFER_WARPS:WARPS]:
            self._advance(warp, now)

    def _complete(self, task: Task, now: float) -> None:
        """The end of a task, which sends what it has written."""
        nbytes = sum(access.nbytes for access in task.writes if access.rank)
        arrival_us = end = now
        if any(peer >= self._plan.graph.local_size for peer in task.peers):
            arrival_us = self._far.send(now, nbytes)
            # A run ends once its messages are acknowledged.
            end = arrival_us + self._machine.far.latency_us
        elif task.peers:
            arrival_us = self._near.send(now, nbytes)
        self._end_us = max(self._end_us, end)
        own_elements = [element for element in task.notifies if element.rank == 0]
        for when, elements in ((now, own_elements), (arrival_us, self._mirrored(task))):
            if elements:
                act = partial(self._notify, elements)
                self._at(when + self._machine.poll_us, act)

    def _mirrored(self, task: Task) -> Sequence[Element]:
        """The elements of rank 0 that this task of other ranks notifies."""
        block = task.block
        if "mirrored" not in block.cached_values:
            block.cached_values["mirrored"] = self._mirror(task.call, block)
        elements: Sequence[Element] = block.cached_values["mirrored"][
            task.t - block.first
        ]
        return elements

    def _mirror(self, call: Call, block: TaskBlock) -> Sequence[Sequence[Element]]:
        """For each task of a block, the elements that `_mirrored` finds."""
        elements_of_tasks: list[list[Element]] = [[] for _ in range(block.count)]
        graph = self._plan.graph
        ranks = [*range(1, graph.local_size)]
        if call.function.far:
            ranks += range(graph.local_size, graph.world_size, graph.local_size)
        env = {
            name: value[ranks] if np.ndim(value) else value
            for name, value in self._of_ranks.items()
        }
        tasks = np.arange(block.first, block.first + block.count)[:, None]
        env |= call.coordinates(tasks, env)
        shape = block.count, len(ranks)

        def values(expr: Expr) -> np.ndarray[Any, Any]:
            return np.broadcast_to(np.asarray(expr.evaluate(env), np.int64), shape)

        for ref in call.notifies:
            if ref.rank is None:
                continue
            is_notified = values(ref.guarded(ref.rank)) == 0
            is_notified &= values(ref.holds) != 0
            index = [
                values(ref.guarded(part))[is_notified].tolist() for part in ref.index
            ]
            rows = np.nonzero(is_notified)[0].tolist()
            for row, *place in zip(rows, *index, strict=True):
                elements_of_tasks[row].append(Element(ref.events.name, 0, tuple(place)))
        return elements_of_tasks


@contextmanager
def _paused_collections() -> Iterator[None]:
    """Tasks are in no cycles, and collections would visit them again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _refuse_data(plan: Plan) -> None:
    loaded_names = [call.name for call in plan.graph.calls if call.is_loaded]
    if loaded_names or any(lane.policy == QUEUE for lane in plan.lanes):
        raise _refusal(
            plan,
            f"graph {plan.graph.name}",
            "a static schedule, and tasks that depend on no data",
            f"loads in {', '.join(loaded_names)}"
            if loaded_names
            else "a dynamic schedule",
            "predict one of the collectives or the MLP, statically scheduled",
        )


def _refuse_counts(plan: Plan, call: Call, counts: np.ndarray[Any, Any]) -> None:
    """Raise ArgumentError unless all ranks have as many tasks, and not too many."""
    wanted, got, fix = "", f"{counts[0]} tasks", "choose smaller dims, or fewer hosts"
    if len(counts) > 1:
        wanted = "as many tasks on each rank: one rank stands for all"
        got = f"{counts[0]} to {counts[-1]} tasks"
        fix = "choose dims for which ranks do the same work"
    elif counts[0] > MOST_TASKS:
        wanted = f"at most {MOST_TASKS} tasks of a call on a rank"
    if wanted:
        raise _refusal(plan, f"call {call.name}", wanted, got, fix)


def _refusal(plan: Plan, where: str, wanted: str, got: str, fix: str) -> ArgumentError:
    what = f"the run of {plan.graph.name} cannot be predicted"
    return ArgumentError(what, where=where, wanted=wanted, got=got, fix=fix)
