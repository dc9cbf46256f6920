"""Plans: the assignment of tasks to workers, as index arithmetic, never as a table.

A lane's tasks are the tasks of its calls, one call after the other, in a loop turn by
turn (a turn is one iteration). A *unit* is what the lane assigns at once: one task.

A strided lane assigns unit u to worker u % workers. Where turns wait for earlier ones,
those of at least a wave end with units of no call, up to a whole wave: so a worker has
the same tasks in every turn, whose code its SM has cached. Units of a ticket lane are
claimed in order with an atomic ticket: on the tensor lane by workers, on the transfer
lane by several warps of every worker, and by the warps of the tensor lane once that is
empty.
Units of a queue lane are claimed in the same way: first, in order, those of calls that
are not queued: without waits, then those that no other task can precede; at last all
others in the order in which they become ready. Its calls are sorted accordingly.

The tasks of a call in a queue lane form *groups* that wait for the same events and so
become ready together: one group for each value of the coordinates in the waits, and of
an axis with a loaded count. In other lanes, and if it is not queued, all tasks of a
call are one group, or those of each turn of the loops around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from typing import Any, TypeVar

from etc_dist.errors import ArgumentError
from etc_dist.ir.call import Call, Coordinate, size_of
from etc_dist.ir.dims import checked_dims, refuse_undefined
from etc_dist.ir.expr import Const, Expr, Symbol, ceildiv, select
from etc_dist.ir.graph import GraphFunction
from etc_dist.schedule.loops import Item, Loop, loops_in, nest
from etc_dist.settings import MAX_WORKERS

STRIDED, TICKET, QUEUE = "strided", "ticket", "queue"
WORKERS = Symbol("workers", "workers")
"""The number of workers of a rank, in numbers of units."""


def gating_axes(call: Call) -> tuple[Coordinate, ...]:
    """The axes whose coordinates select the events that a task waits for, and those
    that decide whether it exists."""
    parts = [part for ref in call.waits for part in ref.parts]
    names = {symbol.name for part in parts for symbol in part.symbols}
    if call.limited is not None:
        names |= {call.limited.symbol.name, *call.loop_names}
    return tuple(axis for axis in call.axes if axis.symbol.name in names)


Part = TypeVar("Part", bound=Item)


def _once(method: Callable[[Lane, Part], Expr]) -> Callable[[Lane, Part], Expr]:
    """Keep what `method` returns for each call or loop of the lane, by its name."""

    key = f"_{method.__name__}"

    @wraps(method)
    def cached_method(self: Lane, part: Part) -> Expr:
        expr_by_part: dict[str, Expr] = self.__dict__.setdefault(key, {})
        expr = expr_by_part.get(part.name)
        if expr is None:
            expr = expr_by_part[part.name] = method(self, part)
        return expr

    return cached_method


@dataclass(frozen=True)
class Lane:
    """A lane: its calls in order, the policy that assigns units."""

    name: str
    calls: tuple[Call, ...]
    policy: str
    claimed_calls: tuple[str, ...] = ()
    """In a queue lane, the names of the calls with waits that are not queued."""
    dependent_loops: tuple[str, ...] = ()
    """In a strided lane, the names of the loops whose turns wait for earlier ones."""

    def queued(self, call: Call) -> bool:
        """Whether the units of `call` pass through the lane's queue."""
        has_waits = bool(call.waits) and call.name not in self.claimed_calls
        return self.policy == QUEUE and has_waits

    @cached_property
    def items(self) -> tuple[Item, ...]:
        """The calls in their loops. A queue lane has none: calls in loops are queued,
        or wait for nothing."""
        return self.calls if self.policy == QUEUE else nest(self.calls)

    @property
    def has_loops(self) -> bool:
        """Whether any of its calls is in a loop."""
        return any(isinstance(item, Loop) for item in self.items)

    def gating(self, call: Call) -> tuple[Coordinate, ...]:
        """The axes that distinguish the groups of `call`."""
        if self.policy != QUEUE:
            return call.loop_axes
        return gating_axes(call) if self.queued(call) else ()

    def groups(self, call: Call) -> Expr:
        """Groups of `call` on one rank."""
        return size_of(self.gating(call))

    @_once
    def group_size(self, call: Call) -> Expr:
        """Tasks of a group of `call`."""
        gating = self.gating(call)
        return size_of([axis for axis in call.axes if axis not in gating])

    @_once
    def units(self, call: Call) -> Expr:
        """Units of `call` on one rank."""
        return self.groups(call) * self.group_size(call)

    @_once
    def turn_units(self, item: Item) -> Expr:
        """Units of a call or loop in one turn of the loops around it."""
        if isinstance(item, Loop):
            return item.axis.extent * self.period(item)
        return self.units(item) if self.policy == QUEUE else self.group_size(item)

    @_once
    def period(self, loop: Loop) -> Expr:
        """Units of one turn of `loop`, those of no call included."""
        num_units = self._turn(loop.items)
        if loop.name not in self.dependent_loops:
            return num_units
        whole_waves = ceildiv(num_units, WORKERS) * WORKERS
        return select(num_units < WORKERS, num_units, whole_waves)

    def at(self, env: dict[str, Any]) -> Lane:
        """The lane with numbers of units at `env`, which are evaluated once."""
        lane, loops = replace(self), [*loops_in(self.items)]
        counts: list[tuple[Any, Sequence[Item]]] = [
            (Lane.group_size, self.calls),
            (Lane.period, loops),
            (Lane.turn_units, [*self.calls, *loops]),
        ]
        for method, items in counts:
            lane.__dict__[f"_{method.__name__}"] = {
                item.name: Const(int(method(self, item).evaluate(env)))
                for item in items
            }
        return lane

    def first_unit(self, call: Call) -> Expr:
        """Units of the calls before `call` in the lane."""
        names = [c.name for c in self.calls]
        return self._sum(self.calls[: names.index(call.name)])

    @property
    def total(self) -> Expr:
        """Units of the whole lane on one rank."""
        return self._turn(self.items)

    @property
    def initial(self) -> Expr:
        """Units of calls that are not queued: they are claimed first, in order."""
        return self._sum([c for c in self.calls if not self.queued(c)])

    def position(self, call: Call, unit: Any, env: dict[str, Any]) -> Any:
        """The lane's number of the call's unit `unit`, an int or an array."""
        turn, at = divmod(unit, max(1, self._number(self.turn_units(call), env)))
        items, axes = self.items, () if self.policy == QUEUE else call.loop_axes
        for axis_idx, axis in enumerate(axes):
            loops = (item for item in items if isinstance(item, Loop))
            loop = next(loop for loop in loops if loop.axis == axis)
            extent, inner = (
                self._number(count, env)
                for count in (axis.extent, size_of(axes[axis_idx + 1 :]))
            )
            at += (
                turn
                // max(1, inner)
                % max(1, extent)
                * (self._number(self.period(loop), env))
            )
            at += self._number(self._turn(items[: items.index(loop)]), env)
            items = loop.items
        return at + self._number(self._turn(items[: items.index(call)]), env)

    def find(self, unit: int, env: dict[str, Any]) -> tuple[Call, int] | None:
        """The call of the lane's unit `unit`, and the number of the unit in the call;
        None for a unit of no call."""
        items, turn = self.items, 0
        while True:
            for item in items:
                num_units = self._number(self.turn_units(item), env)
                if unit < num_units:
                    break
                unit -= num_units
            else:
                return None
            if not isinstance(item, Loop):
                return item, turn * num_units + unit
            inner, unit = divmod(unit, self._number(self.period(item), env))
            turn = turn * self._number(item.axis.extent, env) + inner
            items = item.items

    def _number(self, expr: Expr, env: dict[str, Any]) -> int:
        return expr.value if type(expr) is Const else int(expr.evaluate(env))

    def _turn(self, items: Sequence[Item]) -> Expr:
        count: Expr = Const(0)
        for item in items:
            count = count + self.turn_units(item)
        return count

    def _sum(self, calls: Sequence[Call]) -> Expr:
        count: Expr = Const(0)
        for call in calls:
            count = count + self.units(call)
        return count


