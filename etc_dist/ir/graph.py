"""Graph functions: calls of device functions joined by event tensors.

@graph_function
def add_rows(g):
    m, n = g.dims("m n")
    x = g.input("x", (m, n), "float32")
    ...
    g.call(add, g.grid(i=ceildiv(m, 64)), reads=[...], writes=[...], ...)

graph = add_rows(world_size=4)      # a GraphFunction; print(graph.show())
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from etc_dist.errors import GraphError
from etc_dist.ir.event import EventRef, EventTensor, make_axes
from etc_dist.ir.expr import Const, Expr, Symbol, wrap
from etc_dist.ir.function import DeviceFunction
from etc_dist.ir.given import (
    coordinate,
    end_of_empty,
    expected_count,
    extents,
    listed,
    require,
    require_function,
)
from etc_dist.ir.loads import BOUND, refuse_loads, waiting_loads, working_loads
from etc_dist.ir.names import RESERVED
from etc_dist.ir.tensor import DTYPES, Region, Tensor

RANK = Symbol("rank", "rank")
TASK = Symbol("t", "task")

Order = Callable[[Expr], Sequence["Expr | int"]]
Until = Callable[[Expr], "Expr | int"]


@dataclass(frozen=True)
class Coordinate:
    """One axis of a call's grid: its symbol and its symbolic extent."""

    symbol: Symbol
    extent: Expr


class Grid(tuple[Symbol, ...]):
    """The coordinate symbols of a grid, unpackable; remembers the extents."""

    axes: tuple[Coordinate, ...]

    def __new__(cls, axes: Sequence[Coordinate]) -> Grid:
        grid = super().__new__(cls, [a.symbol for a in axes])
        grid.axes = tuple(axes)
        return grid


@dataclass(frozen=True)
class Call:
    """A device function over a grid of tasks.

    `order` maps the task index t (0 .. tasks - 1) to a coordinate, a bijection onto the
    grid: the sequence in which the lane takes the tasks. Task t begins no earlier than
    t times `pace` nanoseconds after its worker (0: at once). Where task t has nothing
    left to write, neither have those after it, up to `empty_until`.
    """

    name: str
    function: DeviceFunction
    axes: tuple[Coordinate, ...]
    reads: tuple[Region, ...]
    writes: tuple[Region, ...]
    waits: tuple[EventRef, ...]
    notifies: tuple[EventRef, ...]
    order: tuple[Expr, ...]
    pace: Expr
    empty_until: Expr | None = None

    @property
    def tasks(self) -> Expr:
        """The number of tasks on one rank."""
        count: Expr = Const(1)
        for axis in self.axes:
            count = count * axis.extent
        return count

    @functools.cached_property
    def free_waits(self) -> tuple[EventRef, ...]:
        """The waits that load nothing: a task waits for these first."""
        return tuple(w for w in self.waits if not (w.is_loaded or w.expects.is_loaded))

    @functools.cached_property
    def loaded_waits(self) -> tuple[EventRef, ...]:
        """The waits whose element or expected count is loaded, known once all of
        `free_waits` are met."""
        return tuple(w for w in self.waits if w.is_loaded or w.expects.is_loaded)

    @functools.cached_property
    def is_loaded(self) -> bool:
        """Whether what a task waits for, touches or notifies is loaded."""
        return bool(waiting_loads(self) or working_loads(self))

    def coordinates(self, t: Any, env: dict[str, Any]) -> dict[str, Any]:
        """Coordinate name -> value of task `t` (an int or an array of them)."""
        inner = {**env, TASK.name: t}
        return {
            axis.symbol.name: part.evaluate(inner)
            for axis, part in zip(self.axes, self.order, strict=True)
        }

    def show(self) -> str:
        axes = ", ".join(f"{a.symbol}: {a.extent}" for a in self.axes)
        lines = [f"call {self.name}: {self.function.name} [{axes}]"]
        lines.append(f"  lane {self.function.lane}, cluster {self.function.cluster}")
        lines.append(f"  order t -> ({', '.join(map(str, self.order))})")
        if self.pace != Const(0):
            lines.append(f"  pace {self.pace} ns")
        if self.empty_until is not None:
            lines.append(f"  empty from t, empty until {self.empty_until}")
        for n, region in enumerate(self.reads):
            verb = "gathers from" if n in self.function.gathers else "reads"
            verb += " early" * (n in self.function.reads_before_wait)
            lines.append(f"  {verb} {region}")
        for word, items in (
            ("writes", self.writes),
            ("waits", self.waits),
            ("notifies", self.notifies),
        ):
            lines += [f"  {word} {item}" for item in items]
        return "\n".join(lines)


