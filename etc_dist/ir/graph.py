"""Graph functions: calls of device functions joined by event tensors.

@graph_function
def add_rows(g):
    m, n = g.dims("m n")
    x = g.input("x", (m, n), "float32")
    ...
    g.call(add, g.grid(i=ceildiv(m, 64)), reads=[...], writes=[...], ...)

graph = add_rows(world_size=4)      # a GraphFunction; print(graph.show())"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from inspect import iscoroutinefunction, isgeneratorfunction
from numbers import Integral
from types import FunctionType
from typing import Any, TypeVar

from etc_dist.errors import GraphError, expect_range, expect_type
from etc_dist.ir.call import (
    RANK,
    TASK,
    Call,
    Coordinate,
    Grid,
    UpTo,
    waiting_loads,
    working_loads,
)
from etc_dist.ir.checks import (
    check_call,
    check_extents,
    check_members,
    check_symbols,
    checked_local_size,
    refuse_loads_of_written_state,
)
from etc_dist.ir.event import EventRef, EventTensor, make_axes
from etc_dist.ir.expr import Const, Expr, Symbol, substitute, wrap
from etc_dist.ir.flagged_tensors import refuse_carrier
from etc_dist.ir.function import DeviceFunction, is_name
from etc_dist.ir.loads import UPPER_BOUND, loads_of, refuse_loads
from etc_dist.ir.loop import LoopBlock, loop_extent, refuse_open
from etc_dist.ir.order import Order, task_order
from etc_dist.ir.requirement import Requirement
from etc_dist.ir.tensor import DTYPES, Region, Tensor

RESERVED = {RANK.name, TASK.name, "dims", "self", "stream", "workers"}
"""Names that no part of a graph can have: `rank`, the task index `t`, and parameters
of calls that take tensors or dims by name."""

Member = TypeVar("Member", Region, EventRef)


@dataclass(frozen=True)
class GraphFunction:
    """A whole program for `world_size` ranks; every rank runs the same calls. Made by a
    function of `@graph_function`; `etc_dist.compile` and `etc_dist.build` take it."""

    name: str
    world_size: int
    dims: tuple[Symbol, ...]
    derived: tuple[tuple[Symbol, Expr], ...]
    tensors: tuple[Tensor, ...]
    events: tuple[EventTensor, ...]
    calls: tuple[Call, ...]
    local_size: int
    """The ranks of each host; ranks of one host access each other's memory."""
    own_dims: tuple[Symbol, Symbol] | None = None
    """The number of rows that differs between ranks, and the dim that is the largest of
    all ranks: see `Graph.own_rows`."""
    requirements: tuple[Requirement, ...] = ()

    def show(self) -> str:
        """Stable text of the graph; the same graph always gives the same text."""
        dims = ", ".join(map(str, self.dims))
        lines = [f"graph {self.name}({dims}) on {self.world_size} ranks"]
        if self.local_size < self.world_size:
            lines[0] += f", {self.local_size} on each host"
        if self.own_dims is not None:
            lines.append(f"{self.own_dims[0]} of each rank, at most {self.own_dims[1]}")
        lines += [f"let {name} = {value}" for name, value in self.derived]
        lines += [str(requirement) for requirement in self.requirements]
        lines += [str(t) for t in self.tensors]
        lines += [str(e) for e in self.events]
        lines += [c.show() for c in self.calls]
        return "\n".join(lines) + "\n"

    def environment(self, dims: Mapping[str, int], rank: int) -> dict[str, Any]:
        """Internal: the values of all symbols on `rank`, by name, for
        `Expr.evaluate`."""
        env = self.of_rank(dims, rank)
        for symbol, value in self.derived:
            env[symbol.name] = int(value.evaluate(env))
        return env

    def of_rank(self, dims: Mapping[str, int], rank: int) -> dict[str, Any]:
        """Internal: the dims and `rank`, by name. The rank's own number of rows is the
        largest if `dims` does not have it."""
        env: dict[str, Any] = {**dims, RANK.name: rank}
        if self.own_dims is not None:
            env.setdefault(self.own_dims[0].name, env[self.own_dims[1].name])
        return env

    def alike(self, dims: Mapping[str, int]) -> dict[str, int]:
        """Internal: the dims that are equal on all ranks."""
        return {symbol.name: dims[symbol.name] for symbol in self.dims}

    def own_rows_of(self, arrays: Mapping[str, Any]) -> dict[str, int]:
        """Internal: the rank's own number of rows by its name, from its arrays."""
        if self.own_dims is None:
            return {}
        names = [t.name for t in self.given() if t.has_own_rows and t.name in arrays]
        shapes = [arrays[name].shape for name in names]
        return (
            {self.own_dims[0].name: int(shapes[0][0])} if shapes and shapes[0] else {}
        )

    def tensor(self, name: str) -> Tensor:
        """The tensor of this name, which exists."""
        return next(t for t in self.tensors if t.name == name)

    def event(self, name: str) -> EventTensor:
        """The event tensor of this name, which exists."""
        return next(e for e in self.events if e.name == name)

    def inputs(self) -> tuple[Tensor, ...]:
        """The caller's arrays that no task writes, in the order of the graph."""
        return tuple(t for t in self.tensors if t.kind == "input")

    def states(self) -> tuple[Tensor, ...]:
        """The caller's arrays that tasks update in place."""
        return tuple(t for t in self.tensors if t.kind == "state")

    def outputs(self) -> tuple[Tensor, ...]:
        """The caller's arrays that tasks fill."""
        return tuple(t for t in self.tensors if t.kind == "output")

    def arguments(self) -> tuple[Tensor, ...]:
        """Internal: the caller's arrays: inputs, states, outputs."""
        return (*self.given(), *self.outputs())

    def given(self) -> tuple[Tensor, ...]:
        """Internal: the caller's arrays that have values before a run: inputs,
        states."""
        return (*self.inputs(), *self.states())

    def accessed_by_element(self) -> set[str]:
        """Internal: the names of tensors whose rows no CUDA body accesses in units."""
        names: dict[str, bool] = {}
        for call in self.calls:
            for n, region in enumerate((*call.reads, *call.writes)):
                operand = call.function.tile.get(n)
                name, is_element = region.tensor.name, operand and operand.by_element
                names[name] = names.get(name, True) and bool(is_element)
        return {name for name, is_element in names.items() if is_element}

    @property
    def uses_peers(self) -> bool:
        """Internal: whether tasks write the memory of other ranks, or notify their
        events, other than by far functions."""
        near = [call for call in self.calls if not call.function.far]
        ranks = [region.rank for call in near for region in call.writes]
        ranks += [ref.rank for call in near for ref in call.notifies]
        return any(rank is not None for rank in ranks)

    def digest(self) -> str:
        """A hash of the graph and its device functions: equal for the same program."""
        return self._digest

    @functools.cached_property
    def _digest(self) -> str:
        terms = [call.function.terms for call in self.calls]
        return hashlib.sha256(f"{self.show()}{terms}".encode()).hexdigest()[:16]

    def lines(self) -> list[str]:
        """Internal: all that `digest` is of, as text."""
        return [*self.show().splitlines(), *(c.function.terms for c in self.calls)]

    def loaded_tensors(self) -> tuple[Tensor, ...]:
        """Internal: the tensors that index expressions load from."""
        loads = [*loads_of(event.expects for event in self.events)]
        for call in self.calls:
            loads += (*waiting_loads(call), *working_loads(call))
        names = {load.tensor for load in loads}
        return tuple(tensor for tensor in self.tensors if tensor.name in names)


