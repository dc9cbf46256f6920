"""All ranks inside one process: one seeded, replayable step of one agent at a time."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from etc_dist.errors import ArgumentError, GraphError
from etc_dist.ir.dims import whole_dims
from etc_dist.runtime.cpu import arrays as storage
from etc_dist.runtime.cpu.arrays import Array
from etc_dist.runtime.cpu.deadlock import explain
from etc_dist.runtime.cpu.races import RaceChecker, WatchedLoads
from etc_dist.runtime.cpu.task import Element, Task
from etc_dist.runtime.cpu.team import Observer, Team, make_agents
from etc_dist.runtime.trace import TaskRecord, Trace
from etc_dist.schedule.plan import Plan, require_plan

STEP_LIMIT = 10_000_000
TASK_NS = 1000
"""How long every task takes in a simulation's trace."""


@dataclass(frozen=True)
class Simulation:
    """What a simulation left: outputs of the last epoch by rank, a trace of all
    epochs in simulated time, and the actors in the order in which they acted."""

    outputs: list[dict[str, Array]]
    trace: Trace
    interleaving: list[int]


def simulate(
    plan: Plan,
    inputs: Sequence[Mapping[str, Array]],
    dims: Mapping[str, int],
    *,
    seed: int = 0,
    workers: int = 4,
    epochs: int = 1,
    check: bool = True,
    step_limit: int = STEP_LIMIT,
    interleaving: Sequence[int] | None = None,
) -> Simulation:
    """Run `plan` on `inputs`, by rank and tensor name, `epochs` times over.

    `seed` chooses who acts next, and who gets which unit of a queue; `interleaving`, of
    an earlier simulation with the same seed, repeats it.
    Ranks are not held together between epochs. In the trace every task takes one
    microsecond and ranks and agents run side by side.

    Raises ArgumentError for inputs that do not fit, DeadlockError where no agent can
    go on, and with `check` RaceError and GraphError as `RaceChecker` says.
    """
    run = _Run(plan, inputs, dims, workers, epochs, check, seed)
    if interleaving is None:
        run.choose(random.Random(seed), step_limit)
    else:
        run.replay(interleaving)
    trace = Trace.of(run.clock.records, [f"Simulated: a task takes {TASK_NS} ns."])
    return Simulation(run.outputs, trace, run.interleaving)


class ProcessMemory:
    """All ranks' arrays and events in this process."""

    def __init__(self, plan: Plan, envs: Sequence[Mapping[str, Any]]):
        self._shapes = [
            {events.name: storage.shape_of(events, env) for events in plan.graph.events}
            for env in envs
        ]
        self._counts = [self._zeros(rank) for rank in range(len(envs))]
        self.arrays: list[dict[str, Array]] = [{} for _ in envs]
        self.epochs = [0] * len(envs)

    def start(self, rank: int) -> None:
        """`rank` starts its next epoch, with its counters at zero."""
        self._counts[rank] = self._zeros(rank)
        self.epochs[rank] += 1

    def array(self, name: str, rank: int) -> Array:
        return self.arrays[rank][name]

    def have(self, element: Element) -> int:
        return int(self._counts[element.rank][element.name][element.index])

    def counts(self, name: str, rank: int) -> Array:
        return self._counts[rank][name]

    def notify(self, element: Element) -> None:
        self._counts[element.rank][element.name][element.index] += 1

    def started(self, rank: int) -> int:
        return self.epochs[rank]

    def _zeros(self, rank: int) -> dict[str, Array]:
        shapes = self._shapes[rank].items()
        return {name: np.zeros(shape, np.int64) for name, shape in shapes}


class SimulatedTime(Observer):
    """Gives every task its time, as if all agents ran side by side."""

    def __init__(self) -> None:
        self.records: list[TaskRecord] = []
        self._free: defaultdict[tuple[int, int, str], int] = defaultdict(int)
        self._notified: defaultdict[tuple[int, Element], int] = defaultdict(int)
        self._started: dict[tuple[int, int], int] = {}

    def start(self, rank: int, epoch: int) -> None:
        """An epoch of a rank starts when all of the one before has ended."""
        ends = [end for row, end in self._free.items() if row[0] == rank]
        self._started[rank, epoch] = max(ends, default=0)

    def enter(self, task: Task) -> None:
        row = (task.rank, task.worker, task.lane)
        ranks = task.peers | {task.rank}
        start = max(
            self._free[row],
            *(self._notified[task.epoch, e] for e, _ in task.waits or ()),
            *(self._started.get((rank, task.epoch), 0) for rank in ranks),
        )
        end = self._free[row] = start + TASK_NS
        name, tile = task.call.name, task.coordinate
        self.records.append(TaskRecord(*row, start, end, name, task.t, tile))

    def notify(self, task: Task, element: Element) -> None:
        end = self._free[task.rank, task.worker, task.lane]
        key = (task.epoch, element)
        self._notified[key] = max(self._notified[key], end)