@dataclass(frozen=True)
class GraphFunction:
    """A whole program for `world_size` ranks; every rank runs the same calls."""

    name: str
    world_size: int
    dims: tuple[Symbol, ...]
    derived: tuple[tuple[Symbol, Expr], ...]
    tensors: tuple[Tensor, ...]
    events: tuple[EventTensor, ...]
    calls: tuple[Call, ...]

    def show(self) -> str:
        """Stable text of the graph; the same graph always gives the same text."""
        dims = ", ".join(map(str, self.dims))
        lines = [f"graph {self.name}({dims}) on {self.world_size} ranks"]
        lines += [f"let {name} = {value}" for name, value in self.derived]
        lines += [str(t) for t in self.tensors]
        lines += [str(e) for e in self.events]
        lines += [c.show() for c in self.calls]
        return "\n".join(lines) + "\n"

    def environment(self, dims: Mapping[str, int], rank: int) -> dict[str, Any]:
        """Symbol name -> value on `rank`, all that expressions are evaluated under."""
        env: dict[str, Any] = {**dims, RANK.name: rank}
        for symbol, value in self.derived:
            env[symbol.name] = int(value.evaluate(env))
        return env

    def tensor(self, name: str) -> Tensor:
        return next(t for t in self.tensors if t.name == name)

    def event(self, name: str) -> EventTensor:
        return next(e for e in self.events if e.name == name)

    def inputs(self) -> tuple[Tensor, ...]:
        return tuple(t for t in self.tensors if t.kind == "input")

    def outputs(self) -> tuple[Tensor, ...]:
        return tuple(t for t in self.tensors if t.kind == "output")

    def digest(self) -> str:
        """A hash of the graph and of its device functions' terms: equal on all ranks
        that hold the same program."""
        terms = [call.function.terms for call in self.calls]
        return hashlib.sha256(f"{self.show()}{terms}".encode()).hexdigest()[:16]


