"""Plans: the assignment of tasks to workers, as index arithmetic, never as a table.

A lane's tasks are the tasks of its calls, one call after the other. A *unit* is what
the lane assigns at once: one task, or, in a lane whose workers run in clusters of two,
one task that both run together or two tasks that each runs alone.

A strided lane assigns unit u to cluster u % clusters. Units of a ticket lane are
claimed in order with an atomic ticket: on the tensor lane by clusters, on the transfer
lane by several warps of every worker, and by the warps of the tensor lane once that is
empty. Units of a queue lane are claimed in the same way: first those of calls without
waits, in order, then all others in the order in which they become ready. Its calls are
sorted accordingly: those without waits first.

The tasks of a call in a queue lane form *groups* that wait for the same events and so
become ready together: one group for each value of the coordinates in the waits. A unit
never spans two groups. In other lanes, and without waits, all tasks of a call are one
group.

A group may be split into *passes*, one for each value of the coordinates that precede
all coordinates in the waits. Tasks of the first pass are queued like all others, those
of a later pass after all other units of the lane and the earlier passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

from etc_dist.ir.call import Call, Coordinate, size_of
from etc_dist.ir.dims import checked_dims
from etc_dist.ir.expr import Const, Expr, ceildiv, maximum, minimum
from etc_dist.ir.graph import GraphFunction

STRIDED, TICKET, QUEUE = "strided", "ticket", "queue"


def gating_axes(call: Call) -> tuple[Coordinate, ...]:
    """The axes whose coordinates select the events that a task waits for."""
    parts = [part for ref in call.waits for part in ref.parts]
    names = {symbol.name for part in parts for symbol in part.symbols()}
    return tuple(axis for axis in call.axes if axis.symbol.name in names)


def passing_axes(call: Call) -> tuple[Coordinate, ...]:
    """The axes that precede all of `gating_axes`."""
    gating = gating_axes(call)
    first = min((call.axes.index(axis) for axis in gating), default=0)
    return call.axes[:first]


def _once_a_call(method: Callable[[Lane, Call], Expr]) -> Callable[[Lane, Call], Expr]:
    """Keep what `method` returns for each call of the lane, by the call's name."""

    @wraps(method)
    def kept(self: Lane, call: Call) -> Expr:
        made: dict[str, Expr] = self.__dict__.setdefault(f"_{method.__name__}", {})
        if call.name not in made:
            made[call.name] = method(self, call)
        return made[call.name]

    return kept


