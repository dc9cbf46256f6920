"""Graphs with a wait less, or with one for another turn of a loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from etc_dist.cache import Cache
from etc_dist.ir import Expr, GraphFunction, equal, select
from etc_dist.schedule import SCHEDULES
from etc_dist.settings import Settings
from etc_dist.verify.verify import verify
from tests.conftest import kept_proof
from tests.refusals import refused
from tests.run_records import verify_once


def change(graph: GraphFunction, name: str, **fields: Any) -> GraphFunction:
    """`graph` with other `fields` in the call `name`."""
    calls = (replace(c, **fields) if c.name == name else c for c in graph.calls)
    return replace(graph, calls=tuple(calls))


@dataclass
class Proved:
    """A graph that is correct at `dims`, and its variants."""

    graph: GraphFunction
    dims: Mapping[str, int]
    tensors: Mapping[str, Any] | None = None

    def call(self, name: str) -> Any:
        return next(call for call in self.graph.calls if call.name == name)

    @property
    def waits(self) -> list[tuple[str, int]]:
        """The call and the number of each wait."""
        return [(c.name, n) for c in self.graph.calls for n in range(len(c.waits))]

    def check(self, schedule: str, graph: GraphFunction | None = None) -> None:
        plan = SCHEDULES[schedule](graph or self.graph)
        if graph is not None:
            verify(plan, self.dims, 4, self.tensors)
        elif self.tensors is None:
            kept_proof(plan, self.dims, 4)
        else:
            verify_once(Cache(Settings.load().cache))(plan, self.dims, 4, self.tensors)

    def fault(self, schedule: str, name: str, **fields: Any) -> str:
        """What the proof of the graph finds with other fields of a call."""
        graph = change(self.graph, name, **fields)
        return str(refused(lambda: self.check(schedule, graph), ""))

    def lacks(self, schedule: str, name: str, wait_idx: int) -> str:
        """What it finds without a wait: the call, or the event."""
        waits = self.call(name).waits
        text = self.fault(
            schedule, name, waits=waits[:wait_idx] + waits[wait_idx + 1 :]
        )
        assert f"{name}[" in text or waits[wait_idx].events.name in text
        return text

    def before(
        self, schedule: str, name: str, number: int, loop: int, turn: int
    ) -> str:
        """What it finds if, in one turn of a loop, a wait is for the turn before."""
        waits = list(self.call(name).waits)
        index: list[Expr] = list(waits[number].index)
        index[loop] = select(equal(index[loop], turn), turn - 1, index[loop])
        waits[number] = replace(waits[number], index=tuple(index))
        return self.fault(schedule, name, waits=tuple(waits))