class Graph:
    """Collects the parts of a graph function while its Python body runs."""

    def __init__(self, name: str, world_size: int):
        self.name = name
        self.world_size = world_size
        self.rank = RANK
        self._dims: list[Symbol] = []
        self._derived: list[tuple[Symbol, Expr]] = []
        self._tensors: list[Tensor] = []
        self._events: list[EventTensor] = []
        self._calls: list[Call] = []
        self._names: set[str] = {RANK.name, TASK.name}

    def dims(self, names: str) -> Any:
        """Symbolic dims by name, separated by spaces; bound when the program runs. One
        name gives its Symbol, several give a tuple of them."""
        require(
            isinstance(names, str),
            names,
            "the names of dims are no string",
            where=f"graph {self.name}",
            wanted="all names in one string, with spaces between",
            fix='write g.dims("m n")',
        )
        made = tuple(Symbol(self._claim(n), "dim") for n in names.split())
        self._dims += made
        return made[0] if len(made) == 1 else made

    def let(self, name: str, value: Expr | int) -> Expr:
        """A named number derived from dims: computed once on the host for a run."""
        value = wrap(value)
        if isinstance(value, Const):
            return value
        fix = "write the load in the maps that use it"
        refuse_loads(f"the named number {name}", f"graph {self.name}", [value], fix)
        symbol = Symbol(self._claim(name), "derived")
        self._derived.append((symbol, value))
        return symbol

    def input(self, name: str, shape: Sequence[Expr | int], dtype: str) -> Tensor:
        return self._tensor(name, shape, dtype, "input")

    def output(self, name: str, shape: Sequence[Expr | int], dtype: str) -> Tensor:
        return self._tensor(name, shape, dtype, "output")

    def local(self, name: str, shape: Sequence[Expr | int], dtype: str) -> Tensor:
        """Scratch of each rank, owned by the program."""
        return self._tensor(name, shape, dtype, "local")

    def symmetric(self, name: str, shape: Sequence[Expr | int], dtype: str) -> Tensor:
        """A tensor that exists on every rank and that peers may write."""
        return self._tensor(name, shape, dtype, "symmetric")

    def events(
        self,
        name: str,
        shape: Sequence[Expr | int],
        *,
        expects: Expr | int | Callable[..., Expr | int],
        cross_rank: bool = False,
    ) -> EventTensor:
        """An event tensor; `expects` may be a function of an element's coordinates."""
        where = f"graph {self.name}, events {name}"
        lengths = extents(shape, f"event tensor {name}", where)
        axes = make_axes(self._claim(name, bare=False), len(lengths))
        count = expected_count(expects, axes, where)
        known = self._values() | {a.name for a in axes}
        strange = [s.name for s in count.symbols() if s.name not in known]
        if strange:
            raise GraphError(
                f"event tensor {name} expects what its elements do not know",
                where=f"{where}: expects {count}",
                wanted="dims, and coordinates that a function of them is given",
                got=", ".join(strange),
                fix="write expects=lambda i, ...: with one argument for each axis",
            )
        made = EventTensor(name, lengths, axes, count, cross_rank)
        self._events.append(made)
        return made

    def grid(self, **extents: Expr | int) -> Grid:
        """The axes of a call: coordinate name -> extent."""
        for name in extents.keys() & self._names:
            raise GraphError(
                f"the coordinate name {name!r} cannot be used",
                where=f"graph {self.name}",
                wanted="a name that no dim, tensor, event or call has yet; t and rank "
                "are reserved, for the task index of order= and for g.rank",
                got=repr(name),
                fix="choose another name",
            )
        where = f"graph {self.name}: extent of"
        lengths = {n: wrap(e, f"{where} {n}") for n, e in extents.items()}
        return Grid([Coordinate(Symbol(n, "coordinate"), lengths[n]) for n in lengths])

    def call(
        self,
        function: DeviceFunction,
        grid: Grid,
        *,
        reads: Sequence[Region] = (),
        writes: Sequence[Region] = (),
        waits: Sequence[EventRef] = (),
        notifies: Sequence[EventRef] = (),
        order: Order | None = None,
        pace: Expr | int = 0,
        name: str | None = None,
        empty_until: Until | None = None,
    ) -> Call:
        """Add `function` over `grid`. Each task waits for all `waits`, runs, then
        notifies all `notifies`. `order` maps a task index to a coordinate; the default
        is row-major. `empty_until` maps t to the index behind the last task that has
        nothing left to write if task t has not; so a product's worker passes over all
        of them at once."""
        require(
            isinstance(function, DeviceFunction),
            function,
            "a call of what is no device function",
            where=f"graph {self.name}",
            wanted="a function made by device_function",
            fix="write @device_function(source=..., reads=..., writes=...) above it",
        )
        name = self._claim(name or function.name, bare=False)
        where = f"graph {self.name}, call {name}"
        require(
            isinstance(grid, Grid) and len(grid) > 0,
            grid,
            f"call {name} has no grid of tasks",
            where=where,
            wanted="a grid with at least one axis",
            fix="write i, j = grid = g.grid(i=..., j=...), and give grid",
        )
        made = Call(
            name,
            function,
            grid.axes,
            listed(reads, Region, "reads", where),
            listed(writes, Region, "writes", where),
            listed(waits, EventRef, "waits", where),
            listed(notifies, EventRef, "notifies", where),
            _row_major(grid)
            if order is None
            else coordinate(order, TASK, len(grid), where),
            wrap(pace, f"{where}: pace="),
            None if empty_until is None else end_of_empty(empty_until, TASK, where),
        )
        _check_operands(self, made)
        _check_keywords(self, made)
        _check_symbols(self, made)
        _check_early(self, made)
        self._calls.append(made)
        return made

    def finish(self) -> GraphFunction:
        return GraphFunction(
            self.name,
            self.world_size,
            tuple(self._dims),
            tuple(self._derived),
            tuple(self._tensors),
            tuple(self._events),
            tuple(self._calls),
        )

    def _tensor(
        self, name: str, shape: Sequence[Expr | int], dtype: str, kind: str
    ) -> Tensor:
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise GraphError(
                f"tensor {name} has an unknown dtype",
                where=f"graph {self.name}",
                wanted=", ".join(DTYPES),
                got=repr(dtype),
                fix="use one of these",
            )
        lengths = extents(shape, f"tensor {name}", f"graph {self.name}")
        made = Tensor(self._claim(name), lengths, dtype, kind)
        self._tensors.append(made)
        return made

    def _values(self) -> set[str]:
        """The symbols that every expression may use."""
        derived = {s.name for s, _ in self._derived}
        return {d.name for d in self._dims} | derived | {RANK.name}

    def _claim(self, name: str, bare: bool = True) -> str:
        """Take a name; `bare` ones stand without a prefix in generated code."""
        good = isinstance(name, str) and name.isidentifier() and name[0] != "_"
        if not good or name in self._names or (bare and name in RESERVED):
            raise GraphError(
                f"the name {name!r} cannot be used",
                where=f"graph {self.name}",
                wanted="an identifier that no dim, tensor, event or call has yet, and "
                "that is not a C++ keyword; t and rank are reserved, for the task "
                "index of order= and for g.rank",
                got=repr(name),
                fix="choose another name (calls: name=...)",
            )
        self._names.add(name)
        return name


