"""The parts of a random program while it is composed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tests.verify.fuzz.program import Call, Events, Function, Place, Program, Tensor


@dataclass(frozen=True)
class Source:
    """Rows of a tensor that tasks write, or that have values. `rows`: the row of the
    tensor, and of its event tensor `event`, of which an element is met when `grain`
    columns are written (0: the whole row)."""

    tensor: str
    rows: tuple[tuple[str, str], ...]
    columns: int
    event: str = ""
    grain: int = 0
    kind: str = "input"

    @property
    def elements(self) -> int:
        return -(-self.columns // self.grain) if self.grain else 1


class Maker:
    """Collects tensors, events and calls. `used`: events that some call waits for."""

    def __init__(self, random: Random):
        self.random = random
        self.world = random.choice((1, 1, 2, 2, 2, 3))
        self.local = self.world
        if random.random() < 0.15:
            self.world, self.local = random.choice(((2, 1), (4, 2), (3, 1)))
        self.dims: dict[str, int] = {}
        self.tensors: list[Tensor] = []
        self.events: list[Events] = []
        self.calls: list[Call] = []
        self.values: dict[str, list[object]] = {}
        self.sources: list[Source] = []
        self.used: set[str] = set()

    def program(self) -> Program:
        random = self.random
        inputs = tuple(self.values)
        if random.random() < 0.25:
            inputs = tuple(name for name in inputs if random.random() < 0.5)
        return Program(
            self.world,
            self.local,
            random.choice((1, 1, 2, 2, 3, 4)),
            self.dims,
            tuple(self.tensors),
            tuple(self.events),
            tuple(self.calls),
            self.values,
            inputs,
        )

    def name(self, letter: str, parts: list[object]) -> str:
        return f"{letter}{len(parts)}"

    def loop_name(self, letter: str = "l") -> str:
        return self.name(letter, [call for call in self.calls if call.loops])

    def number(self, value: int) -> str:
        """A number, or a dim that has this value."""
        if self.random.random() < 0.6:
            return str(value)
        name = self.name("n", [*self.dims])
        self.dims[name] = value
        return name

    def tensor(self, kind: str, *shape: str, dtype: str = "float32") -> str:
        name = self.name("x", [*self.tensors])
        self.tensors.append(Tensor(name, kind, shape, dtype))
        return name

    def table(self, values: list[list[int]], kind: str = "input") -> str:
        """An int32 tensor of one axis, with its values on each rank."""
        name = self.tensor(kind, str(len(values[0])), dtype="int32")
        self.values[name] = list(values)
        return name

    def event(self, rows: str, columns: str, expects: str, cross: bool = False) -> str:
        name = self.name("ev", [*self.events])
        self.events.append(Events(name, (rows, columns), expects, cross))
        return name

    def event_of(self, name: str) -> Events:
        return next(event for event in self.events if event.name == name)

    def call(self, function: Function, axes: dict[str, str], **parts: object) -> Call:
        name = self.name("call", [*self.calls])
        parts = {k: tuple(v) if isinstance(v, list) else v for k, v in parts.items()}
        call = Call(name, function, tuple(axes.items()), **parts)
        self.calls.append(call)
        return call

    def function(self, *, transfer: bool = True) -> Function:
        random = self.random
        choice = random.random()
        if choice < 0.25 and transfer:
            return Function(lane="transfer")
        if choice < 0.5:
            return Function(roles=True)
        return Function(equal=random.random() < 0.1, apart=random.random() < 0.1)

    def input(self) -> Source:
        rows, columns = (
            self.random.choice((1, 1, 2)),
            self.random.choice((0, 1, 3, 4, 5, 7)),
        )
        name = self.tensor("input", str(rows), self.number(columns))
        source = Source(name, tuple((str(r), "0") for r in range(rows)), columns)
        self.sources.append(source)
        return source

    def source(self) -> Source:
        """Some rows to read, most often the last written."""
        if self.random.random() < 0.6:
            return self.sources[-1]
        return self.random.choice(self.sources)

    def waits(self, source: Source, column: str, size: int) -> list[Place]:
        """Waits for `size` columns from `column`, a multiple of it, of all rows."""
        if not source.event:
            return []
        self.used.add(source.event)
        if not source.grain:
            columns = ["0"]
        elif size == source.grain:
            columns = [f"({column}) // {size}"]
        elif source.grain % size == 0:
            columns = [f"({column}) // {source.grain}"]
        else:
            last = source.elements - 1
            columns = [
                f"minimum(({column}) // {source.grain} + {k}, {last})"
                for k in range(-(-size // source.grain) + (size % source.grain > 0))
            ]
        rows = dict.fromkeys(row for _, row in source.rows)
        return [Place(source.event, (row, k)) for row in rows for k in columns]

    def waits_for_all(self, source: Source) -> list[Place]:
        """Waits for all columns of all rows."""
        if not source.event:
            return []
        self.used.add(source.event)
        return [
            Place(source.event, (row, str(k)))
            for row in dict.fromkeys(row for _, row in source.rows)
            for k in range(source.elements)
        ]

    def regions(self, source: Source, column: str) -> list[Place]:
        if len(source.rows) > 1 and self.random.random() < 0.3:
            rows = [row for row, _ in source.rows]
            if rows == [str(n) for n in range(len(rows))]:
                return [Place(source.tensor, (f"span(0, {len(rows)})", column))]
        return [Place(source.tensor, (row, column)) for row, _ in source.rows]

    def grains(self, tasks: int) -> tuple[int, str]:
        """How many tasks notify an element of an event tensor, and its `expects`."""
        group = self.random.choice((1, 1, 2, 3))
        if group == 1:
            return 1, "1"
        return group, f"minimum({group}, {tasks} - {group} * e1)"

    def order(self, tasks: int) -> tuple[str, ...]:
        if self.random.random() < 0.8:
            return ()
        return (f"{tasks - 1} - t",)

    def per_rank(self, make: Callable[[], list[int]]) -> list[list[int]]:
        return [make() for _ in range(self.world)]
