"""Why no agent can go on: who waits for what, who would notify it, and the circle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from etc_dist.errors import DeadlockError
from etc_dist.ir.call import Call
from etc_dist.ir.expr import Value
from etc_dist.ir.graph import GraphFunction
from etc_dist.runtime.cpu.arrays import Array
from etc_dist.runtime.cpu.task import Element, Need, Task
from etc_dist.runtime.cpu.team import Agent, Team

LISTED = 16
"""Blocked tasks that a message names; the others are counted."""

Holder = tuple[int, int]
"""An agent: its rank and number."""


def explain(
    graph: GraphFunction, envs: Sequence[Mapping[str, Any]], teams: Sequence[Team]
) -> DeadlockError:
    """The error for `teams`, the present epoch of every rank, none of whose agents can
    do anything."""
    search = _Search(graph, envs, teams)
    blocked = [(team, task) for team in teams for task in team.held]
    lines = [search.line(team, task) for team, task in blocked[:LISTED]]
    if len(blocked) > LISTED:
        lines.append(f"... and {len(blocked) - LISTED} more")
    circle = search.circle()
    if circle:
        lines += ["in a circle:", *circle]
    epochs = sorted({team.epoch for team in teams if not team.done})
    return DeadlockError(
        "no worker can go on",
        where=f"graph {graph.name}, epoch {', '.join(map(str, epochs))}",
        wanted="every wait met in the end",
        got="\n          ".join(lines),
        fix="correct the events' counts and coordinate maps, or the order of the tasks",
    )


class _Search:
    """Edges from a blocked agent to those whose tasks would unblock it."""

    def __init__(
        self,
        graph: GraphFunction,
        envs: Sequence[Mapping[str, Any]],
        teams: Sequence[Team],
    ):
        self._graph, self._envs, self._teams = graph, envs, teams
        self._agents = [[*team.agents, *team.waiting] for team in teams]

    def line(self, team: Team, task: Task) -> str:
        need = task.need
        assert need is not None  # a task that lacks nothing would have run
        coming = [
            f"{self._name(owner, task)}" for owner, task in self._notifiers(team, need)
        ]
        left = f"{', '.join(coming[:3])}{', ...' if len(coming) > 3 else ''}"
        return f"{task.record()}; left to notify it: {left or 'no task'}"

    def circle(self) -> list[str]:
        """A closed walk of waits, one line each; empty if there is none."""
        done: set[Holder] = set()
        for team, agents in zip(self._teams, self._agents, strict=True):
            for agent in agents:
                found = self._walk((team.rank, agent.number), done)
                if found:
                    return found
        return []

    def _walk(self, start: Holder, done: set[Holder]) -> list[str]:
        """A circle that can be reached from `start`, past those who are `done`."""
        path, texts, edges = [start], [""], [self._edges(start)]
        while path:
            following, text = next(edges[-1], (None, ""))
            if following in path:
                return [*texts[path.index(following) + 1 :], text]
            if following is None:
                done.add(path.pop())
                texts.pop()
                edges.pop()
            elif following not in done:
                path.append(following)
                texts.append(text)
                edges.append(self._edges(following))
        return []

    def _edges(self, holder: Holder) -> Iterator[tuple[Holder, str]]:
        team = self._teams[holder[0]]
        for task in self._agents[holder[0]][holder[1]].held:
            if task.need is None:
                continue
            said = f"{task.where} waits for {task.need.label}"
            if task.need.element is None:
                peer = self._teams[task.need.peer]
                for agent in peer.agents:
                    if agent.held:
                        yield (peer.rank, agent.number), f"{said}, after its last epoch"
            for other, (call, t) in self._notifiers(team, task.need):
                text = f"{said}, for {self._name(other, (call, t))}"
                for agent in self._owners(other, team.epoch, call, t):
                    yield (other.rank, agent.number), text

    def _owners(self, team: Team, epoch: int, call: Call, t: int) -> list[Agent]:
        if team.epoch < epoch:
            return [agent for agent in team.agents if agent.held]
        return team.owners(call, t)

    def _notifiers(self, team: Team, need: Need) -> list[tuple[Team, tuple[Call, int]]]:
        """The tasks that have not run and would notify what `need` is about."""
        if need.element is None:
            return []
        return [
            (other, (call, t))
            for other in self._teams
            if other.epoch <= team.epoch
            for call in self._graph.calls
            for t in self._notifying(call, other.rank, need.element)
            if other.epoch < team.epoch or (call.name, t) not in other.ran
        ]

    def _notifying(self, call: Call, rank: int, element: Element) -> list[int]:
        """The tasks of `call` on `rank` that notify `element`, as far as their maps can
        be evaluated yet."""
        env = dict(self._envs[rank])
        every = np.arange(int(call.tasks.evaluate(env)))
        try:
            return self._hits(call, rank, element, every)
        except (ArithmeticError, IndexError):
            return [t for n in every for t in self._hit(call, rank, element, int(n))]

    def _hit(self, call: Call, rank: int, element: Element, t: int) -> list[int]:
        try:
            return self._hits(call, rank, element, np.array([t]))
        except (ArithmeticError, IndexError):
            return []

    def _hits(self, call: Call, rank: int, element: Element, t: Array) -> list[int]:
        env = dict(self._envs[rank])
        env.update(call.coordinates(t, env))
        hits = np.zeros(len(t), np.bool_)
        for ref in call.notifies:
            if ref.events.name != element.name:
                continue
            target: Value = rank if ref.rank is None else ref.rank.evaluate(env)
            hit = np.broadcast_to(target == element.rank, t.shape)
            for part, wanted in zip(ref.index, element.index, strict=True):
                hit = hit & (part.evaluate(env) == wanted)
            hits |= hit
        return [int(i) for i in t[hits]]

    def _name(self, team: Team, task: tuple[Call, int]) -> str:
        call, t = task
        tile = call.coordinates(t, dict(self._envs[team.rank]))
        where = ", ".join(str(int(tile[axis.symbol.name])) for axis in call.axes)
        return f"rank {team.rank} {call.name}[{where}]"
