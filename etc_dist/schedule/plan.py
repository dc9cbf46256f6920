"""Plans: which worker takes which task when, as arithmetic and never as a table.

A lane's tasks are the tasks of its calls, one call after the other. A *unit* is what
the lane hands out at once: one task, or, in a lane whose workers run in clusters of
two, one task that both run together or two tasks that each runs alone.

A strided lane gives unit u to cluster u % clusters. A ticket lane gives units out in
order to whoever asks next: several warps of every worker, and the tensor lane's warps
once their own lane is empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from etc_dist.ir.expr import Const, Expr, ceildiv
from etc_dist.ir.graph import Call, GraphFunction

STRIDED, TICKET = "strided", "ticket"


@dataclass(frozen=True)
class Lane:
    """A lane's calls in order, how its units are handed out, and its cluster size."""

    name: str
    calls: tuple[Call, ...]
    policy: str
    cluster: int

    def units(self, call: Call) -> Expr:
        """Units of `call` on one rank."""
        if call.function.cluster == self.cluster:
            return call.tasks
        return ceildiv(call.tasks, self.cluster)

    @property
    def total(self) -> Expr:
        """Units of the whole lane on one rank."""
        count: Expr = Const(0)
        for call in self.calls:
            count = count + self.units(call)
        return count


@dataclass(frozen=True)
class Plan:
    """A scheduled graph function. `workers` resident workers a rank, all of which run
    every lane; the number of workers is a launch argument, not part of the plan."""

    graph: GraphFunction
    schedule: str
    lanes: tuple[Lane, ...]

    @property
    def cluster(self) -> int:
        """Workers of a cluster: the largest that any lane asks for."""
        return max((lane.cluster for lane in self.lanes), default=1)

    def lane(self, name: str) -> Lane:
        return next(lane for lane in self.lanes if lane.name == name)

    def unit(
        self, lane: Lane, index: int, env: dict[str, Any]
    ) -> Iterator[tuple[Call, int]]:
        """The tasks (call, t) of a lane's unit; two where two workers run one each."""
        for call in lane.calls:
            units = int(lane.units(call).evaluate(env))
            if index >= units:
                index -= units
                continue
            if call.function.cluster == lane.cluster:
                yield call, index
            else:
                tasks = int(call.tasks.evaluate(env))
                first = index * lane.cluster
                for t in range(first, min(first + lane.cluster, tasks)):
                    yield call, t
            return

    def show(self, workers: int | None = None, **dims: int) -> str:
        """Stable text; with dims and workers also the numbers at that shape."""
        env = self.graph.environment(dims, 0) if dims else None
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
                if env is not None:
                    lines.append(f"    = {int(lane.units(call).evaluate(env))}")
            if env is not None and workers and lane.policy == STRIDED:
                total = int(lane.total.evaluate(env))
                groups = workers // lane.cluster
                lines.append(
                    f"  {total} units = {total / groups:.2f} waves of {groups}"
                )
        return "\n".join(lines) + "\n"