@dataclass(frozen=True)
class Choice:
    """The chosen value of a dim that no array has; `reasons()` are lines of text, none
    if those of another choice say all."""

    dim: str
    value: int
    reasons: Callable[[], Sequence[str]]


Policy = Callable[[Mapping[str, int], int], Sequence[Choice]]
"""The choices for a run, from its other dims and the number of workers. Neither the
source nor its arguments depend on them."""


@dataclass(frozen=True)
class Plan:
    """A scheduled graph function. Every worker runs all lanes. The number of resident
    workers is a launch argument, not part of the plan."""

    graph: GraphFunction
    schedule: str
    lanes: tuple[Lane, ...]
    policy: Policy | None = field(default=None, repr=False, compare=False)
    has_far: bool = False
    """Whether there are far ranks: on other hosts, without a mapping of this memory."""

    @property
    def near(self) -> int:
        """The number of ranks that map each other's memory: those of a host, or all."""
        return self.graph.local_size if self.has_far else self.graph.world_size

    @property
    def far_hosts(self) -> int:
        """The number of hosts in a program with far ranks, else 0."""
        return self.graph.world_size // self.near if self.has_far else 0

    def lane(self, name: str) -> Lane:
        """The lane of this name."""
        return next(lane for lane in self.lanes if lane.name == name)

    def expect_workers(self, workers: int) -> None:
        """ArgumentError for a number of workers that cannot run the plan."""
        if not 1 <= workers <= MAX_WORKERS:
            raise ArgumentError(
                "the number of workers does not fit the plan",
                where=f"plan of graph {self.graph.name}",
                wanted=f"from 1 to {MAX_WORKERS}",
                got=f"{workers} workers",
                fix="choose another number of workers (ETC_DIST_CPU_WORKERS)",
            )

    def chosen(self, dims: Mapping[str, int], workers: int) -> dict[str, int]:
        """All dims of a run, of which the policy chooses those that are not given."""
        choices = self.policy(dims, workers) if self.policy is not None else ()
        return {**{choice.dim: choice.value for choice in choices}, **dims}

    def show(self, workers: int | None = None, **dims: int) -> str:
        """Stable text; with dims and workers, also the numbers at that shape, and the
        choices of the policy for dims that are not given."""
        graph, reasons = self.graph, []
        if dims and workers and self.policy is not None:
            for choice in self.policy(dims, workers):
                if choice.dim not in dims:
                    choice_reasons = choice.reasons()
                    first = ": ".join(
                        [f"{choice.dim} = {choice.value}", *choice_reasons[:1]]
                    )
                    reasons += [first, *choice_reasons[1:]]
            dims = self.chosen(dims, workers)
        env = None
        if dims:
            refuse_undefined(graph, checked := checked_dims(graph, dims))
            env = graph.environment(checked, 0)
            env |= {} if workers is None else {WORKERS.name: workers}
        lines = [f"plan {self.graph.name} ({self.schedule})"]
        if any(e.cross_rank for e in self.graph.events):
            lines.append(
                "handshake: every worker group enters a peer's memory only after that "
                "peer has started the same epoch"
            )
        for lane in self.lanes:
            lines.append(f"lane {lane.name}: {lane.policy}")
            of_tasks = replace(lane, dependent_loops=())  # without units of no call
            lines += _show_items(of_tasks, lane.items, env)
            if env is not None and workers and lane.policy == STRIDED:
                total = int(lane.total.evaluate(env))
                waves = total / workers
                lines.append(f"  {total} units = {waves:.2f} waves of {workers}")
                if idle := total - int(of_tasks.total.evaluate(env)):
                    lines[-1] += f", {idle} of no call"
        return "\n".join(lines + reasons) + "\n"


def _show_items(
    lane: Lane, items: Sequence[Item], env: dict[str, Any] | None, indent: str = "  "
) -> Iterator[str]:
    """The units of calls, and of the calls of each turn of a loop."""
    for item in items:
        if isinstance(item, Loop):
            turns = f"{item.axis.extent} turns of {lane.period(item)} units"
            yield f"{indent}loop {item.name}: {turns}"
            yield from _show_items(lane, item.items, env, indent + "  ")
            continue
        num_units = lane.turn_units(item)
        text = f"{indent}{item.name}: {num_units} units"
        if lane.queued(item):
            gating = ", ".join(str(a.symbol) for a in lane.gating(item))
            text += f", {lane.groups(item)} groups by ({gating})"
        yield text
        if env is not None:
            yield f"{indent}  = {int(num_units.evaluate(env))}"
