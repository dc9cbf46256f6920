"""All tasks of a program on all ranks, with what each waits for, notifies and accesses.

It evaluates the texts of the program one task at a time, and refuses what no number
can be found for, or what is out of range."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any

from tests.verify.fuzz.evaluate import (
    UNKNOWN,
    Refused,
    Table,
    evaluate,
    functions,
    names_in,
    part_of,
    tables_in,
)
from tests.verify.fuzz.program import Call, Events, Place, Program

Element = tuple[Any, ...]
"""An event tensor, a rank, and an index; or only an event tensor whose elements are
not known."""


@dataclass(frozen=True)
class Access:
    """Elements of a tensor in a rank's memory. `after`: the task's waits, by position,
    that are met before."""

    tensor: str
    rank: int
    elements: tuple[tuple[int, ...], ...]
    write: bool
    after: tuple[int, ...]
    gathered: bool = False
    load: bool = False


@dataclass
class Task:
    """A task; `at`: its turn and its index in the turn; `since`: the unknown count, and
    the coordinate, from which on it exists."""

    call: Call
    rank: int
    turn: tuple[int, ...]
    index: int
    since: tuple[Any, int] | None = None
    waits: list[Element | None] = field(default_factory=list)
    notifies: list[Element | None] = field(default_factory=list)
    accesses: list[Access] = field(default_factory=list)
    operands: list[Operand | None] = field(default_factory=list)


@dataclass(frozen=True)
class Operand:
    """The region of an operand, clipped at the edge, with a text for each size."""

    tensor: str
    rank: int
    box: tuple[tuple[int, int], ...]
    sizes: tuple[str, ...]

    @property
    def own_sizes(self) -> list[int]:
        """Those that must be equal to others', which an axis of one element has not."""
        pairs = zip(self.box, self.sizes, strict=True)
        return [high - low for (low, high), text in pairs if text != "1"]

    @property
    def is_empty(self) -> bool:
        return any(high <= low for low, high in self.box)


def loads_of_ref(program: Program, ref: Place) -> frozenset[str]:
    """The tensors that decide which element a reference names, and its count."""
    return tables_in((*ref.texts, program.event(ref.name).expects))


def is_queued(call: Call) -> bool:
    """Whether tasks of a dynamic plan are claimed once they are ready."""
    return bool(call.waits) and (call.queued or bool(call.loops))


def gating(call: Call) -> list[str]:
    """The axes whose coordinates choose the elements that a task waits for."""
    names = {
        name for ref in call.waits for part in ref.texts for name in names_in(part)
    }
    return [name for name, _ in (*call.loops, *call.axes) if name in names]


def waits_for_count(program: Program, call: Call) -> bool:
    """Whether workers wait for one element, then know how many tasks there are."""
    if not call.limited or not call.waits or loads_of_ref(program, call.waits[0]):
        return False
    names = {name for text in call.waits[0].texts for name in names_in(text)}
    return not names & {name for name, _ in call.axes}


