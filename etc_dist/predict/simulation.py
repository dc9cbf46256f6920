"""The run of one rank, event by event.

All ranks do the same, so rank 0 stands for every rank: when a task of rank 0 sends to
another rank, the same task of other ranks sends to rank 0, and both arrive at the same
time. Each rank has one network card. All far ranks count as started when the last of
their messages of the handshake has arrived.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from etc_dist.errors import DeadlockError, expect_range
from etc_dist.ir.function import FORWARD, TENSOR
from etc_dist.predict.machine import Link, Machine
from etc_dist.predict.tasks import FAR, NEAR, OWN, RankTasks
from etc_dist.settings import MAX_WORKERS

TRANSFER_WARPS, WARPS = 2, 10
"""Warps of a worker in the transfer lane: before and after the compute warps join it,
at the end of the tensor lane."""


@dataclass(frozen=True)
class Times:
    """Microseconds of a task, by call. forwards: of a warp that sends its part of a
    tile of the tensor lane to another rank."""

    tasks: Mapping[str, float]
    forwards: Mapping[str, float]


@dataclass(frozen=True)
class Prediction:
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
        """What no order of the tasks can make shorter, by name."""
        return {
            "GEMM": self.tensor_us,
            "near bytes": self.near_us,
            "far bytes": self.far_us,
        }

    @property
    def bound_us(self) -> float:
        return max(self.bounds.values())

    @property
    def bound_by(self) -> str:
        return max(self.bounds, key=lambda name: self.bounds[name])


def simulate_run(tasks: RankTasks, times: Times, machine: Machine) -> Prediction:
    """Simulate one run. DeadlockError if its tasks do not end."""
    run = _Run(tasks, times, machine)
    us = run.finish()
    near, far = tasks.sent_bytes(NEAR), tasks.sent_bytes(FAR)
    return Prediction(
        hosts=tasks.hosts,
        ranks=tasks.plan.graph.world_size,
        us=us,
        tensor_us=run.tensor_us,
        near_us=near / machine.near.bytes_per_us,
        far_us=far / machine.far.bytes_per_us,
        far_bytes=far,
        messages=sum(int((c.target == FAR).sum()) for c in tasks.calls),
    )


class _Server:
    """A link, which serves messages in their order."""

    def __init__(self, link: Link):
        self.link, self.free = link, 0.0

    def send(self, now: float, nbytes: float) -> float:
        """When a message that is sent now arrives."""
        self.free = max(now, self.free) + self.link.service_us(nbytes)
        return self.free + self.link.latency_us


@dataclass
class _Unit:
    """Tasks that a lane runs at once, not before `due`. missing: their unmet waits.
    wake: starts the cluster or the warp that runs it."""

    us: float
    due: float
    tasks: list[int]
    missing: int = 0
    wake: Callable[[float], None] | None = None


@dataclass(frozen=True)
class _Sending:
    """What a task does at its end. forward_us: of each warp, before that; 0: none.
    own, mirrored: elements that it notifies here, and on the rank that it sends to."""

    target: int
    nbytes: int
    forward_us: float
    own: Sequence[int]
    mirrored: Sequence[int]


class _Run:
    """The state of a simulation. Tasks are numbered call by call."""

    def __init__(self, tasks: RankTasks, times: Times, machine: Machine):
        self._machine = machine
        self._near, self._far = _Server(machine.near), _Server(machine.far)
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._events = 0
        # The last two elements are the starts of near and of far ranks.
        self._left = [*tasks.expected.tolist(), 1, 1]
        self._starts = {NEAR: len(self._left) - 2, FAR: len(self._left) - 1}
        self._partners = tasks.partners
        self._waiters: dict[int, list[_Unit]] = defaultdict(list)
        self._sendings: list[_Sending] = []
        lanes = self._read(tasks, times)
        tensor = lanes.pop(TENSOR, [])
        self._transfer = deque(unit for lane in lanes.values() for unit in lane)
        cluster = tasks.plan.lane(TENSOR).cluster
        expect_range(machine.workers, cluster, MAX_WORKERS, "workers")
        count = machine.workers // cluster
        self._cluster = cluster
        self._queues = [deque(tensor[c::count]) for c in range(count)]
        self.tensor_us = sum(unit.us for unit in tensor) / count
        self._busy_clusters: set[int] = set()
        self._busy_warps: set[int] = set()
        self._claimed: dict[int, _Unit] = {}
        self._forwards: dict[int, deque[int]] = defaultdict(deque)
        self._parts: dict[int, int] = {}
        self._end, self._finished = 0.0, 0

    def _read(self, tasks: RankTasks, times: Times) -> dict[str, list[_Unit]]:
        """The units of each lane, in order; their waits and what they send."""
        lanes: dict[str, dict[int, _Unit]] = {n.name: {} for n in tasks.plan.lanes}
        for of_call in tasks.calls:
            call, base = of_call.call, len(self._sendings)
            us, forward_us = times.tasks[call.name], times.forwards.get(call.name, 0.0)
            forwards = FORWARD in call.function.roles
            units = []
            own, mirrored = (
                of_call.by_task(of_call.notifies),
                of_call.by_task(of_call.mirrored),
            )
            for t, number in enumerate(of_call.unit.tolist()):
                took = 0.0 if of_call.idle[t] else us
                new = _Unit(took, float(of_call.due_us[t]), [])
                unit = lanes[of_call.lane.name].setdefault(number, new)
                unit.us = max(unit.us, took)
                unit.tasks.append(base + t)
                units.append(unit)
                target = int(of_call.target[t])
                nbytes = int(of_call.nbytes[t])
                away = forward_us if forwards and target != OWN else 0.0
                self._sendings.append(
                    _Sending(target, nbytes, away, own[t], mirrored[t])
                )
                if target != OWN and not forwards:
                    self._wait(unit, self._starts[target])
            for t, element in zip(*(p.tolist() for p in of_call.waits), strict=True):
                self._wait(units[t], element)
        return {
            name: [units[number] for number in sorted(units)]
            for name, units in lanes.items()
        }

    def _wait(self, unit: _Unit, element: int) -> None:
        if self._left[element] > 0:
            self._waiters[element].append(unit)
            unit.missing += 1

    # ----------------------------------------------------------------------- events

    def finish(self) -> float:
        """Run all tasks; the microseconds of the run."""
        self._notify(self._machine.near.latency_us, [self._starts[NEAR]])
        for left in reversed(range(self._partners)):
            arrived = self._far.send(0.0, 0)
            if left == 0:
                self._notify(arrived, [self._starts[FAR]])
        for cluster in range(len(self._queues)):
            self._at(0.0, partial(self._advance, cluster))
        for worker in range(self._machine.workers):
            for warp in range(TRANSFER_WARPS):
                self._at(0.0, partial(self._run_warp, worker * WARPS + warp))
        while self._heap:
            now, _, act = heapq.heappop(self._heap)
            act(now)
        unfinished = len(self._sendings) - self._finished
        if unfinished:
            raise DeadlockError(
                f"{unfinished} tasks can never run",
                where="a prediction",
                wanted="a plan whose tasks end",
                got=f"{unfinished} of {len(self._sendings)} tasks of a rank that wait",
                fix="prove the plan: etc_dist.verify.verify(plan, dims, workers)",
            )
        return self._machine.launch_us + self._end

    def _at(self, when: float, act: Callable[[float], None]) -> None:
        self._events += 1
        heapq.heappush(self._heap, (when, self._events, act))

    def _notify(self, when: float, elements: Sequence[int]) -> None:
        if elements:
            act = partial(self._count, elements)
            self._at(when + self._machine.poll_us, act)

    def _count(self, elements: Iterable[int], now: float) -> None:
        for element in elements:
            self._left[element] -= 1
            if self._left[element] == 0:
                for unit in self._waiters[element]:
                    unit.missing -= 1
                    if unit.missing == 0 and unit.wake is not None:
                        unit.wake(now)

    def _complete(self, task: int, now: float) -> None:
        """The end of a task that has sent everything."""
        sending = self._sendings[task]
        self._finished += 1
        arrived = end = now
        if sending.target == NEAR:
            arrived = self._near.send(now, sending.nbytes)
        elif sending.target == FAR:
            arrived = self._far.send(now, sending.nbytes)
            # A run ends once its messages are acknowledged.
            end = arrived + self._machine.far.latency_us
        self._end = max(self._end, end)
        self._notify(now, sending.own)
        self._notify(arrived, sending.mirrored)

    # ------------------------------------------------------------------ tensor lane

    def _advance(self, cluster: int, now: float) -> None:
        """Begin the next unit of a cluster, if it is ready."""
        queue = self._queues[cluster]
        if cluster in self._busy_clusters:
            return
        if not queue:
            self._join(cluster, now)
            return
        queue[0].wake = partial(self._advance, cluster)
        if queue[0].missing == 0:
            self._busy_clusters.add(cluster)
            self._at(now + queue[0].us, partial(self._end_unit, cluster))

    def _end_unit(self, cluster: int, now: float) -> None:
        self._busy_clusters.remove(cluster)
        unit = self._queues[cluster].popleft()
        for task in unit.tasks:
            if self._sendings[task].forward_us:
                self._forward(cluster, task, now)
            else:
                self._complete(task, now)
        self._advance(cluster, now)

    def _forward(self, cluster: int, task: int, now: float) -> None:
        """Have the transfer lane's warps of a cluster send a tile."""
        warps = [
            worker * WARPS + w
            for worker in self._workers(cluster)
            for w in range(TRANSFER_WARPS)
        ]
        self._parts[task] = len(warps)
        for warp in warps:
            self._forwards[warp].append(task)
            self._run_warp(warp, now)

    def _join(self, cluster: int, now: float) -> None:
        """The compute warps of a cluster run the transfer lane."""
        for worker in self._workers(cluster):
            for warp in range(TRANSFER_WARPS, WARPS):
                self._run_warp(worker * WARPS + warp, now)

    def _workers(self, cluster: int) -> range:
        return range(cluster * self._cluster, (cluster + 1) * self._cluster)

    # ---------------------------------------------------------------- transfer lane

    def _run_warp(self, warp: int, now: float) -> None:
        """Begin what a warp can run: a tile to forward, or the unit that it claimed."""
        if warp in self._busy_warps:
            return
        if self._forwards[warp]:
            task = self._forwards[warp].popleft()
            us = self._sendings[task].forward_us
            self._occupy(warp, now + us, partial(self._end_forward, task))
            return
        if warp not in self._claimed:
            if not self._transfer:
                return
            self._claimed[warp] = self._transfer.popleft()
        unit = self._claimed[warp]
        unit.wake = partial(self._run_warp, warp)
        if unit.missing:
            return
        if unit.due > now:
            self._at(unit.due, unit.wake)
            return
        del self._claimed[warp]
        self._occupy(warp, now + unit.us, partial(self._end_tasks, unit.tasks))

    def _occupy(self, warp: int, until: float, act: Callable[[float], None]) -> None:
        self._busy_warps.add(warp)

        def end(now: float) -> None:
            self._busy_warps.remove(warp)
            act(now)
            self._run_warp(warp, now)

        self._at(until, end)

    def _end_forward(self, task: int, now: float) -> None:
        self._parts[task] -= 1
        if self._parts[task] == 0:
            self._complete(task, now)

    def _end_tasks(self, tasks: Iterable[int], now: float) -> None:
        for task in tasks:
            self._complete(task, now)