@dataclass(frozen=True)
class Lane:
    """A lane: its calls in order, the policy that assigns units, the cluster size."""

    name: str
    calls: tuple[Call, ...]
    policy: str
    cluster: int
    passing: tuple[str, ...] = ()
    """Names of the calls whose groups come in passes."""
    skipped: tuple[str, ...] = ()
    """Names of the calls whose groups are skipped if all their tasks are empty."""

    def queued(self, call: Call) -> bool:
        """Whether the units of `call` pass through the lane's queue."""
        return self.policy == QUEUE and bool(call.waits)

    def gating(self, call: Call) -> tuple[Coordinate, ...]:
        """The axes that distinguish the groups of `call`."""
        return gating_axes(call) if self.queued(call) else ()

    def groups(self, call: Call) -> Expr:
        """Groups of `call` on one rank."""
        return size_of(self.gating(call))

    @_once_a_call
    def group_size(self, call: Call) -> Expr:
        """Tasks of a group of `call`."""
        gating = self.gating(call)
        return size_of([axis for axis in call.axes if axis not in gating])

    def share(self, call: Call) -> int:
        """Tasks of a unit of `call`; the last unit of a group may have fewer."""
        return self.cluster // call.function.cluster

    @_once_a_call
    def group_units(self, call: Call) -> Expr:
        """Units of a group of `call`."""
        share = self.share(call)
        size = self.group_size(call)
        return size if share == 1 else ceildiv(size, share)

    def passes(self, call: Call) -> Expr:
        """Passes of each group of `call`."""
        return size_of(passing_axes(call) if call.name in self.passing else ())

    def pass_units(self, call: Call) -> Expr:
        """Units of a group of `call` in each pass."""
        if call.name not in self.passing:
            return self.group_units(call)
        apart = (*self.gating(call), *passing_axes(call))
        return size_of([axis for axis in call.axes if axis not in apart])

    def later_parts(self) -> Iterator[tuple[Call, Expr, Expr]]:
        """The parts of the queue after the first one, one for each call with later
        passes: the call, its first slot there, and the units of each pass."""
        place = self.first_part
        for call in self.calls:
            if call.name in self.passing:
                units = self.groups(call) * self.pass_units(call)
                yield call, place, units
                place = place + maximum(0, self.passes(call) - 1) * units

    @property
    def first_part(self) -> Expr:
        """Units that pass through the queue, without those of later passes."""
        count: Expr = Const(0)
        for call in filter(self.queued, self.calls):
            units = self.groups(call) * self.pass_units(call)
            count = count + minimum(1, self.passes(call)) * units
        return count

    @_once_a_call
    def units(self, call: Call) -> Expr:
        """Units of `call` on one rank."""
        return self.groups(call) * self.group_units(call)

    def first_unit(self, call: Call) -> Expr:
        """Units of the calls before `call` in the lane."""
        names = [c.name for c in self.calls]
        return self._sum(self.calls[: names.index(call.name)])

    @property
    def total(self) -> Expr:
        """Units of the whole lane on one rank."""
        return self._sum(self.calls)

    @property
    def initial(self) -> Expr:
        """Units that are ready from the start: those of calls without waits."""
        return self._sum([c for c in self.calls if not self.queued(c)])

    def place(self, call: Call, t: Any, env: dict[str, Any]) -> tuple[Any, Any]:
        """The call's unit that has task `t`, and the task's index in that unit; `t` is
        an int or an array."""
        share, size = self.share(call), int(self.group_size(call).evaluate(env))
        units = int(self.group_units(call).evaluate(env))
        group, member = t // max(1, size), t % max(1, size)
        return group * units + member // share, member % share

    def tasks(self, call: Call, unit: int, env: dict[str, Any]) -> range:
        """The tasks of a unit of the call."""
        share, size = self.share(call), int(self.group_size(call).evaluate(env))
        group, part = divmod(unit, int(self.group_units(call).evaluate(env)))
        first = part * share
        return range(group * size + first, group * size + min(first + share, size))

    def _sum(self, calls: Sequence[Call]) -> Expr:
        count: Expr = Const(0)
        for call in calls:
            count = count + self.units(call)
        return count


@dataclass(frozen=True)
class Plan:
    """A scheduled graph function. Every worker runs all lanes. The number of resident
    workers is a launch argument, not part of the plan."""

    graph: GraphFunction
    schedule: str
    lanes: tuple[Lane, ...]

    @property
    def cluster(self) -> int:
        """Workers of a cluster: the largest cluster of any lane."""
        return max((lane.cluster for lane in self.lanes), default=1)

    def lane(self, name: str) -> Lane:
        return next(lane for lane in self.lanes if lane.name == name)

    def unit(
        self, lane: Lane, index: int, env: dict[str, Any]
    ) -> Iterator[tuple[Call, int]]:
        """The tasks (call, t) of a lane's unit; two if two workers run one each."""
        for call in lane.calls:
            units = int(lane.units(call).evaluate(env))
            if index >= units:
                index -= units
                continue
            for t in lane.tasks(call, index, env):
                yield call, t
            return

    def show(self, workers: int | None = None, **dims: int) -> str:
        """Stable text; with dims and workers, also the numbers at that shape."""
        graph = self.graph
        env = graph.environment(checked_dims(graph, dims), 0) if dims else None
        lines = [f"plan {self.graph.name} ({self.schedule})"]
        if any(e.cross_rank for e in self.graph.events):
            lines.append(
                "handshake: every worker group enters a peer's memory only after that "
                "peer has started the same epoch"
            )
        for lane in self.lanes:
            lines.append(f"lane {lane.name}: {lane.policy}, cluster {lane.cluster}")
            for call in lane.calls:
                lines.append(f"  {call.name}: {lane.units(call)} units")
                if lane.queued(call):
                    gating = ", ".join(str(a.symbol) for a in lane.gating(call))
                    lines[-1] += f", {lane.groups(call)} groups by ({gating})"
                if call.name in lane.passing:
                    lines[-1] += f" in {lane.passes(call)} passes"
                if call.name in lane.skipped:
                    lines[-1] += ", empty ones are skipped"
                if env is not None:
                    lines.append(f"    = {int(lane.units(call).evaluate(env))}")
            if env is not None and workers and lane.policy == STRIDED:
                total = int(lane.total.evaluate(env))
                groups = workers // lane.cluster
                lines.append(
                    f"  {total} units = {total / groups:.2f} waves of {groups}"
                )
        return "\n".join(lines) + "\n"