def _check_operands(graph: Graph, call: Call) -> None:
    function, given = call.function, (len(call.reads), len(call.writes))
    if given != (function.reads, function.writes):
        raise GraphError(
            f"call {call.name} does not fit device function {function.name}",
            where=f"graph {graph.name}, call {call.name}",
            wanted=f"{function.reads} reads and {function.writes} writes",
            got=f"{given[0]} reads and {given[1]} writes",
            fix="give one region for each operand",
        )


def _check_keywords(graph: Graph, call: Call) -> None:
    known = graph._values() | {axis.symbol.name for axis in call.axes}
    unknown = [name for name in call.function.keywords if name not in known]
    if unknown:
        raise GraphError(
            f"the body of call {call.name} takes values that the call does not have",
            where=f"graph {graph.name}, call {call.name}, {call.function}",
            wanted=f"keyword-only parameters among {', '.join(sorted(known))}",
            got=", ".join(unknown),
            fix="name a dim, a number of g.let, a coordinate of the grid, or rank; "
            "operands are positional parameters",
        )


def _check_early(graph: Graph, call: Call) -> None:
    """Early reads need a wait to come before, and what is loaded comes after waits."""
    if call.function.reads_before_wait and (call.is_loaded or not call.waits):
        raise GraphError(
            f"call {call.name} cannot read early",
            where=f"graph {graph.name}, call {call.name}",
            wanted="at least one wait, and no index that is loaded",
            got=f"{len(call.waits)} waits, {'' if call.is_loaded else 'not '}loaded",
            fix="use a device function without early reads",
        )


def graph_function(body: Callable[..., None]) -> Callable[..., GraphFunction]:
    """Turn `body(g, **options)` into a function `(world_size, **options)` that returns
    the GraphFunction it describes."""
    require_function(body, "@graph_function")

    @functools.wraps(body)
    def build(world_size: int, **options: Any) -> GraphFunction:
        graph = Graph(body.__name__, world_size)
        body(graph, **options)
        return graph.finish()

    return build


def _row_major(grid: Grid) -> tuple[Expr, ...]:
    rest: Expr = TASK
    parts: list[Expr] = []
    for axis in reversed(grid.axes[1:]):
        parts.append(rest % axis.extent)
        rest = rest // axis.extent
    return (rest, *reversed(parts))


def _given(rank: Expr | None) -> tuple[Expr, ...]:
    return () if rank is None else (rank,)


def _check_symbols(graph: Graph, call: Call) -> None:
    """Refuse expressions that use a coordinate the call does not have."""
    dims = graph._values()
    inside = dims | {a.symbol.name for a in call.axes}
    uses: list[tuple[str, Expr, set[str]]] = []
    for region in (*call.reads, *call.writes):
        parts = [*region.start, *region.size, *_given(region.rank)]
        uses += [(str(region), e, inside) for e in parts]
    for ref in (*call.waits, *call.notifies):
        uses += [(str(ref), e, inside) for e in (*ref.index, *_given(ref.rank))]
    until = () if call.empty_until is None else (call.empty_until,)
    uses += [(f"order {e}", e, dims | {TASK.name}) for e in call.order]
    uses += [(f"empty until {e}", e, dims | {TASK.name}) for e in until]
    uses += [(f"extent of {a.symbol}", a.extent, dims) for a in call.axes]
    uses.append((f"pace {call.pace}", call.pace, dims))
    for what, expr, known in uses:
        strange = [s.name for s in expr.symbols() if s.name not in known]
        if strange:
            raise GraphError(
                f"call {call.name} uses unknown symbols",
                where=f"graph {graph.name}, call {call.name}: {what}",
                wanted=f"only {', '.join(sorted(known))}",
                got=", ".join(strange),
                fix="use the coordinates of this call's own grid",
            )
    where = f"graph {graph.name}, call {call.name}"
    for what, exprs in (
        ("the grid", [a.extent for a in call.axes]),
        ("the order", call.order),
        ("the pace", [call.pace]),
        ("the end of the empty tasks", until),
    ):
        refuse_loads(f"{what} of call {call.name}", where, exprs, BOUND)
    for ref in call.waits:
        if ref.rank is not None:
            raise GraphError(
                f"call {call.name} waits on another rank's event",
                where=f"graph {graph.name}, call {call.name}: {ref}",
                wanted="waits on one's own elements; peers notify them",
                got=str(ref),
                fix="let the producer notify events.on(this rank)",
            )
    for region in call.reads:
        if region.rank is not None:
            raise GraphError(
                f"call {call.name} reads another rank's memory",
                where=f"graph {graph.name}, call {call.name}: {region}",
                wanted="reads of one's own memory; peers push into it",
                got=str(region),
                fix="let the owner write to tensor.on(reader)",
            )
