"""A graph of calls without events, whose operands are written as text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from etc_dist.ir import (
    DeviceFunction,
    Expr,
    Graph,
    GraphFunction,
    ceildiv,
    graph_function,
    span,
    tile,
)

AXIS = re.compile(r"(\w+)(?:(//?)(\d+)(?:@(\w+))?)?(?:\[(\d*)(:?)(\d*)\])?")


@dataclass(frozen=True)
class Task:
    """A call. An operand is "NAME AXIS... DTYPE": a tensor, and what a task has of it.
    An axis is a size, which each task has as a whole: a number, a dim, `ranks`. Of
    others it has

    * `rows/8`: the next eight; `m/8@rows`: by the coordinate of rows,
    * `rows//8`: the next one of an axis with one for each eight rows,
    * `rows//8[:]`: all of these,
    * `3[1]`, `n[16:]`, `4[:2]`: this one, or these."""

    function: DeviceFunction
    reads: Sequence[str] = ()
    writes: Sequence[str] = ()
    values: Mapping[str, Any] | None = None
    name: str | None = None
    pace: int = 0


@graph_function
def calls(
    g: Graph,
    *,
    tasks: Sequence[Task],
    dims: str = "",
    kinds: Mapping[str, str] | None = None,
) -> None:
    """dims: those that come first, or are in no axis. A tensor that is read and written
    is a state; `kinds` names those of other kinds."""
    texts = {
        end: [text.split() for task in tasks for text in getattr(task, end)]
        for end in ("reads", "writes")
    }
    axes = [_parts(a)[0] for some in texts.values() for _, *of, _ in some for a in of]
    names = dict.fromkeys([*dims.split(), *axes])
    sizes: dict[str, Any] = {
        name: int(name) if name.isdigit() else g.dims(name)
        for name in names
        if name != "ranks"
    }
    sizes["ranks"] = g.world_size
    used = {end: {name for name, *_ in some} for end, some in texts.items()}
    tensors: dict[str, Any] = {}

    def region(text: str, coordinates: Mapping[str, Expr]) -> Any:
        name, *axes, dtype = text.split()
        pairs = [_axis(axis, sizes, coordinates) for axis in axes]
        if name not in tensors:
            is_read, is_written = (name in of for of in used.values())
            kind = "state" if is_written and is_read else "output"
            kind = (kinds or {}).get(name, kind if is_written else "input")
            tensors[name] = getattr(g, kind)(name, [size for size, _ in pairs], dtype)
        return tensors[name][tuple(index for _, index in pairs)]

    for task in tasks:
        operands = [text.split() for text in (*task.reads, *task.writes)]
        found = [_parts(axis) for _, *axes, _ in operands for axis in axes]
        steps = {
            size: int(step)
            for size, _, step, of, _, colon, _ in found
            if step and not of and not colon
        }
        divided = (ceildiv(sizes[size], step) for size, step in steps.items())
        grid = g.grid(**(dict(zip("ijk", divided, strict=False)) or {"i": 1}))
        coordinates = dict(zip(steps, grid, strict=False))
        g.call(
            task.function,
            grid,
            reads=[region(text, coordinates) for text in task.reads],
            writes=[region(text, coordinates) for text in task.writes],
            values=task.values,
            name=task.name,
            pace=task.pace,
        )


def _parts(axis: str) -> tuple[str, ...]:
    matched = AXIS.fullmatch(axis)
    assert matched, axis
    return matched.groups(default="")


def _axis(
    text: str, sizes: Mapping[str, Any], coordinates: Mapping[str, Expr]
) -> tuple[Any, Any]:
    """The size, and the index of a task."""
    name, slash, step, of, first, colon, end = _parts(text)
    size = sizes[name]
    if slash == "//":
        return ceildiv(size, int(step)), slice(None) if colon else coordinates[name]
    if slash:
        return size, tile(coordinates[of or name], int(step))
    if colon:
        start = int(first or 0)
        return size, span(start, (int(end) if end else size) - start)
    return size, int(first) if first else slice(None)


def one_call(
    world_size: int,
    function: DeviceFunction,
    reads: Sequence[str] = (),
    writes: Sequence[str] = (),
    *,
    dims: str = "",
    kinds: Mapping[str, str] | None = None,
    **options: Any,
) -> GraphFunction:
    """The graph of one `Task`."""
    task = Task(function, reads, writes, **options)
    return calls(world_size, tasks=[task], dims=dims, kinds=kinds)


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
