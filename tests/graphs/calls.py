"""Graphs whose calls, tensors and events are written as text."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from etc_dist.ir import (
    DeviceFunction,
    Expr,
    Graph,
    GraphFunction,
    ceildiv,
    equal,
    graph_function,
    maximum,
    minimum,
    select,
    span,
    tile,
    up_to,
)
from etc_dist.ir.tensor import DTYPES

AXIS = re.compile(r"(\w+)(?:(//?)(\d+)(?:@(\w+))?)?(?:\[(.*)\])?")
AXES = re.compile(r"(?:\[[^\]]*\]|\S)+")
PART = re.compile(r"(cross-rank events|\w+) (\w+) (?:\[(.*)\] (?:expects )?|= )?(.*)")
OF_GRAPHS = (ceildiv, equal, maximum, minimum, select, span, tile, up_to)
FUNCTIONS = {function.__name__: function for function in OF_GRAPHS}
Made = Callable[[Graph], tuple[DeviceFunction, Mapping[str, Any]]]


@dataclass(frozen=True)
class Task:
    """A call. An operand is an expression, `x[i, tile(j, 8)]`, or "NAME AXIS... DTYPE":
    a tensor, and what a task has of it. An axis is a size, which each task has as a
    whole: a number, a dim, `ranks`. Of others it has

    * `rows/8`: the next eight; `m/8@rows`: by the coordinate of rows; `m/8@i`: by i,
    * `rows//8`: the next one of an axis with one for each eight rows,
    * `rows//8[:]`: all of these,
    * `3[1]`, `n[16:]`, `4[:2]`, `n[span(i, 2)]`: this one, or these.

    grid: "i: n, j: 4", if not that of the axes with steps. loop: "turn: turns", of this
    call and its neighbours. order: of `t`. function: also one that a graph makes, with
    `values`."""

    function: DeviceFunction | Made
    reads: Sequence[str] = ()
    writes: Sequence[str] = ()
    values: Mapping[str, Any] | None = None
    name: str | None = None
    pace: int = 0
    grid: str = ""
    waits: Sequence[str] = ()
    notifies: Sequence[str] = ()
    order: str = ""
    loop: str = ""
    streams_after: int | None = None


@graph_function
def calls(
    g: Graph,
    *,
    tasks: Sequence[Task],
    dims: str = "",
    parts: str = "",
    kinds: Mapping[str, str] | None = None,
) -> None:
    """dims: those that come first, or are in no axis of an operand. parts: lines, as
    `GraphFunction.show` has them: "own_rows rows most", "let k = 2 * n", "input x [n]
    int32", "events done [i: n] expects count.load(i)". Of a tensor that is in operands
    alone, `kinds` is the kind, by default a state if it is read and written."""
    texts = {
        end: [AXES.findall(text) for task in tasks for text in getattr(task, end)]
        for end in ("reads", "writes")
    }
    tensors = {end: [t for t in some if _is_tensor(t)] for end, some in texts.items()}
    axes = [_axis(a)[0] for some in tensors.values() for _, *of, _ in some for a in of]
    names = {end: {name for name, *_ in some} for end, some in tensors.items()}
    text = _Text(g, names["reads"], names["writes"], kinds or {})
    text.add_dims(dims.split())
    for line in filter(None, map(str.strip, parts.splitlines())):
        text.add_part(line)
    text.add_dims(axes)
    for loop, members in groupby(tasks, lambda task: task.loop):
        if loop:
            turns = text.named(loop, {})
            with g.loop(**turns) as turn:
                coordinates = dict.fromkeys(turns, turn)
                for task in members:
                    text.call(task, coordinates)
        else:
            for task in members:
                text.call(task, {})


class _Text:
    """A graph, and the values of the names in its text."""

    def __init__(
        self, g: Graph, reads: set[str], writes: set[str], kinds: Mapping[str, str]
    ):
        self.g, self.reads, self.writes, self.kinds = g, reads, writes, kinds
        self.values: dict[str, Any] = {"rank": g.rank, "ranks": g.world_size}
        self.tensors: dict[str, Any] = {}

    def add_dims(self, names: Sequence[str]) -> None:
        for name in names:
            if not name.isdigit() and name not in self.values:
                self.values[name] = self.g.dims(name)

    def size(self, name: str) -> Any:
        return int(name) if name.isdigit() else self.values[name]

    def value(self, text: Any, coordinates: Mapping[str, Any]) -> Any:
        if not isinstance(text, str):
            return text
        return eval(text, {**self.values, **self.tensors, **FUNCTIONS, **coordinates})

    def named(self, text: str, coordinates: Mapping[str, Any]) -> dict[str, Any]:
        """The values of "i: n, j: 4"."""
        pairs = re.sub(r"(\w+):", r"\1=", text)
        return dict(self.value(f"dict({pairs})", coordinates))

    def add_part(self, line: str) -> None:
        match = PART.fullmatch(line)
        assert match, line
        kind, name, axes, terms = match.groups()
        if kind == "own_rows":
            pair = self.g.own_rows(name, terms)
            self.values |= dict(zip((name, terms), pair, strict=True))
        elif kind == "let":
            self.values[name] = self.g.let(name, self.value(terms, {}))
        elif kind.endswith("events"):
            sizes = self.named(axes, {}) if ":" in axes else {}

            def expects(*index: Any) -> Any:
                return self.value(terms, dict(zip(sizes, index, strict=False)))

            shape = [*sizes.values()] or self.value(f"({axes},)", {})
            is_cross = kind != "events"
            self.tensors[name] = self.g.events(
                name, shape, expects=expects, cross_rank=is_cross
            )
        else:
            shape = self.value(f"({axes},)", {})
            self.tensors[name] = getattr(self.g, kind)(name, shape, terms)

    def call(self, task: Task, turn: Mapping[str, Any]) -> None:
        operands = [AXES.findall(text) for text in (*task.reads, *task.writes)]
        every = [_axis(a) for t in operands if _is_tensor(t) for a in t[1:-1]]
        steps = {
            size: int(step)
            for size, _, step, of, index in every
            if step and not of and index is None
        }
        counts = (ceildiv(self.size(n), step) for n, step in steps.items())
        extents = dict(zip("ijk", counts, strict=False)) or {"i": 1}
        grid = self.g.grid(**(self.named(task.grid, turn) if task.grid else extents))
        at = {**turn, **{str(axis): axis for axis in grid}}
        by_axis = {**at, **dict(zip(steps, grid, strict=False))}

        def values(texts: Sequence[str]) -> list[Any]:
            return [self.value(text, at) for text in texts]

        def regions(texts: Sequence[str]) -> list[Any]:
            return [self.region(text, at, by_axis) for text in texts]

        def order(t: Expr) -> Any:
            return self.value(f"({task.order},)", {"t": t})

        function, numbers = task.function, dict[str, Any]()
        if not isinstance(function, DeviceFunction):
            function, numbers = function(self.g)
        more = {name: self.value(v, {}) for name, v in (task.values or {}).items()}
        self.g.call(
            function,
            grid,
            reads=regions(task.reads),
            writes=regions(task.writes),
            waits=values(task.waits),
            notifies=values(task.notifies),
            values={**numbers, **more},
            name=task.name,
            pace=task.pace,
            order=order if task.order else None,
            streams_after=task.streams_after,
        )

    def region(self, text: str, at: Mapping[str, Any], by_axis: Any) -> Any:
        tokens = AXES.findall(text)
        if not _is_tensor(tokens):
            return self.value(text, at)
        name, *axes, dtype = tokens
        pairs = [self.axis(axis, at, by_axis) for axis in axes]
        if name not in self.tensors:
            kind = "state" if name in self.writes & self.reads else "output"
            kind = self.kinds.get(name, kind if name in self.writes else "input")
            shape = [size for size, _ in pairs]
            self.tensors[name] = getattr(self.g, kind)(name, shape, dtype)
        return self.tensors[name][tuple(index for _, index in pairs)]

    def axis(self, text: str, at: Mapping[str, Any], by_axis: Any) -> tuple[Any, Any]:
        """The size, and the index of a task."""
        name, slash, step, of, index = _axis(text)
        size = self.size(name)
        if slash == "//":
            return ceildiv(size, int(step)), slice(None) if index else by_axis[name]
        if slash:
            return size, tile(by_axis[of or name], int(step))
        if index is None:
            return size, slice(None)
        first, colon, end = index.partition(":")
        if colon:
            start = int(first or 0)
            return size, span(start, (int(end) if end else size) - start)
        return size, self.value(index, at)


def _is_tensor(tokens: Sequence[str]) -> bool:
    """Whether an operand has the shape and the dtype of its tensor."""
    return tokens[-1] in DTYPES


def _axis(text: str) -> tuple[Any, ...]:
    match = AXIS.fullmatch(text)
    assert match, text
    return match.groups()


def one_call(
    world_size: int,
    function: DeviceFunction | Made,
    reads: Sequence[str] = (),
    writes: Sequence[str] = (),
    *,
    dims: str = "",
    parts: str = "",
    kinds: Mapping[str, str] | None = None,
    **options: Any,
) -> GraphFunction:
    """The graph of one `Task`."""
    task = Task(function, reads, writes, **options)
    return calls(world_size, tasks=[task], dims=dims, parts=parts, kinds=kinds)


def whole(
    world_size: int,
    *,
    function: DeviceFunction,
    dtype: str = "float32",
    x: str = "n",
    y: str = "n",
) -> GraphFunction:
    """y is what `function` makes of x, if it reads something. x, y: their axes."""
    reads = [f"x {x} {dtype}"] * function.reads
    return one_call(world_size, function, reads, [f"y {y} {dtype}"])
