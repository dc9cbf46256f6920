"""Programs as plain data, from which a graph is built, and which the oracle reads.

All expressions are texts in Python, such as "tile(i, 4)" or "counts.load(b) - 1". Their
names are dims, `rank`, `world`, loops and coordinates, and the tensors of the program.
In `expects` of an event tensor, `e0` and `e1` are the coordinates of the element."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import groupby
from types import CodeType
from typing import Any

import numpy as np

from etc_dist.functions.push_far import push_far
from etc_dist.ir import DeviceFunction, Graph, GraphFunction, Operand, up_to
from tests.graphs.calls import FUNCTIONS


class Part:
    """A dataclass whose text leaves default values out."""

    def __repr__(self) -> str:
        assert is_dataclass(self)
        values = [(f, getattr(self, f.name)) for f in fields(self)]
        parts = [f"{f.name}={value!r}" for f, value in values if value != f.default]
        return f"{type(self).__name__}({', '.join(parts)})"


@dataclass(frozen=True, repr=False)
class Tensor(Part):
    name: str
    kind: str
    shape: tuple[str, ...]
    dtype: str = "float32"


@dataclass(frozen=True, repr=False)
class Events(Part):
    name: str
    shape: tuple[str, ...]
    expects: str
    cross: bool = False


@dataclass(frozen=True, repr=False)
class Place(Part):
    """A region of a tensor, or an element of an event tensor; `rank`: of which rank;
    `when`: the condition of the element."""

    name: str
    index: tuple[str, ...]
    rank: str = ""
    when: str = ""

    @property
    def texts(self) -> tuple[str, ...]:
        """All its expressions."""
        return (*self.index, *filter(None, (self.rank, self.when)))


@dataclass(frozen=True, repr=False)
class Function(Part):
    """A device function. `equal`: all its operands have equal sizes; `apart`: its
    writes are apart from its reads."""

    lane: str = "tensor"
    roles: bool = False
    gathers: tuple[int, ...] = ()
    early: tuple[int, ...] = ()
    streams: tuple[int, ...] = ()
    equal: bool = False
    apart: bool = False
    far: bool = False


@dataclass(frozen=True, repr=False)
class Call(Part):
    """A call of `function` in `loops`, over `axes`: each a name and an extent. `count`,
    if given, is the loaded extent of the axis `limited`."""

    name: str
    function: Function
    axes: tuple[tuple[str, str], ...]
    reads: tuple[Place, ...] = ()
    writes: tuple[Place, ...] = ()
    waits: tuple[Place, ...] = ()
    notifies: tuple[Place, ...] = ()
    loops: tuple[tuple[str, str], ...] = ()
    order: tuple[str, ...] = ()
    limited: str = ""
    count: str = ""
    queued: bool = True
    even: bool = False
    streams_after: int | None = None


@dataclass(frozen=True)
class Program:
    """A graph with dims, a number of workers, and the values of int32 tensors on each
    rank, of which the verifier gets those in `given`."""

    world: int
    local: int
    workers: int
    dims: Mapping[str, int]
    tensors: tuple[Tensor, ...]
    events: tuple[Events, ...]
    calls: tuple[Call, ...]
    values: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    given: tuple[str, ...] = ()

    def tensor(self, name: str) -> Tensor:
        return next(t for t in self.tensors if t.name == name)

    def event(self, name: str) -> Events:
        return next(e for e in self.events if e.name == name)

    def arrays(self) -> dict[str, list[Any]]:
        """The values for the verifier."""
        return {
            name: [np.array(values, np.int32) for values in self.values[name]]
            for name in self.given
        }


Body = Callable[[Call], Callable[..., None]]
"""The body of a call."""


@functools.lru_cache(10_000)
def code(text: str) -> CodeType:
    return compile(text, text, "eval")


def build(program: Program, body: Body | None = None) -> GraphFunction:
    """The graph of `program`, in the public language. `body`: that of a call."""

    g = Graph("fuzzed", program.world, program.local)
    _Builder(program, g, body).build()
    return g.finish()


class _Builder:
    def __init__(self, program: Program, g: Graph, body: Body | None):
        self.program, self.g, self.body = program, g, body
        self.names: dict[str, Any] = {"rank": g.rank, "world": program.world}

    def value(self, text: str, **names: Any) -> Any:
        if text == ":":
            return slice(None)
        return eval(code(text), FUNCTIONS, {**self.names, **names})

    def build(self) -> None:
        g = self.g
        for name in self.program.dims:
            self.names[name] = g.dims(name)
        for tensor in self.program.tensors:
            make = getattr(g, tensor.kind)
            shape = [self.value(n) for n in tensor.shape]
            self.names[tensor.name] = make(tensor.name, shape, tensor.dtype)
        for event in self.program.events:
            self.names[event.name] = g.events(
                event.name,
                [self.value(n) for n in event.shape],
                expects=self.expects(event),
                cross_rank=event.cross,
            )
        self.block(self.program.calls, 0, {})

    def expects(self, event: Events) -> Callable[..., Any]:
        if len(event.shape) == 1:
            return lambda e0: self.value(event.expects, e0=e0)
        return lambda e0, e1: self.value(event.expects, e0=e0, e1=e1)

    def block(self, calls: Iterable[Call], depth: int, turns: dict[str, Any]) -> None:
        """Calls that are in `depth` loops, with coordinates `turns`."""

        def loop(call: Call) -> tuple[str, str] | None:
            return call.loops[depth] if depth < len(call.loops) else None

        for inner, members in groupby(calls, loop):
            if inner is None:
                for call in members:
                    self.call(call, turns)
                continue
            name, extent = inner
            with self.g.loop(**{name: self.value(extent)}) as turn:
                self.block(members, depth + 1, {**turns, name: turn})

    def call(self, call: Call, turns: dict[str, Any]) -> None:
        extents = {name: self.value(extent) for name, extent in call.axes}
        if call.limited:
            count = self.value(call.count, **turns)
            extents[call.limited] = up_to(extents[call.limited], count)
        grid = self.g.grid(**extents)
        names = {**turns, **dict(zip(extents, grid, strict=True))}

        def places(operands: Sequence[Place]) -> list[Any]:
            return [self.place(place, names) for place in operands]

        def order(t: Any) -> tuple[Any, ...]:
            return tuple(self.value(part, t=t) for part in call.order)

        self.g.call(
            device_function(call, self.body),
            grid,
            name=call.name,
            reads=places(call.reads),
            writes=places(call.writes),
            waits=places(call.waits),
            notifies=places(call.notifies),
            order=order if call.order else None,
            even=call.even,
            streams_after=call.streams_after,
        )

    def place(self, place: Place, names: dict[str, Any]) -> Any:
        owner = self.names[place.name]
        if place.rank:
            owner = owner.on(self.value(place.rank, **names))
        reference = owner[tuple(self.value(part, **names) for part in place.index)]
        return (
            reference.when(self.value(place.when, **names)) if place.when else reference
        )


def device_function(call: Call, body: Body | None) -> DeviceFunction:
    function, num_reads = call.function, len(call.reads)
    if function.far:
        return push_far()
    return DeviceFunction(
        "touch",
        print if body is None else body(call),
        "touch.cuh",
        function.lane,
        num_reads,
        len(call.writes),
        roles=("load", "compute") if function.roles else (),
        gathers=function.gathers,
        reads_before_wait=function.early,
        streams=function.streams,
        tile={
            n: Operand(
                like=0 if function.equal and n else None,
                apart=function.apart and n < num_reads,
            )
            for n in range(num_reads + len(call.writes))
        },
    )
