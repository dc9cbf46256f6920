"""Event tensors: arrays of counters that tasks notify and wait for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from etc_dist.errors import GraphError
from etc_dist.ir.expr import Comparison, Const, Expr, Symbol, substitute, wrap
from etc_dist.ir.guard import Guard, guard_of, guard_text, is_met, under

_NONE = Const(0)


@dataclass(frozen=True)
class EventTensor:
    """Counters of symbolic shape; an element is met after `expects` notifications.

    `expects` is an expression of the element's coordinates `axes`; it may load from a
    runtime tensor of the rank that waits. Peers may notify a cross-rank event tensor
    through `on(rank)`. A task waits only for elements of its rank. `carried_by`: the
    flagged tensor whose words notify; on GPUs nothing is counted."""

    name: str
    shape: tuple[Expr, ...]
    axes: tuple[Symbol, ...]
    expects: Expr
    cross_rank: bool
    carried_by: str = ""

    __iter__ = None  # else Python would index without end

    def __getitem__(self, index: Any) -> EventRef:
        return _reference(self, None, index)

    def on(self, rank: Expr | int) -> RemoteEvents:
        """The same event tensor on `rank`. Raises GraphError unless it is
        cross-rank."""
        if not self.cross_rank:
            raise GraphError(
                f"event tensor {self.name} is not cross-rank",
                where=f"{self.name}.on({rank})",
                wanted="g.events(..., cross_rank=True)",
                got="an event tensor of one rank",
                fix="declare it cross-rank, or drop .on(...)",
            )
        return RemoteEvents(self, wrap(rank, f"{self.name}.on(...)"))

    def expected(self, coordinate: tuple[Any, ...], env: dict[str, Any]) -> Any:
        """Internal: notifications that the elements at `coordinate` need (int or
        array)."""
        axes = {a.name: c for a, c in zip(self.axes, coordinate, strict=True)}
        return self.expects.evaluate({**env, **axes})

    def __str__(self) -> str:
        axes = ", ".join(
            f"{a}: {n}" for a, n in zip(self.axes, self.shape, strict=True)
        )
        scope = "cross-rank " if self.cross_rank else ""
        by = f", carried by {self.carried_by}" if self.carried_by else ""
        return f"{scope}events {self.name} [{axes}] expects {self.expects}{by}"


@dataclass(frozen=True)
class RemoteEvents:
    """A cross-rank event tensor on `rank`; index it to name an element."""

    events: EventTensor
    rank: Expr

    __iter__ = None  # else Python would index without end

    def __getitem__(self, index: Any) -> EventRef:
        return _reference(self.events, self.rank, index)


@dataclass(frozen=True)
class EventRef:
    """An element of an event tensor, as expressions of a task's coordinates. `rank` is
    None for the task's rank. Tasks for which some of `guards` is not met neither wait
    for it nor notify it."""

    events: EventTensor
    rank: Expr | None
    index: tuple[Expr, ...]
    guards: tuple[Guard, ...] = ()

    def when(self, condition: Comparison | Expr | bool) -> EventRef:
        """This element for tasks for which `condition` holds; others neither wait for
        it nor notify it, and do not evaluate its index.

        condition: a comparison (<, <=, >, >= of expressions, or equal()), or an
        expression of coordinates, dims and loads, which holds unless it is 0. All
        conditions of `.when(a).when(b)` must hold."""
        guard = guard_of(condition, f"{self}.when(...)")
        if is_met(guard):
            return self
        return replace(self, guards=(*self.guards, guard))

    def guarded(self, expr: Expr, default: Expr = _NONE) -> Expr:
        """Internal: `expr` for tasks that wait for the element or notify it, else
        `default`."""
        return under(self.guards, expr, default)

    @cached_property
    def holds(self) -> Expr:
        """Internal: 1 for tasks that wait for the element or notify it, else 0."""
        return self.guarded(Const(1))

    @cached_property
    def expects(self) -> Expr:
        """The notifications that a task waits for."""
        names = (a.name for a in self.events.axes)
        axes = dict(zip(names, self.index, strict=True))
        return self.guarded(substitute(self.events.expects, axes))

    @cached_property
    def parts(self) -> tuple[Expr, ...]:
        """Internal: the expressions that select the element, and whether it is
        selected."""
        parts = (*self.index, *(() if self.rank is None else (self.rank,)))
        if not self.guards:
            return parts
        return (self.holds, *map(self.guarded, parts))

    @cached_property
    def is_loaded(self) -> bool:
        """Internal: whether the selected element depends on a runtime tensor."""
        return any(e.is_loaded for e in self.parts)

    def __str__(self) -> str:
        where = "" if self.rank is None else f".on({self.rank})"
        element = f"{self.events.name}{where}[{', '.join(map(str, self.index))}]"
        if not self.guards:
            return element
        return f"{element} when {' and '.join(map(guard_text, self.guards))}"


def make_axes(name: str, count: int) -> tuple[Symbol, ...]:
    """The coordinate symbols of an event tensor's elements."""
    return tuple(Symbol(f"{name}_{k}", "coordinate") for k in range(count))


def _reference(events: EventTensor, rank: Expr | None, index: Any) -> EventRef:
    parts = index if isinstance(index, tuple) else (index,)
    if len(parts) != len(events.shape):
        raise GraphError(
            f"an element of event tensor {events.name} has the wrong number of axes",
            where=f"{events.name}[...]",
            wanted=f"{len(events.shape)} indices",
            got=f"{len(parts)}",
            fix="index every axis",
        )
    where = f"{events.name}[...]"
    return EventRef(events, rank, tuple(wrap(p, where) for p in parts))