class Graph:
    """Collects the parts of a graph function while its Python body runs. Made by
    `graph_function`."""

    def __init__(self, name: str, world_size: int, local_size: int | None = None):
        self.name, self.world_size = name, world_size
        self.local_size = local_size or world_size
        self.rank = RANK
        self._dims: list[Symbol] = []
        self._derived: list[tuple[Symbol, Expr]] = []
        self._requirements: list[Requirement] = []
        self._tensors: list[Tensor] = []
        self._events: list[EventTensor] = []
        self._calls: list[Call] = []
        self._loops: list[Coordinate] = []
        self._names = set(RESERVED)
        self._coordinates: set[str] = set()
        self._ranked = {RANK.name}  # names of numbers that differ between ranks
        self._own_dims: tuple[Symbol, Symbol] | None = None
        self._agreed = set[str]()  # names of numbers that ranks agree on at each call

    def dims(self, names: str) -> Any:
        """Symbolic dims by name, separated by spaces; bound when the program runs. One
        name gives its Symbol, several give a tuple of them."""
        symbols = tuple(Symbol(self._claim(n), "dim") for n in names.split())
        self._dims += symbols
        return symbols[0] if len(symbols) == 1 else symbols

    def own_rows(self, name: str, largest: str) -> tuple[Symbol, Symbol]:
        """A number of rows that may differ between ranks, and the dim `largest`: the
        largest of all ranks, on which these agree at each call. Both by name.

        The first is the first extent of inputs, states, outputs and local tensors, and
        part of no other expression. Regions there are clipped at it. The second is not
        in shapes of inputs, states and outputs.

        Raises GraphError for a second such number."""
        if self._own_dims is not None:
            raise GraphError(
                "a graph has one number of rows that differs between ranks",
                where=f"graph {self.name}",
                wanted=f"{self._own_dims[0]} alone",
                got=f"{name}, too",
                fix=f"use {self._own_dims[0]} for all of these arrays",
            )
        self._own_dims = Symbol(self._claim(name), "own"), self.dims(largest)
        self._agreed.add(largest)
        return self._own_dims

    def largest(self, extent: Expr) -> Expr:
        """Internal: the largest of an extent over all ranks."""
        own_extents = self._own_dims
        return (
            own_extents[1]
            if own_extents is not None and own_extents[0] == extent
            else extent
        )

    def let(self, name: str, value: Expr | int) -> Expr:
        """A named number derived from dims: computed on the host, once a run."""
        value = wrap(value, f"graph {self.name}: the named number {name}")
        fix = "write the load in the index expressions that use it"
        what, where = f"the named number {name}", f"graph {self.name}"
        refuse_loads(what, where, [value], fix)
        check_symbols(what, where, [value], self._values())
        symbol = Symbol(self._claim(name), "derived")
        self._derived.append((symbol, value))
        for names in (self._ranked, self._agreed):
            if any(s.name in names for s in value.symbols):
                names.add(name)
        # A constant stays one in expressions; bodies get it by its name.
        return value if isinstance(value, Const) else symbol

    def require(
        self,
        what: str,
        numbers: Sequence[Expr | int],
        values: Iterable[Sequence[int]],
        fix: str,
    ) -> None:
        """Refuse runs in which `numbers` do not together have one of `values`, by an
        ArgumentError that says `what` is wrong and how to `fix` it, on every rank and
        before a launch. For numbers that no proof checks, as only CUDA bodies read
        them.

        Raises GraphError for values that are not rows of integers, and for constants
        that have none of them."""
        where = f"graph {self.name}: g.require"
        exprs = tuple(wrap(number, where) for number in numbers)
        refuse_loads("g.require", where, exprs, "require numbers of dims")
        check_symbols("g.require", where, exprs, self._values() - self._ranked)
        candidates = [*values]
        if not candidates or not all(_is_row(row, len(exprs)) for row in candidates):
            raise GraphError(
                what,
                where=where,
                wanted=f"values of {', '.join(map(str, exprs)) or 'numbers'}",
                got=str(candidates),
                fix=fix,
            )
        rows = tuple(dict.fromkeys(tuple(map(int, row)) for row in candidates))
        derived: dict[str, Expr] = {}
        for symbol, value in self._derived:
            derived[symbol.name] = substitute(value, derived)
        of_dims = tuple(substitute(expr, derived) for expr in exprs)
        requirement = Requirement(what, exprs, rows, fix, of_dims)
        if all(isinstance(number, Const) for number in of_dims):
            requirement.check({}, where, GraphError)
            return
        if requirement not in self._requirements:
            self._requirements.append(requirement)

    def input(self, name: str, shape: Sequence[Expr | int], dtype: str) -> Tensor:
        """An array of the caller, [dims] of a dtype: "bfloat16", "float16", "float32",
        "int32" or "float8_e4m3fn". Each dim is an axis of some array."""
        return self._tensor(name, shape, dtype, "input")

    def state(self, name: str, shape: Sequence[Expr | int], dtype: str) -> Tensor:
        """An array of the caller that tasks read and write in place, any part of it."""
        return self._tensor(name, shape, dtype, "state")

    def output(
        self,
        name: str,
        shape: Sequence[Expr | int],
        dtype: str,
        *,
        over: Tensor | None = None,
    ) -> Tensor:
        """An array of the caller that tasks write, each element once. over: an input of
        the same shape and dtype, in place of which the caller may have it written: each
        read of the input is then proved to come before the write there. Raises
        GraphError for another tensor."""
        tensor = self._tensor(name, shape, dtype, "output")
        if over is None:
            return tensor
        like = over.kind, over.shape, over.dtype
        if over not in self._tensors or like != ("input", tensor.shape, dtype):
            raise GraphError(
                f"output {name} cannot be written over {over.name}",
                where=f"graph {self.name}",
                wanted=f"an input of this graph like {tensor}",
                got=str(over),
                fix="pass over= an input of the same shape and dtype",
            )
        self._tensors[-1] = replace(tensor, over=over.name)
        return self._tensors[-1]

    def local(self, name: str, shape: Sequence[Expr | int], dtype: str) -> Tensor:
        """Scratch of each rank, owned by the program; undefined until written."""
        return self._tensor(name, shape, dtype, "local")

    def symmetric(self, name: str, shape: Sequence[Expr | int], dtype: str) -> Tensor:
        """A tensor on every rank; `tensor.on(rank)` is a peer's, to be written."""
        return self._tensor(name, shape, dtype, "symmetric")

    def flagged(self, name: str, shape: Sequence[Expr | int], dtype: str) -> Tensor:
        """A tensor on every rank whose elements carry their epoch, so that a task that
        reads them sees whether they have been written in this run: few bytes arrive
        without a fence, a counter or the handshake. Each element is written by one
        task, and read. On GPUs it takes four times the memory. Only functions with
        `Operand(flagged=True)` access it. See docs/language.md."""
        tensor = self._tensor(name, shape, dtype, "symmetric")
        self._tensors[-1] = replace(tensor, flagged=True)
        return self._tensors[-1]

    def events(
        self,
        name: str,
        shape: Sequence[Expr | int],
        *,
        expects: Expr | int | Callable[..., Expr | int],
        cross_rank: bool = False,
        carried_by: Tensor | None = None,
    ) -> EventTensor:
        """Counters, each met after `expects` notifications: a number, an expression or
        a function of the element's coordinates. Only a `cross_rank` one can be notified
        by peers, as `events.on(rank)[...]`. carried_by: a flagged tensor; what a task
        writes there is its notification, and a task that waits polls what it reads."""
        where = f"graph {self.name}, events {name}"
        refuse_carrier(where, carried_by, self._tensors, cross_rank)
        lengths = self._shape(shape, f"event tensor {name}", where)
        check_extents(f"event tensor {name}", where, lengths, self._ranked)
        axes = make_axes(self._claim(name), len(lengths))
        for axis in axes:
            self._claim_coordinate(axis.name)
        expected = expects(*axes) if callable(expects) else expects
        count = wrap(expected, f"{where}: expects=")
        check_symbols(
            f"expects= of event tensor {name}",
            f"{where}: expects {count}",
            [count],
            self._values() | {a.name for a in axes},
            wanted="dims, and the arguments of a function of the coordinates",
            fix="write expects=lambda i, ...: with one argument for each axis",
        )
        carrier = "" if carried_by is None else carried_by.name
        event_tensor = EventTensor(name, lengths, axes, count, cross_rank, carrier)
        self._events.append(event_tensor)
        return event_tensor

    def grid(self, /, **extents: Expr | int | UpTo) -> Grid:
        """The axes of a call: coordinate name -> extent. That of one axis may be
        loaded: up_to(bound, count)."""
        axes = []
        for name, extent in extents.items():
            self._claim_coordinate(name)
            axis_extent = extent if isinstance(extent, UpTo) else UpTo(extent, None)
            length = wrap(axis_extent.bound, f"graph {self.name}: extent of {name}")
            axes.append(
                Coordinate(Symbol(name, "coordinate"), length, axis_extent.count)
            )
        return Grid(axes)

    def loop(self, /, **turns: Expr | int) -> LoopBlock:
        """A loop over the calls of a block: `with g.loop(layer=layers) as layer:`. Its
        coordinate, 0 .. layers - 1, is the first axis of each of these calls. A worker
        takes its tasks of a turn call by call, then those of the next turn."""
        where = f"graph {self.name}"
        name, extent = loop_extent(where, turns)
        what = f"the number of turns of loop {name}"
        refuse_loads(what, where, [extent], UPPER_BOUND)
        check_symbols(what, where, [extent], self._values())
        loop = Coordinate(Symbol(name, "coordinate"), extent)
        return LoopBlock(loop, where, self._loops, self._calls, self._claim)

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
        values: Mapping[str, Expr | int] | None = None,
        even: bool = False,
        streams_after: int | None = None,
    ) -> Call:
        """Add `function` over `grid`, one task for each coordinate. A task waits for
        all `waits`, runs on the regions `reads` and `writes`, then notifies all
        `notifies`; docs/language.md describes all arguments.

        order: maps a task index to a coordinate; the default is row-major. pace:
        nanoseconds between the starts of tasks of the transfer lane. name: default the
        function's. values: the numbers that parameters of the body get. even: tasks of
        equal work come first, then those that write nothing. streams_after: the number
        of waits after which a task that loads may begin with the operands that its
        function streams.

        Raises GraphError for a call that cannot be correct."""
        name = self._claim(name or function.name)
        where = f"graph {self.name}, call {name}"
        call = Call(
            name,
            function,
            (*self._loops, *grid.axes),
            tuple(reads),
            tuple(writes),
            _possible(waits),
            _possible(notifies),
            task_order(order, self._loops, grid, where),
            wrap(pace, f"{where}: pace="),
            len(self._loops),
            tuple((n, wrap(v, f"{where}: {n}")) for n, v in (values or {}).items()),
            even,
            streams_after,
        )
        check_members(call, where, self._tensors, self._events)
        check_call(call, where, self._values())
        self._calls.append(call)
        return call

    def finish(self) -> GraphFunction:
        """Internal: the graph of all parts so far; `@graph_function` calls it after the
        body."""
        refuse_open(self._loops, f"graph {self.name}")
        graph = GraphFunction(
            self.name,
            self.world_size,
            tuple(self._dims),
            tuple(self._derived),
            tuple(self._tensors),
            tuple(self._events),
            tuple(self._calls),
            self.local_size,
            self._own_dims,
            tuple(self._requirements),
        )
        refuse_loads_of_written_state(graph)
        return graph

    def _tensor(
        self, name: str, shape: Sequence[Expr | int], dtype: str, kind: str
    ) -> Tensor:
        if dtype not in DTYPES:
            raise GraphError(
                f"tensor {name} has an unknown dtype",
                where=f"graph {self.name}",
                wanted=", ".join(DTYPES),
                got=repr(dtype),
                fix="use one of these",
            )
        what, where = f"tensor {name}", f"graph {self.name}"
        first: tuple[Expr, ...] = ()
        if shape and self._own_dims is not None and kind != "symmetric":
            first = tuple(n for n in self._own_dims[:1] if n == wrap(shape[0], where))
        lengths = self._shape(shape[len(first) :], what, where)
        if kind in ("local", "symmetric"):
            check_extents(what, where, lengths, self._ranked)
        else:
            check_symbols(
                f"the shape of {what}",
                where,
                lengths,
                self._values() - self._agreed,
                wanted="numbers that a rank knows before all agree on the largest one",
                fix="use the rank's own number of rows, or a local or symmetric tensor",
            )
        lengths = first + lengths
        tensor = Tensor(self._claim(name), lengths, dtype, kind)
        self._tensors.append(tensor)
        return tensor

    def _shape(
        self, shape: Sequence[Expr | int], what: str, where: str
    ) -> tuple[Expr, ...]:
        lengths = tuple(
            wrap(extent, f"{where}: the shape of {what}") for extent in shape
        )
        refuse_loads(f"the shape of {what}", where, lengths, UPPER_BOUND)
        check_symbols(f"the shape of {what}", where, lengths, self._values())
        return lengths

    def _values(self) -> set[str]:
        """The symbols that every expression may use."""
        derived = {s.name for s, _ in self._derived}
        return {d.name for d in self._dims} | derived | {RANK.name}

    def _claim(self, name: str) -> str:
        """Take a name for a dim, a tensor, an event tensor or a call."""
        self._refuse_taken(name, self._coordinates)
        self._names.add(name)
        return name

    def _claim_coordinate(self, name: str) -> None:
        """Take a name for a coordinate. Calls may share it, but not dims or numbers of
        `let`: one expression may use both."""
        self._refuse_taken(name)
        self._coordinates.add(name)

    def _refuse_taken(self, name: str, more_names: Set[str] = frozenset()) -> None:
        is_taken = name in self._names or name in more_names
        if is_taken or not is_name(name):
            raise GraphError(
                f"the name {name!r} cannot be used",
                where=f"graph {self.name}",
                wanted="an ASCII identifier without a leading underscore, not yet a "
                f"name of this graph; reserved: {', '.join(sorted(RESERVED))}",
                got=repr(name),
                fix="choose another name (calls: name=...)",
            )


