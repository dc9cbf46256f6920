"""The agents of one rank: which takes which task when, and how a task is done.

An agent is what runs one task at a time: in the tensor lane a cluster of workers, in
the transfer lane a worker's share of it. It holds what it drew until that is done.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from etc_dist.errors import ArgumentError, WaitRecord
from etc_dist.ir.call import TASK, Call
from etc_dist.ir.event import EventRef
from etc_dist.ir.expr import Expr
from etc_dist.ir.loads import counted
from etc_dist.runtime.cpu.arrays import Array
from etc_dist.runtime.cpu.body import run_body
from etc_dist.runtime.cpu.queue import Queue
from etc_dist.runtime.cpu.task import Element, Need, Resolver, Task, place, stray
from etc_dist.runtime.faults import not_empty, out_of_range
from etc_dist.schedule.plan import QUEUE, STRIDED, TICKET, Lane, Plan

TOLD = 16
"""Groups that are not ready, of a rank, that an error names."""


class Memory(Protocol):
    """What a rank reaches: its arrays and events, and those of its peers."""

    def array(self, name: str, rank: int) -> Array:
        """The storage of a tensor on `rank`."""

    def have(self, element: Element) -> int:
        """Notifications that one of this rank's elements got in this epoch."""

    def counts(self, name: str, rank: int) -> Array:
        """The same for all elements of an event tensor on this rank, `rank`, in its
        shape."""

    def notify(self, element: Element) -> None:
        """Add one to an element of any rank."""

    def started(self, rank: int) -> int:
        """The epoch that `rank` last started; epochs count from 1."""


class Observer:
    """Sees a task's life, moment by moment; this one ignores it."""

    def wait(self, task: Task) -> None:
        """The waits that load nothing are met; next, the others are evaluated."""

    def begin(self, task: Task) -> None:
        """All waits are met; next, what it touches and notifies is evaluated."""

    def enter(self, task: Task) -> None:
        """All is known and peers may be entered; next, the body runs."""

    def leave(self, task: Task) -> None:
        """The body is done."""

    def notify(self, task: Task, element: Element) -> None:
        """`task` is about to notify `element`."""


@dataclass(eq=False)
class Agent:
    """`members` workers beginning with `worker` that take units of `lane` together.

    `component` is the first of its `members` positions in the rank's vector clocks.
    """

    number: int
    worker: int
    lane: Lane
    members: int
    component: int
    held: list[Task] = field(default_factory=list)
    done: bool = False


def make_agents(plan: Plan, workers: int) -> list[Agent]:
    """The agents of one rank, alike on every rank."""
    if workers < 1 or workers % plan.cluster:
        raise ArgumentError(
            "these workers cannot run the plan",
            where=f"plan of graph {plan.graph.name}",
            wanted=f"a positive multiple of {plan.cluster}, the plan's cluster",
            got=f"{workers} workers",
            fix="choose another number of workers (ETC_DIST_CPU_WORKERS)",
        )
    agents: list[Agent] = []
    component = 0
    for lane in plan.lanes:
        for worker in range(0, workers, lane.cluster):
            agents.append(Agent(len(agents), worker, lane, lane.cluster, component))
            component += lane.cluster
    return agents