class Expansion:
    """The tasks of a program. `unknown_*`: names whose uses need unknown values."""

    def __init__(self, program: Program, dynamic: bool):
        self.program, self.dynamic = program, dynamic
        self.loads: list[tuple[str, tuple[int, ...] | None]] = []
        self.unsure: list[bool] = []
        self.names = [self._names(rank) for rank in range(program.world)]
        self.shapes = {
            tensor.name: [
                tuple(evaluate(n, names) for n in tensor.shape) for names in self.names
            ]
            for tensor in program.tensors
        }
        for tensor in program.tensors:
            if tensor.dtype == "int32":
                self._add_tables(tensor.name)
        self.event_shapes = {
            event.name: tuple(max(0, evaluate(n, self.names[0])) for n in event.shape)
            for event in program.events
        }
        refs = [ref for call in program.calls for ref in (*call.waits, *call.notifies)]
        self.unknown_events = {ref.name for ref in refs if not self.is_known(ref.texts)}
        self.unknown_counts = {
            event.name for event in program.events if not self.is_known([event.expects])
        }
        self.unknown_writes: set[str] = set()
        self.count_events: set[Element] = set()
        self.blocks: dict[tuple[str, int], dict[tuple[Any, ...], Task]] = {}
        """Of each call and rank, by turn and index in the turn."""
        for call in program.calls:
            for rank in range(program.world):
                self.blocks[call.name, rank] = self._block(call, rank)

    @property
    def tasks(self) -> list[Task]:
        return [task for block in self.blocks.values() for task in block.values()]

    def is_known(self, texts: Sequence[str]) -> bool:
        return tables_in(texts) <= {*self.program.given}

    def _names(self, rank: int) -> dict[str, Any]:
        return {
            **functions(self.unsure),
            **self.program.dims,
            "rank": rank,
            "world": self.program.world,
        }

    def _add_tables(self, name: str) -> None:
        is_input = name in self.program.given
        for rank, names in enumerate(self.names):
            values = self.program.values[name][rank] if is_input else None
            shape = self.shapes[name][rank]
            names[name] = Table(name, shape, values, self.loads, self.unsure)

    def extents(self, call: Call, rank: int) -> tuple[list[int], list[int]]:
        """The extents of a call's loops, and of its grid."""
        names = self.names[rank]
        loops, axes = (
            [evaluate(extent, names) for _, extent in pairs]
            for pairs in (call.loops, call.axes)
        )
        if min((*loops, *axes), default=0) < 0:
            raise Refused(f"the extents of {call.name}")
        return loops, axes

    def _block(self, call: Call, rank: int) -> dict[tuple[Any, ...], Task]:
        loops, axes = self.extents(call, rank)
        is_fewer = bool(call.limited) and not self.is_known([call.count])
        if is_fewer:
            self.unknown_writes |= {place.name for place in call.writes}
        block: dict[tuple[Any, ...], Task] = {}
        if not prod((*loops, *axes)):
            return block
        order = self._order(call, rank, axes)
        for turn in product(*map(range, loops)):
            at = dict(zip([name for name, _ in call.loops], turn, strict=True))
            names = {**self.names[rank], **at}
            if waits_for_count(self.program, call):
                first = self._element(call.waits[0], names, rank)
                self.count_events |= {first} - {None}
            for task_idx, coordinate in enumerate(order):
                coordinates = dict(
                    zip([name for name, _ in call.axes], coordinate, strict=True)
                )
                task = Task(call, rank, turn, task_idx)
                if call.limited:
                    n = coordinates[call.limited]
                    since = self._since(call, names, rank, n)
                    if since is None:
                        continue
                    task.since = since if is_fewer else None
                block[(*turn, task_idx)] = task
                self._fill(task, {**names, **coordinates})
        return block

    def _order(self, call: Call, rank: int, axes: list[int]) -> list[tuple[int, ...]]:
        grid = list(product(*map(range, axes)))
        ignored = self.dynamic and is_queued(call) and gating(call)
        if not call.order or ignored:
            return grid
        coordinates = [
            tuple(evaluate(part, {**self.names[rank], "t": t}) for part in call.order)
            for t in range(len(grid))
        ]
        if sorted(coordinates) != grid:
            raise Refused(f"the order of {call.name}")
        return coordinates

    def _since(
        self, call: Call, names: dict[str, Any], rank: int, coordinate: int
    ) -> tuple[Any, int] | None:
        """None for a surplus task."""
        self.loads.clear()
        count = evaluate(call.count, names)
        if count is UNKNOWN:
            return (rank, *self.loads[-1]), coordinate + 1
        return ((), 0) if coordinate < count else None

    # ------------------------------------------------------------------ one task

    def _fill(self, task: Task, names: dict[str, Any]) -> None:
        call, every = task.call, tuple(range(len(task.call.waits)))
        is_loaded = [bool(loads_of_ref(self.program, ref)) for ref in call.waits]
        counts = waits_for_count(self.program, call)
        free = tuple(k for k in every if not is_loaded[k])[: 1 if counts else None]
        in_place = not (self.dynamic and is_queued(call))
        working = every
        if in_place and call.streams_after is not None:
            working = every[: call.streams_after]
        with self._loads(task, every[:counts]):
            if call.limited:
                evaluate(call.count, names)
        for ref, is_loaded_count in zip(call.waits, is_loaded, strict=True):
            with self._loads(task, free):
                element = self._element(ref, names, task.rank, expects=is_loaded_count)
                task.waits.append(element)
        with self._loads(task, working):
            writes = [self._operand(task, place, names, False) for place in call.writes]
            has_writes = any(w is not None and not w.is_empty for w in writes)
            reads = [
                self._operand(task, place, names, has_writes) for place in call.reads
            ]
            for ref in call.notifies:
                expects = not self.program.event(ref.name).cross
                element = self._element(ref, names, task.rank, expects=expects)
                task.notifies.append(element)
        task.operands = [*reads, *writes]
        for place, operand in zip(call.writes, writes, strict=True):
            if operand is None:
                self.unknown_writes.add(place.name)
            else:
                self._add(task, operand, every, write=True)
        if has_writes or None in writes or not writes:
            for n, operand in enumerate(reads):
                early = n in call.function.early and in_place
                after = every[:-1] if early else every
                if operand is not None:
                    is_gather = n in call.function.gathers
                    self._add(task, operand, after, gathered=is_gather)

    def _add(self, task: Task, operand: Operand, after: tuple[int, ...], **kinds: bool):
        if not operand.is_empty:
            elements = tuple(product(*(range(*bounds) for bounds in operand.box)))
            access = Access(
                operand.tensor, operand.rank, elements, **_full(kinds, after)
            )
            task.accesses.append(access)

    def _loads(self, task: Task, after: tuple[int, ...]) -> _Recorder:
        return _Recorder(self, task, after)

    def _element(
        self, ref: Place, names: dict[str, Any], own_rank: int, *, expects: bool = False
    ) -> Element | None:
        """The element of a reference, None where its condition does not hold. With
        `expects`, its count is loaded."""
        holds = evaluate(ref.when, names) if ref.when else True
        element = (ref.name,)
        if holds is not UNKNOWN and not holds:
            may_hold = ref.name in self.unknown_events and tables_in([ref.when])
            return element if may_hold else None
        if holds is UNKNOWN:
            self.unsure.append(True)
        rank = evaluate(ref.rank, names) if ref.rank else own_rank
        index = tuple(evaluate(part, names) for part in ref.index)
        if expects:
            at = {f"e{k}": i for k, i in enumerate(index)}
            evaluate(self.program.event(ref.name).expects, {**names, **at})
        if holds is UNKNOWN:
            self.unsure.pop()
        if not self.is_known(ref.texts):
            return element
        if not 0 <= rank < self.program.world:
            raise Refused(f"{ref} on rank {rank}")
        shape = self.event_shapes[ref.name]
        if any(not 0 <= i < n for i, n in zip(index, shape, strict=True)):
            raise Refused(f"{ref} at {index}")
        return element if ref.name in self.unknown_events else (ref.name, rank, index)

    def _operand(
        self, task: Task, place: Place, names: dict[str, Any], strict: bool
    ) -> Operand | None:
        """The region, None if it is unknown. `strict`: it must not begin behind the
        edge."""
        rank = evaluate(place.rank, names) if place.rank else task.rank
        box = []
        parts = [part_of(text) for text in place.index]
        shape = self.shapes[place.name][task.rank]
        for part, extent in zip(parts, shape, strict=True):
            start = evaluate(part.start, names)
            size = evaluate(part.size, names) if part.size else extent
            if self.is_known([part.start]):
                limited = strict or tables_in([part.start])
                most = (extent if limited else start) if part.kept else extent - 1
                if not 0 <= start <= most:
                    raise Refused(f"{place} begins at {start}")
            if UNKNOWN not in (start, size):
                box.append((start, max(start, min(start + size, extent))))
        texts = [text for part in parts for text in (part.start, part.size or "0")]
        if not self.is_known([*texts, place.rank or "0"]):
            return None
        if not 0 <= rank < self.program.world:
            raise Refused(f"{place} on rank {rank}")
        whole = self.program.tensor(place.name).shape
        sizes = (p.size or n for p, n in zip(parts, whole, strict=True))
        return Operand(place.name, rank, tuple(box), tuple(sizes))

    # ------------------------------------------------------------------ elements

    def elements(self) -> Iterator[tuple[Element, Events]]:
        for event in self.program.events:
            for rank in range(self.program.world):
                for index in product(*map(range, self.event_shapes[event.name])):
                    yield (event.name, rank, index), event

    def expected(self, element: Element, event: Events) -> int:
        _, rank, index = element
        at = {f"e{k}": i for k, i in enumerate(index)}
        return int(evaluate(event.expects, {**self.names[rank], **at}))


def _full(kinds: dict[str, bool], after: tuple[int, ...]) -> dict[str, Any]:
    return {"write": False, "after": after, **kinds}


class _Recorder:
    """Adds the loads in a block of `with` to the accesses of a task."""

    def __init__(self, expansion: Expansion, task: Task, after: tuple[int, ...]):
        self.expansion, self.task, self.after = expansion, task, after

    def __enter__(self) -> None:
        self.expansion.loads.clear()

    def __exit__(self, *_: object) -> None:
        task, shapes = self.task, self.expansion.shapes
        for name, index in dict.fromkeys(self.expansion.loads):
            shape = shapes[name][task.rank]
            every = tuple(product(*map(range, shape)))
            elements = every if index is None else (index,)
            access = Access(name, task.rank, elements, False, self.after, load=True)
            task.accesses.append(access)