def expect_graph(graph: object) -> None:
    """Raise TypeError unless `graph` is a GraphFunction."""
    fix = ""
    if isinstance(graph, FunctionType):
        fix = f"call it with the number of ranks, as in {graph.__name__}(world.size)"
    expect_type(graph, GraphFunction, "graph", fix=fix)


def graph_function(body: Callable[..., None]) -> Callable[..., GraphFunction]:
    """Turn `body(g, **options)`, which describes a program by calls of g, a `Graph`,
    into a function `(world_size, **options)` that returns a GraphFunction.

    For ranks on several hosts the function also takes `local_size`, the ranks on each
    of them. `options` are Python values. Each call of the function runs the body once.
    Raises the errors of the body: GraphError for a program that cannot be correct; and
    TypeError for a generator or coroutine."""
    if isgeneratorfunction(body) or iscoroutinefunction(body):
        raise TypeError(
            f"@graph_function expects a plain function, and {body.__name__} would not "
            "run when it is called: omit yield, await and async"
        )

    @functools.wraps(body)
    def build(
        world_size: int, *, local_size: int | None = None, **options: Any
    ) -> GraphFunction:
        ranks = expect_range(world_size, 1, None, "world_size")
        near = checked_local_size(local_size, ranks, body.__name__)
        graph = Graph(body.__name__, ranks, near)
        body(graph, **options)
        return graph.finish()

    return build


def _possible(refs: Sequence[EventRef]) -> tuple[EventRef, ...]:
    """The elements in a list of a call, without those that no task waits for or
    notifies, as their condition is constant."""
    return tuple(ref for ref in refs if ref.holds != Const(0))


def _is_row(row: object, count: int) -> bool:
    """Whether it is a row of so many integers."""
    if not isinstance(row, Sequence) or len(row) != count:
        return False
    return all(isinstance(value, Integral) for value in row)