class Team:
    """One rank's agents in one epoch, over `memory`.

    `env` holds the rank's dims, derived numbers and what expressions load. `seed`
    decides who gets which unit of a queue lane.
    """

    def __init__(
        self,
        plan: Plan,
        env: Mapping[str, Any],
        rank: int,
        epoch: int,
        workers: int,
        memory: Memory,
        observers: Sequence[Observer] = (),
        seed: int = 0,
    ):
        self.plan, self.rank, self.epoch, self.env = plan, rank, epoch, dict(env)
        self.agents = make_agents(plan, workers)
        self.ran: set[tuple[str, int]] = set()
        """(call, t) of the tasks that are done."""
        self._memory, self._observers = memory, observers
        self._workers = workers
        self._tickets = {lane.name: 0 for lane in plan.lanes}
        self._units = [self._take(agent) for agent in self.agents]
        shapes = {
            events.name: tuple(int(n.evaluate(self.env)) for n in events.shape)
            for events in plan.graph.events
        }
        self._resolver = Resolver(rank, plan.graph.world_size, shapes)
        loaded = [name for name in self.env if name.startswith("@")]
        arrays = {name: memory.array(name[1:], rank) for name in loaded}
        self._plain = {**self.env, **arrays}
        chance = random.Random(f"{seed} {rank} {epoch}")

        def counts(name: str) -> Array:
            return memory.counts(name, rank)

        self._queues = {
            lane.name: Queue(lane, self._plain, counts, chance)
            for lane in plan.lanes
            if lane.policy == QUEUE
        }
        self._waiting: list[Agent] | None = None
        self._runs: defaultdict[str, tuple[list[tuple[int, int]], list[Task]]]
        self._runs = defaultdict(lambda: ([], []))

    @property
    def done(self) -> bool:
        return all(agent.done for agent in self.agents)

    @property
    def held(self) -> Iterator[Task]:
        """The tasks in the agents' hands, and one of each group that is not ready."""
        for agent in (*self.agents, *self.waiting):
            yield from agent.held

    @property
    def waiting(self) -> list[Agent]:
        """For each group of a queue lane that is not ready, an agent that does not
        exist and holds the first of its tasks."""
        if self._waiting is None:
            number, self._waiting = len(self.agents), []
            for name, queue in self._queues.items():
                for call, t in queue.waiting():
                    lane = self.plan.lane(name)
                    agent = Agent(number, -1, lane, 1, 0, [self._task(lane, call, t)])
                    self._waiting.append(agent)
                    number += 1
        return self._waiting

    def records(self) -> list[WaitRecord]:
        """What the held tasks wait for, and the first of the groups that are not
        ready."""
        held = (a.held for a in (*self.agents, *self.waiting[:TOLD]))
        records = (task.record() for tasks in held for task in tasks)
        return [record for record in records if record is not None]

    def step(self, agent: Agent) -> bool:
        """Let `agent` do one thing: draw a unit, run a task of it, or end.

        False if it can do nothing now.
        """
        drew = not agent.held
        self._waiting = None
        if drew:
            unit = self._draw(agent)
            if unit is None:
                return False
            agent.held, agent.done = unit, not unit
        for task in agent.held:
            if self._ready(task):
                agent.held.remove(task)
                self._run(task)
                return True
        return drew

    def owners(self, call: Call, t: int) -> list[Agent]:
        """The agents that hold a task or may still draw it."""
        holders = [
            agent
            for agent in self.agents
            if any(k.call is call and k.t == t for k in agent.held)
        ]
        lane = self.plan.lane(call.function.lane)
        if not holders and lane.policy == QUEUE:
            size = int(lane.group_size(call).evaluate(self.env))
            for agent in self.waiting:
                task = agent.held[0]
                if task.call is call and task.t // size == t // size:
                    return [agent]
        if holders or lane.policy != STRIDED:
            takers = [a for a in self.agents if lane in self._lanes(a)]
            return holders or [a for a in takers if not a.done]
        unit, _ = lane.place(call, t, self.env)
        unit += int(lane.first_unit(call).evaluate(self.env))
        cluster = unit % (self._workers // lane.cluster)
        return [
            agent
            for agent in self.agents
            if agent.lane is lane and agent.worker == cluster * lane.cluster
        ]

    def _draw(self, agent: Agent) -> list[Task] | None:
        """The agent's next unit: [] if there is none left for it, None if none is ready
        yet."""
        if agent.lane.policy != QUEUE:
            return next(self._units[agent.number], [])
        for lane in self._lanes(agent):
            queue = self._queues[lane.name]
            if queue.left:
                index = queue.take()
                return None if index is None else self._unit(agent, lane, index)
        return []

    def _take(self, agent: Agent) -> Iterator[list[Task]]:
        """The units that `agent` gets of lanes without queues, each computed when it
        asks for it."""
        own = agent.lane
        if own.policy == STRIDED:
            clusters = self._workers // own.cluster
            first, total = agent.worker // own.cluster, self._total(own)
            for index in range(first, total, clusters):
                yield self._unit(agent, own, index)
        for lane in self._lanes(agent):
            if lane.policy != TICKET:
                continue
            total = self._total(lane)
            while self._tickets[lane.name] < total:
                index = self._tickets[lane.name]
                self._tickets[lane.name] += 1
                yield self._unit(agent, lane, index)

    def _lanes(self, agent: Agent) -> Sequence[Lane]:
        """Those that `agent` takes units of: its own, and then the later ones."""
        return self.plan.lanes[self.plan.lanes.index(agent.lane) :]

    def _total(self, lane: Lane) -> int:
        return int(lane.total.evaluate(self.env))

    def _unit(self, agent: Agent, lane: Lane, index: int) -> list[Task]:
        tasks = []
        for member, (call, t) in enumerate(self.plan.unit(lane, index, self.env)):
            together = call.function.cluster == lane.cluster
            count = lane.cluster if together else 1
            first = agent.component + member
            task = Task(
                self.rank,
                agent.worker + member,
                agent.lane.name,
                call,
                t,
                self.epoch,
                tuple(range(first, first + count)),
                place(call, t, self.env),
            )
            tasks.append(task)
        return tasks

    def _task(self, lane: Lane, call: Call, t: int) -> Task:
        """A task that no agent holds, and what it lacks."""
        env = place(call, t, self._plain)
        task = Task(self.rank, -1, lane.name, call, t, self.epoch, (0,), env)
        for ref in (*call.free_waits, *call.loaded_waits):
            element = self._resolver.element(ref, task)
            want = self._resolver.expected(ref, task)
            have = self._memory.have(element)
            if have < want:
                task.need = Need(element, self.rank, have, want)
                break
        return task

    def _ready(self, task: Task) -> bool:
        """Whether `task` may run now; what it lacks is left in `task.need`."""
        if task.waits is None:
            task.waits = tuple(self._waits(task, task.call.free_waits))
        if not self._met(task):
            return False
        if not task.knows_waits:
            self._learn_waits(task)
            if not self._met(task):
                return False
        if not task.begun:
            self._begin(task)
        for peer in sorted(task.peers):
            started = self._memory.started(peer)
            if started < self.epoch:
                task.need = Need(None, peer, started, self.epoch)
                return False
        return True

    def _met(self, task: Task) -> bool:
        task.need = None
        for element, want in task.waits or ():
            have = self._memory.have(element)
            if have < want:
                task.need = Need(element, self.rank, have, want)
                return False
        return True

    def _learn_waits(self, task: Task) -> None:
        task.knows_waits = True
        loaded = task.call.loaded_waits
        if loaded:
            for observer in self._observers:
                observer.wait(task)
            task.waits = (*(task.waits or ()), *self._waits(task, loaded))

    def _waits(
        self, task: Task, refs: Sequence[EventRef]
    ) -> Iterator[tuple[Element, int]]:
        for ref in refs:
            yield self._resolver.element(ref, task), self._resolver.expected(ref, task)

    def _begin(self, task: Task) -> None:
        task.begun = True
        for observer in self._observers:
            observer.begin(task)
        access, call = self._resolver.access, task.call
        task.reads = tuple(access(region, task) for region in call.reads)
        task.writes = tuple(access(region, task) for region in call.writes)
        task.notifies = tuple(self._resolver.element(r, task) for r in call.notifies)
        task.most = {
            element: self._resolver.expected(ref, task)
            for ref, element in zip(call.notifies, task.notifies, strict=True)
            if any(count.is_loaded for count in counted(ref))
        }
        if call.empty_until is not None:
            self._check_runs(task, call.empty_until)

    def _check_runs(self, task: Task, empty_until: Expr) -> None:
        """Refuse a task that is not empty, but must be by an earlier one's
        `empty_until`, whichever of the two begins first."""
        runs, busy = self._runs[task.call.name]
        if task.idle:
            until = int(empty_until.evaluate({**task.env, TASK.name: task.t}))
            runs.append((task.t, until))
            wrong = [other for other in busy if task.t < other.t < until]
        else:
            busy.append(task)
            wrong = [task for first, until in runs if first < task.t < until]
        if wrong:
            stray = wrong[0]
            row = stray.rank, stray.worker, stray.lane, stray.label
            raise out_of_range([not_empty(*row)])

    def _run(self, task: Task) -> None:
        for observer in self._observers:
            observer.enter(task)
        if not task.idle:
            self._work(task)
        for observer in self._observers:
            observer.leave(task)
        for element, most in task.most.items():
            count = self._memory.have(element) + task.notifies.count(element)
            if count > most:
                wanted = f"{most} notifications of {element}, as many as its count says"
                raise stray(task, wanted, f"{count} or more")
        for element in task.notifies:
            for observer in self._observers:
                observer.notify(task, element)
            self._memory.notify(element)
        self.ran.add((task.call.name, task.t))

    def _work(self, task: Task) -> None:
        views = [
            # NOTE: the ellipsis keeps a view where every axis is one integer.
            self._memory.array(access.tensor.name, access.rank)[(*access.index, ...)]
            for access in (*task.reads, *task.writes)
        ]
        run_body(task, views)
