"""A turn of a loop of a traced run, such as a layer of a decode step, call by call."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass
from statistics import median

from etc_dist.errors import ArgumentError
from etc_dist.ir.function import TENSOR
from etc_dist.runtime.trace import NO_TASKS, TaskRecord, Trace


@dataclass(frozen=True)
class Phase:
    """The tasks of one call in a turn; nanoseconds. start, first_end and last_end count
    from the turn's first task of the tensor lane. task: the median of a task. loads:
    the median of what it waited for its loads."""

    call: str
    num_tasks: int
    start: int
    first_end: int
    last_end: int
    task: float
    loads: float


def phases_of(trace: Trace, loop: str, turn: int | None = None) -> list[Phase]:
    """The phases of a turn of a loop on the first rank, in the order of their starts.
    turn: default is the middle one; of loops around it, the last one that has it.

    Raises ArgumentError for a loop or a turn that the trace does not have."""
    records = _of_turn(trace, loop, turn)
    by_call: dict[str, list[TaskRecord]] = defaultdict(list)
    for record in records:
        by_call[record.call].append(record)
    begin = min(
        (r.start_ns for r in records if r.lane == TENSOR),
        default=min(r.start_ns for r in records),
    )
    phases = (_phase(call, tasks, begin) for call, tasks in by_call.items())
    return sorted(phases, key=lambda phase: (phase.start, phase.call))


def _phase(call: str, records: list[TaskRecord], begin: int) -> Phase:
    return Phase(
        call,
        len(records),
        min(r.start_ns for r in records) - begin,
        min(r.end_ns for r in records) - begin,
        max(r.end_ns for r in records) - begin,
        median(r.end_ns - r.start_ns for r in records),
        median(r.empty_ns for r in records),
    )


def _of_turn(trace: Trace, loop: str, turn: int | None) -> list[TaskRecord]:
    """The first rank's records of the turn."""
    every = [r for r in trace.records if r.rank == trace.records[0].rank]
    looped = [(dict(zip(r.loops, r.coordinate, strict=False)), r) for r in every]
    turns = sorted({at[loop] for at, _ in looped if loop in at})
    if turn is None and turns:
        turn = turns[len(turns) // 2]
    if turn not in turns:
        names = sorted({name for at, _ in looped for name in at})
        raise ArgumentError(
            "a trace does not have the turn",
            where=f"loop {loop!r}" + (f", turn {turn}" if turns else ""),
            wanted=f"a turn from {turns[0]} to {turns[-1]}"
            if turns
            else f"a loop of the run: {', '.join(names) or 'it has none'}",
            got=f"turn {turn}" if turns else repr(loop),
            fix="choose another one; the first lines of etc-dist trace FILE list them",
        )
    within = [(at, r) for at, r in looped if at.get(loop) == turn]
    last = max(_around(at, loop) for at, _ in within)
    return [r for at, r in within if _around(at, loop) == last]


def _around(at: Mapping[str, int], loop: str) -> tuple[int, ...]:
    """The turns of the loops around `loop`."""
    names = list(at)
    return tuple(at[name] for name in names[: names.index(loop)])


def show_turn(trace: Trace, loop: str, turn: int | None = None) -> str:
    """A table of the phases of a turn; microseconds. See `phases_of`."""
    if not trace.records:
        return NO_TASKS
    phases = phases_of(trace, loop, turn)
    width = max(len(phase.call) for phase in phases)
    return "\n".join([*_lines(phases, max(width, 4)), *trace.notes]) + "\n"


def _lines(phases: list[Phase], width: int) -> Iterator[str]:
    titles = ("start", "first end", "last end", "a task", "its loads")
    yield f"{'call':{width}}  {'tasks':>7}" + "".join(f"{t:>11}" for t in titles)
    for phase in phases:
        call, num_tasks, *times = astuple(phase)
        texts = "".join(f"{time / 1e3:>11.1f}" for time in times)
        yield f"{call:{width}}  {num_tasks:>7}{texts}"
