"""Graphs of calls that only touch their operands, made by functions of a `Kit`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from etc_dist.ir import (
    DeviceFunction,
    EventTensor,
    Graph,
    GraphFunction,
    Symbol,
    Tensor,
)
from etc_dist.ir.call import Grid


def _nothing(*_: Any) -> None:
    pass


def touch(reads: int = 0, writes: int = 0, lane: str = "tensor") -> DeviceFunction:
    name = f"touch_{reads}_{writes}_{lane}"
    return DeviceFunction(name, _nothing, "touch.cuh", lane, reads, writes)


ROW = Symbol("i", "coordinate")
"""The coordinate of the tasks of `Kit.do`."""


class Kit(Graph):
    """A graph with shorter words for its parts."""

    def do(self, name: str, i: Any = 1, *, lane: str = "tensor", **call: Any) -> None:
        """A call with tasks i, or of a grid; some terms are of its function."""
        operands = len(call.get("reads", ())), len(call.get("writes", ()))
        terms = {n: call.pop(n) for n in FUNCTION_TERMS if n in call}
        function = replace(touch(*operands, lane), **terms)
        grid = i if isinstance(i, Grid) else self.grid(i=i)
        self.call(function, grid, name=name, **call)

    def event(self, name: str = "ready", *shape: Any, **options: Any) -> EventTensor:
        return self.events(name, shape or (1,), **{"expects": 1, **options})

    def x(self, *shape: Any, kind: str = "local") -> Tensor:
        """One tensor: that of the first call, which has a shape."""
        if not self._tensors:
            getattr(self, kind)("x", shape, "float32")
        return self._tensors[0]


FUNCTION_TERMS = ("roles", "reads_before_wait", "gathers", "tile")


def made(
    act: Callable[[Kit], Any], ranks: int = 1, local_size: int | None = None
) -> GraphFunction:
    """The graph that `act` makes of a kit, or returns."""
    g = Kit("body", ranks, local_size)
    graph = act(g)
    return graph if isinstance(graph, GraphFunction) else g.finish()


def backwards(g: Kit) -> None:
    """Each task waits for the next one, the last for `begin`: on one worker a deadlock
    if its order is kept."""
    begin_event = g.event("done", 9)
    g.do("begin", notifies=[begin_event[8]])
    g.do("back", 8, waits=[begin_event[ROW + 1]], notifies=[begin_event[ROW]])
    g.do("end", waits=[begin_event[0]])


def cycle(g: Kit) -> None:
    """Each rank waits for its peer, which waits for it."""
    there, back = g.event("there", cross_rank=True), g.event("back")
    g.do("a", waits=[back[0]], notifies=[there.on((g.rank + 1) % 2)[0]])
    g.do("b", lane="transfer", waits=[there[0]], notifies=[back[0]])
