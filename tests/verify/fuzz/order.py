"""The order of a program's tasks: their queues, and which tasks are ordered."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import groupby, product

from tests.verify.fuzz.evaluate import tables_in
from tests.verify.fuzz.program import Call, Program
from tests.verify.fuzz.tasks import Access, Element, Expansion, Task, is_queued

Entry = tuple[int, Access]
"""A task by number, and its access."""


class Schedule:
    """The queues of all lanes: `tasks` in the numbering of the expansion."""

    def __init__(self, expansion: Expansion):
        self.expansion, self.program = expansion, expansion.program
        self.dynamic, self.tasks = expansion.dynamic, expansion.tasks
        self.number = {id(task): n for n, task in enumerate(self.tasks)}
        self.queues = list(self.make_queues())

    def lanes(self) -> Iterator[list[Call]]:
        """The calls of each lane."""
        for name in ("tensor", "transfer"):
            calls = [c for c in self.program.calls if c.function.lane == name]
            if calls:
                yield calls

    def make_queues(self) -> Iterator[tuple[list[Task], bool]]:
        """The queues, each a list of tasks; and whether a worker runs its tasks in this
        order."""
        lanes = product(range(self.program.world), list(self.lanes()))
        for rank, calls in lanes:
            if self.dynamic:
                for queue in self.dynamic_queues(calls, rank):
                    yield queue, False
                continue
            units = list(self.sequence(calls, rank, ()))
            if not self.is_strided(calls):
                yield [task for task in units if task is not None], False
                continue
            workers = self.program.workers
            for k in range(workers):
                yield [task for task in units[k::workers] if task is not None], True

    def dynamic_queues(self, calls: list[Call], rank: int) -> Iterator[list[Task]]:
        """One for tasks that wait in place, and one for each other task."""
        early = [call for call in calls if call.waits and not is_queued(call)]
        units = (self.units(call, rank, ()) for call in early)
        yield [task for call in units for task in call if task is not None]
        for call in calls:
            if call not in early:
                for task in self.expansion.blocks[call.name, rank].values():
                    yield [task]

    def is_strided(self, calls: list[Call]) -> bool:
        """Whether the tasks of a static lane are assigned round-robin."""
        uneven = [call for call in calls if not call.even]
        has_loads = any(loads_of_call(self.program, call) for call in uneven)
        return calls[0].function.lane == "tensor" and not has_loads

    def sequence(
        self, calls: list[Call], rank: int, turn: tuple[int, ...]
    ) -> Iterator[Task | None]:
        """The units of a static lane, in loops turn by turn; None for surplus tasks."""
        num_turns = len(turn)

        def loop(call: Call) -> object:
            return call.loops[num_turns] if num_turns < len(call.loops) else None

        for inner, group in groupby(calls, loop):
            members = list(group)
            if inner is None:
                for call in members:
                    yield from self.units(call, rank, turn)
                continue
            loops, _ = self.expansion.extents(members[0], rank)
            for k in range(loops[num_turns]):
                yield from self.sequence(members, rank, (*turn, k))

    def units(
        self, call: Call, rank: int, turn: tuple[int, ...]
    ) -> Iterator[Task | None]:
        """The units of a call in one turn; None for surplus tasks."""
        _, axes = self.expansion.extents(call, rank)
        total = 1
        for extent in axes:
            total *= extent
        block = self.expansion.blocks[call.name, rank]
        yield from (block.get((*turn, i)) for i in range(total))

    def run(self, merge: bool) -> list[int]:
        """The tasks that run, in an order in which they can. Elements of unknown event
        tensors: one for each tensor with `merge`, else none."""

        def counted(elements: list[Element | None]) -> list[Element]:
            return [e for e in elements if e is not None and (merge or len(e) > 1)]

        counts = Counter(e for task in self.tasks for e in counted(task.notifies))
        order: list[int] = []

        def step(task: Task) -> bool:
            """Run a task if it can; whether it has run."""
            if any(counts[e] for e in counted(task.waits)):
                return False
            order.append(self.number[id(task)])
            counts.subtract(counted(task.notifies))
            return True

        queues = [[*units] for units, _ in self.queues]
        num_before = -1
        while len(order) > num_before:
            num_before = len(order)
            for units in queues:
                while units and step(units[0]):
                    units.pop(0)
        return order

    def programs(self) -> dict[int, int]:
        """Of each task that its worker runs alone: the one before it."""
        previous: dict[int, int] = {}
        for tasks, strided in self.queues:
            alone = [task for task in tasks if strided and not task.call.function.roles]
            numbers = [self.number[id(task)] for task in alone]
            previous.update(zip(numbers[1:], numbers, strict=False))
        return previous


class Relation:
    """Which tasks are ordered: by an event, by their worker, or by a chain of both."""

    def __init__(self, tasks: list[Task], order: list[int], previous: dict[int, int]):
        self.tasks, self.order = tasks, order
        self.notifiers: dict[Element | None, int] = defaultdict(int)
        """A bit for each task before the element is met."""
        self.worker = [0] * len(tasks)
        """Of each task: a bit for each task that is ordered before by its worker."""
        bits = [0] * len(tasks)
        for number in order:
            if number in previous:
                self.worker[number] = bits[previous[number]]
            every = tuple(range(len(tasks[number].waits)))
            bits[number] = self.before(number, every) | (1 << number)
            for element in tasks[number].notifies:
                if element is not None:
                    self.notifiers[element] |= bits[number]

    def before(self, number: int, waits: tuple[int, ...]) -> int:
        bits = self.worker[number]
        for k in waits:
            bits |= self.notifiers[self.tasks[number].waits[k]]
        return bits

    def orders(self, first: int, second: Entry) -> bool:
        """Whether the first task ends before the second one's access."""
        number, access = second
        return bool(self.before(number, access.after) >> first & 1)


def loads_of_call(program: Program, call: Call) -> frozenset[str]:
    """The tensors that the index expressions of a call load from."""
    refs = [*call.waits, *call.notifies]
    places = [*call.reads, *call.writes, *refs]
    texts = [text for place in places for text in place.texts]
    for ref in refs:
        event = program.event(ref.name)
        if ref in call.waits or not event.cross:
            texts.append(event.expects)
    return tables_in([*texts, call.count or "0"])


def loaded_tensors(program: Program) -> set[str]:
    names = {*tables_in([event.expects for event in program.events])}
    return names.union(*(loads_of_call(program, call) for call in program.calls))
