"""The agents of one rank: which takes which task when, and how a task is done.

An agent is what runs one task at a time: in a strided lane a cluster of workers, in
the ticket lane a worker's share of it. It holds what it drew until that is done.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from etc_dist.errors import ArgumentError, WaitRecord
from etc_dist.ir.graph import Call
from etc_dist.runtime.cpu.arrays import Array
from etc_dist.runtime.cpu.task import Element, Need, Resolver, Task, place
from etc_dist.schedule.plan import STRIDED, TICKET, Lane, Plan


class Memory(Protocol):
    """What a rank reaches: its arrays and events, and those of its peers."""

    def array(self, name: str, rank: int) -> Array:
        """The storage of a tensor on `rank`."""

    def have(self, element: Element) -> int:
        """Notifications that one of this rank's elements got in this epoch."""

    def notify(self, element: Element) -> None:
        """Add one to an element of any rank."""

    def started(self, rank: int) -> int:
        """The epoch that `rank` last started; epochs count from 1."""


class Observer:
    """Sees a task's life, moment by moment; this one ignores it."""

    def draw(self, task: Task) -> None:
        """An agent holds `task`; next, what it waits for is evaluated."""

    def begin(self, task: Task) -> None:
        """The waits are met; next, what it touches is evaluated."""

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
        members = lane.cluster if lane.policy == STRIDED else 1
        for worker in range(0, workers, members):
            agents.append(Agent(len(agents), worker, lane, members, component))
            component += members
    return agents


class Team:
    """One rank's agents in one epoch, over `memory`.

    `env` holds the rank's dims, derived numbers and what expressions load.
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

    @property
    def done(self) -> bool:
        return all(agent.done for agent in self.agents)

    @property
    def held(self) -> Iterator[Task]:
        """The tasks in the agents' hands."""
        for agent in self.agents:
            yield from agent.held

    def records(self) -> list[WaitRecord]:
        """What the held tasks wait for."""
        records = (task.record() for task in self.held)
        return [record for record in records if record is not None]

    def step(self, agent: Agent) -> bool:
        """Let `agent` do one thing: draw a unit, run a task of it, or end.

        False if it can do nothing now.
        """
        drew = not agent.held
        if drew:
            agent.held = next(self._units[agent.number], [])
            agent.done = not agent.held
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
        if holders or lane.policy == TICKET:
            return holders or [a for a in self.agents if not a.done]
        unit = t if call.function.cluster == lane.cluster else t // lane.cluster
        for earlier in lane.calls[: lane.calls.index(call)]:
            unit += int(lane.units(earlier).evaluate(self.env))
        cluster = unit % (self._workers // lane.cluster)
        return [
            agent
            for agent in self.agents
            if agent.lane is lane and agent.worker == cluster * lane.cluster
        ]

    def _take(self, agent: Agent) -> Iterator[list[Task]]:
        """The units that `agent` gets, each computed when it asks for it."""
        lane = agent.lane
        if lane.policy == STRIDED:
            clusters = self._workers // lane.cluster
            first, total = agent.worker // lane.cluster, self._total(lane)
            for index in range(first, total, clusters):
                yield self._unit(agent, lane, index)
        for lane in self.plan.lanes:
            if lane.policy != TICKET:
                continue
            total = self._total(lane)
            while self._tickets[lane.name] < total:
                index = self._tickets[lane.name]
                self._tickets[lane.name] += 1
                yield self._unit(agent, lane, index)

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

    def _ready(self, task: Task) -> bool:
        """Whether `task` may run now; what it lacks is left in `task.need`."""
        if task.waits is None:
            for observer in self._observers:
                observer.draw(task)
            task.waits = tuple(self._wait(task))
        task.need = None
        for element, want in task.waits:
            have = self._memory.have(element)
            if have < want:
                task.need = Need(element, self.rank, have, want)
                return False
        if not task.begun:
            self._begin(task)
        for peer in sorted(task.peers):
            started = self._memory.started(peer)
            if started < self.epoch:
                task.need = Need(None, peer, started, self.epoch)
                return False
        return True

    def _wait(self, task: Task) -> Iterator[tuple[Element, int]]:
        for ref in task.call.waits:
            element = self._resolver.element(ref, task)
            yield element, int(ref.events.expected(element.index, self.env))

    def _begin(self, task: Task) -> None:
        task.begun = True
        for observer in self._observers:
            observer.begin(task)
        access, call = self._resolver.access, task.call
        task.reads = tuple(access(region, task) for region in call.reads)
        task.writes = tuple(access(region, task) for region in call.writes)
        task.notifies = tuple(self._resolver.element(r, task) for r in call.notifies)

    def _run(self, task: Task) -> None:
        for observer in self._observers:
            observer.enter(task)
        views = [
            # NOTE: the ellipsis keeps a view where every axis is one integer.
            self._memory.array(access.tensor.name, access.rank)[(*access.index, ...)]
            for access in (*task.reads, *task.writes)
        ]
        try:
            task.call.function.body(*views)
        except Exception as fault:
            fault.add_note(f"in {task.where}")
            raise
        for observer in self._observers:
            observer.leave(task)
        for element in task.notifies:
            for observer in self._observers:
                observer.notify(task, element)
            self._memory.notify(element)
        self.ran.add((task.call.name, task.t))
