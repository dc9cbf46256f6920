"""Where the time of a run goes: the sums of a trace over workers, by call."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from etc_dist.ir.function import LANES, TENSOR
from etc_dist.runtime.trace import NO_TASKS, TaskRecord, Trace

IDLE = "idle"
PARTS = {
    "compute": "computing",
    "events": "waits for events",
    "pages": "empty pages, for whose loads matmuls wait",
    IDLE: "workers without further tasks",
}
"""What a worker does, and as words."""


@dataclass
class CallSums:
    """Nanoseconds of all workers in one call. events: before its tasks, until theirs
    were met. pages: within its tasks, until their loads had come."""

    tasks: int = 0
    compute: int = 0
    events: int = 0
    pages: int = 0

    @property
    def total(self) -> int:
        """The time of all parts."""
        return self.compute + self.events + self.pages


@dataclass
class LaneSums:
    """The sums of a lane, in which each of `workers` (or warps, of the transfer lane)
    runs one task at a time. time: of all, from their rank's first task to its last.
    idle: the part of it after their last tasks."""

    workers: int = 0
    time: int = 0
    calls: dict[str, CallSums] = field(default_factory=lambda: defaultdict(CallSums))

    @property
    def idle(self) -> int:
        """The time without tasks."""
        return self.time - sum(sums.total for sums in self.calls.values())

    def of_part(self, part: str) -> int:
        """The time of one of `PARTS`, over all calls."""
        if part == IDLE:
            return self.idle
        return sum(getattr(sums, part) for sums in self.calls.values())


def sum_lane(trace: Trace, lane: str) -> LaneSums:
    """The sums of all rows of a lane."""
    lane_sums = LaneSums()
    rows: dict[int, dict[tuple[int, int, str], list[TaskRecord]]]
    rows = defaultdict(lambda: defaultdict(list))
    for record in trace.records:
        if record.lane.partition(".")[0] == lane:
            rows[record.rank][record.row].append(record)
    for rank, by_row in rows.items():
        begin, end = Trace(tuple(r for r in trace.records if r.rank == rank)).span
        for tasks in by_row.values():
            # NOTE: most warps of the transfer lane have other work before.
            _add_row(lane_sums, tasks, begin if lane == TENSOR else tasks[0].start_ns)
        count = max(len(by_row), trace.workers if lane == TENSOR else 0)
        lane_sums.workers += count
        lane_sums.time += count * (end - begin)
    return lane_sums


def _add_row(lane_sums: LaneSums, tasks: list[TaskRecord], begin: int) -> None:
    """Adds the tasks of one row, in the order of their starts; the first one waited
    from `begin` on."""
    for task in tasks:
        sums, start = lane_sums.calls[task.call], max(task.start_ns, begin)
        busy = max(task.end_ns - start, 0)
        page_ns = min(task.empty_ns, busy)
        sums.tasks += 1
        sums.compute += busy - page_ns
        sums.pages += page_ns
        sums.events += start - begin
        begin = max(begin, task.end_ns)


def show_sums(trace: Trace) -> str:
    """A table for each lane: the time of a worker, on average, by call and by what it
    did; and what most of it was."""
    if not trace.records:
        return NO_TASKS
    lanes = [(lane, sum_lane(trace, lane)) for lane in LANES]
    lines = list(_turns(trace))
    for lane, sums in lanes:
        if sums.workers:
            lines += _table(trace, lane, sums)
    lines.append(_bound(next(sums for _, sums in lanes if sums.workers)))
    return "\n".join([*lines, *trace.notes]) + "\n"


def _turns(trace: Trace) -> Iterator[str]:
    turns: dict[str, set[int]] = defaultdict(set)
    for record in trace.records:
        for name, turn in zip(record.loops, record.coordinate, strict=False):
            turns[name].add(turn)
    if turns:
        text = ", ".join(f"{name} ({len(numbers)})" for name, numbers in turns.items())
        yield f"Turns are summed: {text}."


def _table(trace: Trace, lane: str, sums: LaneSums) -> Iterator[str]:
    width = max(map(len, (*sums.calls, "call", IDLE)))
    per_worker = 1e3 * sums.workers
    what = ("worker" if lane == TENSOR else "warp") + "s" * (sums.workers > 1)
    yield (
        f"{lane} lane, {sums.workers} {what} for {sums.time / per_worker:.1f} us; "
        "us of one on average:"
    )
    titles = "".join(f"{title:>11}" for title in ("compute", "events", "pages", "all"))
    yield f"{'call':{width}}  {'tasks':>8}{titles}  {'share':>6}"
    for call in trace.calls:
        if call in sums.calls:
            parts = sums.calls[call]
            numbers = parts.compute, parts.events, parts.pages, parts.total
            yield _line(call, width, str(parts.tasks), numbers, per_worker, sums.time)
    idle = 0, 0, 0, sums.idle
    yield _line(IDLE, width, "", idle, per_worker, sums.time)
    every = [sums.of_part(part) for part in ("compute", "events", "pages")]
    yield _line("all", width, "", (*every, sums.time), per_worker, sums.time)


def _line(
    name: str,
    width: int,
    tasks: str,
    numbers: tuple[int, ...],
    per_worker: float,
    whole: int,
) -> str:
    texts = "".join(f"{n / per_worker:>11.1f}" if n else f"{'':11}" for n in numbers)
    return f"{name:{width}}  {tasks:>8}{texts}  {numbers[-1] / max(whole, 1):>6.1%}"


def _bound(sums: LaneSums) -> str:
    """What most of the time is."""
    part = max(PARTS, key=sums.of_part)
    whole = max(sums.time, 1)
    text = f"The step is bound by {PARTS[part]}: {sums.of_part(part) / whole:.1%}"
    if part == IDLE:
        return f"{text} of the workers' time."
    most = max(sums.calls, key=lambda call: int(getattr(sums.calls[call], part)))
    share = getattr(sums.calls[most], part) / whole
    return f"{text} of the workers' time, most of it in {most} ({share:.1%})."