class _Run:
    """The state of one simulation. An actor is an agent, counted through all ranks,
    or, beyond those, a rank that is about to start its next epoch."""

    def __init__(
        self,
        plan: Plan,
        inputs: Sequence[Mapping[str, Array]],
        dims: Mapping[str, int],
        workers: int,
        epochs: int,
        check: bool,
        seed: int,
    ):
        self._plan, self._workers, self._epochs = plan, workers, epochs
        self._seed = seed
        require_plan(plan, "simulate")
        graph = plan.graph
        ranks = range(graph.world_size)
        if len(inputs) != len(ranks):
            raise ArgumentError(
                "a simulation needs the inputs of every rank",
                where=f"graph {graph.name}",
                wanted=f"inputs of {len(ranks)} ranks",
                got=f"inputs of {len(inputs)}",
                fix="pass one mapping from name to array for each rank",
            )
        dims = whole_dims(graph, dims)
        self._envs = [graph.environment(dims, rank) for rank in ranks]
        self._bind(inputs)
        self._size = len(make_agents(plan, workers))
        components = sum(agent.members for agent in make_agents(plan, workers))
        self._checker = RaceChecker(graph, self._envs, components) if check else None
        self.clock = SimulatedTime()
        self._teams: list[Team | None] = [None for _ in ranks]
        self.interleaving: list[int] = []

    @property
    def outputs(self) -> list[dict[str, Array]]:
        names = [tensor.name for tensor in self._plan.graph.outputs()]
        return [{n: held[n] for n in names} for held in self._memory.arrays]

    def choose(self, chance: random.Random, limit: int) -> None:
        """Let actors that `chance` picks act until all ranks are through."""
        # Some seeds let one rank run far ahead of the others, others mix them.
        loyalty = chance.choice((0.0, 0.5, 0.95))
        last = 0
        while actors := self._actors():
            actor = self._pick(actors, chance, loyalty, last)
            last = self._rank_of(actor)
            if len(self.interleaving) > limit:
                raise GraphError(
                    "a simulation does not end",
                    where=f"graph {self._plan.graph.name}",
                    wanted=f"at most {limit} steps",
                    got="more",
                    fix="simulate a smaller shape or raise step_limit",
                )

    def replay(self, interleaving: Sequence[int]) -> None:
        """Let the actors of an earlier simulation act in its order."""
        for step, actor in enumerate(interleaving):
            if actor not in self._actors() or not self._act(actor):
                raise ArgumentError(
                    "the interleaving does not fit this simulation",
                    where=f"graph {self._plan.graph.name}, step {step}",
                    wanted="the same plan, dims, workers and epochs as it came from",
                    got=f"actor {actor}, which cannot act here",
                    fix="simulate with the arguments that it was recorded with",
                )

    def _bind(self, inputs: Sequence[Mapping[str, Array]]) -> None:
        graph = self._plan.graph
        self._memory = ProcessMemory(self._plan, self._envs)
        for rank, env in enumerate(self._envs):
            where = f"graph {graph.name}, rank {rank}"
            held = storage.bind(graph.inputs(), inputs[rank], env, where)
            for tensor in graph.tensors:
                if tensor.kind != "input":
                    held[tensor.name] = storage.poisoned(tensor, env)
            self._memory.arrays[rank] = held
            env.update(storage.loads(graph, held))

    def _pick(
        self, actors: list[int], chance: random.Random, loyalty: float, last: int
    ) -> int:
        """Let one of `actors` act and return it; DeadlockError if none can."""
        near = [actor for actor in actors if self._rank_of(actor) == last]
        for pool in (near, actors) if chance.random() < loyalty else (actors,):
            while pool:
                place = chance.randrange(len(pool))
                pool[place], pool[-1] = pool[-1], pool[place]
                actor = pool.pop()
                if self._act(actor):
                    return actor
        raise explain(
            self._plan.graph, self._envs, [team for team in self._teams if team]
        )

    def _actors(self) -> list[int]:
        """Those that are not through yet, blocked ones included."""
        actors = []
        for rank, team in enumerate(self._teams):
            if team is None or team.done:
                if self._memory.epochs[rank] < self._epochs:
                    actors.append(len(self._teams) * self._size + rank)
            else:
                first = rank * self._size
                actors += [first + a.number for a in team.agents if not a.done]
        return actors

    def _rank_of(self, actor: int) -> int:
        agents = len(self._teams) * self._size
        return actor // self._size if actor < agents else actor - agents

    def _act(self, actor: int) -> bool:
        """Let `actor` do one thing; False if it is blocked."""
        rank = self._rank_of(actor)
        if actor >= len(self._teams) * self._size:
            self._start(rank)
        else:
            team = self._teams[rank]
            assert team is not None
            if not team.step(team.agents[actor % self._size]):
                return False
            if team.done and self._checker:
                self._checker.finish(rank, self.outputs[rank])
        self.interleaving.append(actor)
        return True

    def _start(self, rank: int) -> None:
        graph, held, env = self._plan.graph, self._memory.arrays[rank], self._envs[rank]
        self._memory.start(rank)
        epoch = self._memory.epochs[rank]
        self.clock.start(rank, epoch)
        observers: list[Observer] = [self.clock]
        if self._checker:
            # What the last epoch left must not pass for a value of this one.
            for tensor in graph.tensors:
                if tensor.kind != "input":
                    storage.poison(held[tensor.name])
            self._checker.start(rank)
            watched = {
                f"@{tensor.name}": WatchedLoads(
                    tensor, held[tensor.name], self._checker
                )
                for tensor in graph.tensors
                if f"@{tensor.name}" in env
            }
            env = {**env, **watched}
            observers.insert(0, self._checker)
        self._teams[rank] = Team(
            self._plan,
            env,
            rank,
            epoch,
            self._workers,
            self._memory,
            observers,
            self._seed,
        )
