"""The verdict on a program, by brute force: it shares no code with `etc_dist.verify`.

All tasks are run in the order of their queues, each pair of accesses of each element is
compared, and each loaded count that is unknown is tried with every value."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import combinations, product

from tests.verify.fuzz.evaluate import Refused, tables_in
from tests.verify.fuzz.order import Entry, Relation, Schedule, loaded_tensors
from tests.verify.fuzz.program import Program
from tests.verify.fuzz.tasks import Expansion, waits_for_count

ACCEPTED, GRAPH, DEADLOCK, RACE = "accepted", "GraphError", "DeadlockError", "RaceError"
Verdicts = frozenset[str]


def judge(program: Program, dynamic: bool) -> Verdicts:
    """The possible verdicts of the verifier: more than one where the order of two
    tasks, of which only one is a further fault, is not determined."""
    try:
        return _Judge(program, dynamic).verdicts()
    except Refused:
        return frozenset({GRAPH})


def verdict(kinds: set[str]) -> str:
    """The error that is raised for faults of these kinds."""
    if len(kinds) > 1:
        return GRAPH
    return next(iter(kinds), ACCEPTED)


@dataclass
class _Judge:
    program: Program
    is_dynamic: bool
    kinds: set[str] = field(default_factory=set)
    options: set[str] = field(default_factory=set)
    """Faults of which it is not certain that they are reported."""

    def verdicts(self) -> Verdicts:
        _refuse_loaded_writes(self.program)
        self.expansion = Expansion(self.program, self.is_dynamic)
        self.tasks = self.expansion.tasks
        self.check_operands()
        self.check_counts()
        self.check_unknown_counts()
        self.check_far()
        schedule = Schedule(self.expansion)
        order = schedule.run(merge=False)
        if len(order) < len(self.tasks):
            self.kinds.add(DEADLOCK)
        elif self.expansion.unknown_events:
            order = schedule.run(merge=True)
        self.relation = None
        if len(order) == len(self.tasks):
            self.relation = Relation(self.tasks, order, schedule.programs())
        self.check_accesses()
        if not self.expansion.unknown_events:
            self.check_remote_writes()
        return frozenset(
            verdict(kinds) for kinds in (self.kinds, self.kinds | self.options)
        )

    # ------------------------------------------------------------------ events

    def check_counts(self) -> None:
        expansion = self.expansion
        self.num_notified = Counter(e for task in self.tasks for e in task.notifies)
        wait_elements = {e for task in self.tasks for e in task.waits}
        wait_elements |= expansion.count_events
        for element, event in expansion.elements():
            if event.name in expansion.unknown_events:
                continue
            count = self.num_notified[element]
            if event.name not in expansion.unknown_counts:
                expected = expansion.expected(element, event)
                if element in wait_elements and count > expected:
                    raise Refused(f"{element} is notified too often")
                if element in wait_elements and count < expected:
                    self.kinds.add(DEADLOCK)
            if element not in wait_elements and count:
                raise Refused(f"no task waits for {element}")

    def check_unknown_counts(self) -> None:
        """Try all values of the unknown counts of loaded extents."""
        expansion = self.expansion
        if not any(task.since for task in self.tasks):
            return
        unknown_elements = expansion.unknown_events | expansion.unknown_counts
        notifiers, waiters = defaultdict(list), defaultdict(list)
        for task in self.tasks:
            for element in task.notifies:
                notifiers[element].append(task.since)
            for k, element in enumerate(task.waits):
                is_first = not k and waits_for_count(self.program, task.call)
                waiters[element].append(None if is_first else task.since)
        most: Counter[object] = Counter()
        for task in self.tasks:
            if task.since:
                most[task.since[0]] = max(most[task.since[0]], task.since[1])
        for element, there in waiters.items():
            if (
                element is None
                or element[0] in unknown_elements
                or not notifiers[element]
            ):
                continue
            notifications = [*notifiers[element], *there]
            names = list({since[0]: None for since in notifications if since})
            for values in product(*(range(most[name] + 1) for name in names)):
                counts = dict(zip(names, values, strict=True))
                num_notified, num_waits = (
                    sum(s is None or s[1] <= counts[s[0]] for s in group)
                    for group in (notifiers[element], there)
                )
                if (num_waits and num_notified < len(notifiers[element])) or (
                    num_notified and not num_waits
                ):
                    self.kinds.add(DEADLOCK)
                    self.options.add(GRAPH)

    # ------------------------------------------------------------------ operands

    def check_operands(self) -> None:
        for task in self.tasks:
            function, num_reads = task.call.function, len(task.call.reads)
            operands = task.operands
            writes = operands[num_reads:]
            if writes and all(w is not None and w.is_empty for w in writes):
                continue
            first, *later_operands = operands or [None]
            for operand in later_operands if function.equal or function.far else ():
                sizes = [o.own_sizes for o in (first, operand) if o is not None]
                lengths = {len(axes) for axes in sizes}
                if len(sizes) == 2 and len(lengths) == 1 and sizes[0] != sizes[1]:
                    raise Refused(f"operands of {task.call.name} have sizes {sizes}")
            for read, write in product(operands[:num_reads], writes):
                if not (function.apart or function.far) or None in (read, write):
                    continue
                if (read.tensor, read.rank) == (write.tensor, write.rank) and all(
                    min(a[1], b[1]) > max(a[0], b[0])
                    for a, b in zip(read.box, write.box, strict=True)
                ):
                    raise Refused(f"operands of {task.call.name} overlap")

    def check_far(self) -> None:
        """Only far functions reach ranks of other hosts, and only partners there."""
        local = self.program.local
        for task in self.tasks:
            ranks = [e[1] for e in task.notifies if e is not None and len(e) > 1]
            ranks += [access.rank for access in task.accesses if access.write]
            for rank in ranks:
                is_partner = task.call.function.far and (rank - task.rank) % local == 0
                if rank // local != task.rank // local and not is_partner:
                    raise Refused(f"{task.call.name} reaches rank {rank}")

    def check_remote_writes(self) -> None:
        for task in self.tasks:
            ranks = {e[1] for e in task.notifies if e is not None}
            for access in task.accesses:
                is_remote = access.write and access.rank != task.rank
                if is_remote and access.rank not in ranks:
                    self.kinds.add(RACE)

    # ------------------------------------------------------------------ accesses

    def check_accesses(self) -> None:
        expansion = self.expansion
        load_names = loaded_tensors(self.program)
        entries_of: dict[tuple[str, int], dict[tuple[int, ...], list[Entry]]] = {
            (tensor.name, rank): {}
            for tensor in self.program.tensors
            for rank in range(self.program.world)
        }
        for task_idx, task in enumerate(self.tasks):
            for access in task.accesses:
                of_tensor = entries_of[access.tensor, access.rank]
                for element in access.elements:
                    of_tensor.setdefault(element, []).append((task_idx, access))
        for tensor in self.program.tensors:
            complete = tensor.name not in expansion.unknown_writes
            is_once = tensor.kind == "output" or tensor.name in load_names
            is_input = tensor.kind in ("input", "state")
            for rank in range(self.program.world):
                elements = entries_of[tensor.name, rank]
                kinds = set()
                for entries in elements.values():
                    kind = tuple((task_idx, id(access)) for task_idx, access in entries)
                    if kind not in kinds:
                        kinds.add(kind)
                        self.check_element(entries, is_once, complete and not is_input)
                if tensor.kind == "output" and complete:
                    shape = expansion.shapes[tensor.name][rank]
                    for element in product(*map(range, shape)):
                        if not any(a.write for _, a in elements.get(element, ())):
                            raise Refused(f"{tensor.name}{element} is never written")

    def check_element(self, entries: list[Entry], once: bool, needs: bool) -> None:
        """`once`: at most one task writes it; `needs`: readers need a writer."""
        writers = [number for number, access in entries if access.write]
        if once and len(writers) > 1:
            raise Refused("an element is written twice")
        if any(access.load and number in writers for number, access in entries):
            self.kinds.add(RACE)
        race = self.relation is not None and self.has_race(entries)
        if race:
            self.kinds.add(RACE)
        for entry in entries:
            if not entry[1].write and needs:
                self.check_read(entry, {*writers}, race)
            if self.tasks[entry[0]].call.function.far and not entry[1].write:
                self.check_kept(entry, entries)

    def has_race(self, entries: list[Entry]) -> bool:
        relation = self.relation
        assert relation is not None
        for entry, later_entry in combinations(entries, 2):
            is_conflict = entry[0] != later_entry[0] and (
                entry[1].write or later_entry[1].write
            )
            if is_conflict and not (
                relation.orders(entry[0], later_entry)
                or relation.orders(later_entry[0], entry)
            ):
                return True
        return False

    def check_read(self, entry: Entry, writers: set[int], race: bool) -> None:
        number, access = entry
        if not writers or self.relation is None:
            if not writers and not access.gathered:
                raise Refused("an element is read that no task writes")
            return
        other_writers = writers - {number}
        if not other_writers:
            if not access.gathered:
                raise Refused("an element is read that only its reader writes")
            return
        if any(self.relation.orders(writer, entry) for writer in other_writers):
            return
        if race:
            self.options.add(GRAPH)
            return
        if access.gathered and (
            number in writers or self.is_later_turn(number, self.first(other_writers))
        ):
            return
        raise Refused("an element is read before it is written")

    def first(self, tasks: set[int]) -> int:
        assert self.relation is not None
        return next(t for t in self.relation.order if t in tasks)

    def is_later_turn(self, first: int, second: int) -> bool:
        first_task, second_task = self.tasks[first], self.tasks[second]
        names = [name for name, _ in first_task.call.loops]
        same = names and names == [name for name, _ in second_task.call.loops]
        return bool(same) and second_task.turn > first_task.turn

    def check_kept(self, entry: Entry, entries: list[Entry]) -> None:
        if self.relation is not None and any(
            access.write and self.relation.orders(entry[0], (number, access))
            for number, access in entries
        ):
            self.kinds.add(RACE)


def _refuse_loaded_writes(program: Program) -> None:
    """No region with loads is written in a tensor that others load from."""
    load_names = loaded_tensors(program)
    for call in program.calls:
        for place in call.writes:
            if place.name in load_names and tables_in(place.texts):
                raise Refused(f"{call.name} writes {place}")
