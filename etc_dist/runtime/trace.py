"""Traces: when every task ran and where; shown as text, a picture or for Perfetto."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from etc_dist.ir.call import task_label
from etc_dist.ir.function import LANES, TRANSFER
from etc_dist.schedule.plan import Plan

NO_TASKS = "trace: no tasks\n"
_GPU_CLOCK = "GPUs do not share a clock: each rank's time begins with its first task."


@dataclass(frozen=True, order=True)
class TaskRecord:
    """One task as it ran. `task` is its index in the call's order, `coordinate` the
    tile that this is, first those of `loops`; `lane` is the one that the worker's
    threads belong to. `empty_ns`: how long a matmul waited for its loads."""

    rank: int
    worker: int
    lane: str
    start_ns: int
    end_ns: int
    call: str
    task: int
    coordinate: tuple[int, ...] = ()
    loops: tuple[str, ...] = ()
    empty_ns: int = 0

    @property
    def label(self) -> str:
        """The call and the tile, as text."""
        return task_label(self.call, self.loops, self.coordinate)

    @property
    def row(self) -> tuple[int, int, str]:
        """Rank, worker and lane, which run one task at a time."""
        return self.rank, self.worker, self.lane


@dataclass(frozen=True)
class Trace:
    """The tasks of one run, of one or several ranks, sorted by row, then by start.

    Clocks of ranks are taken as they are; make them comparable before merging.
    notes: sentences about the clock and the rows, for the picture's caption. workers:
    of a rank; 0 if unknown."""

    records: tuple[TaskRecord, ...] = ()
    notes: tuple[str, ...] = ()
    workers: int = 0

    @classmethod
    def of(
        cls, records: Iterable[TaskRecord], notes: Iterable[str] = (), workers: int = 0
    ) -> Trace:
        """The trace of records in any order."""
        return cls(tuple(sorted(records)), tuple(notes), workers)

    @classmethod
    def merge(cls, traces: Iterable[Trace]) -> Trace:
        """One trace of several, each of other ranks."""
        traces = tuple(traces)
        notes = dict.fromkeys(note for trace in traces for note in trace.notes)
        records = (r for trace in traces for r in trace.records)
        return cls.of(records, notes, max((t.workers for t in traces), default=0))

    @classmethod
    def from_gpu(
        cls, plan: Plan, dims: Mapping[str, int], rank: int, per_warp: Any
    ) -> Trace:
        """The trace of a GPU run, from records [worker, warp, slot] as warps left them.

        A warp's slot 0 bears the count of its tasks as `begin`; those that found no
        room are lost. A tensor lane's warps run each task together: one row a worker;
        warps of the transfer lane are rows of their own, "transfer.0" and so on."""
        notes = [_GPU_CLOCK]
        num_tasks = per_warp["begin"][:, :, 0]
        num_full_warps = np.count_nonzero(num_tasks >= per_warp.shape[2])
        if num_full_warps:
            notes.append(f"The last tasks of {num_full_warps} warps are missing.")
        records = _joined(_gpu_records(plan, dims, rank, per_warp))
        return cls.of(records, notes, len(per_warp))

    @property
    def rows(self) -> tuple[tuple[int, int, str], ...]:
        """The (rank, worker, lane) that ran any task, sorted."""
        return tuple(sorted({record.row for record in self.records}))

    @property
    def calls(self) -> tuple[str, ...]:
        """Names of the calls, in the order in which they first ran."""
        first: dict[str, int] = {}
        for r in self.records:
            first[r.call] = min(r.start_ns, first.get(r.call, r.start_ns))
        return tuple(sorted(first, key=lambda call: (first[call], call)))

    @property
    def span(self) -> tuple[int, int]:
        """(first start, last end) in nanoseconds."""
        if not self.records:
            return 0, 0
        starts, ends = zip(*((r.start_ns, r.end_ns) for r in self.records), strict=True)
        return min(starts), max(ends)

    def show(self) -> str:
        """One line per rank and call. "busy" is the share of the rank's span that
        the rows which ran the call spent in it."""
        if not self.records:
            return NO_TASKS
        groups: dict[tuple[int, str], list[TaskRecord]] = defaultdict(list)
        for record in self.records:
            groups[record.rank, record.call].append(record)
        width = max(map(len, (*self.calls, "call")))
        heading = f"{'rank':>4}  {'call':{width}}  {'tasks':>7}  {'total us':>11}"
        lines = [f"{heading}  {'mean us':>9}  {'busy':>6}"]
        for rank in sorted({record.rank for record in self.records}):
            here = Trace(tuple(r for r in self.records if r.rank == rank))
            begin, end = here.span
            for call in here.calls:
                tasks = groups[rank, call]
                total = sum(r.end_ns - r.start_ns for r in tasks)
                available = (end - begin) * len({r.row for r in tasks})
                lines.append(
                    f"{rank:>4}  {call:{width}}  {len(tasks):>7}  {total / 1e3:>11.1f}"
                    f"  {total / 1e3 / len(tasks):>9.2f}"
                    f"  {total / max(available, 1):>6.1%}"
                )
        return "\n".join(lines) + "\n"

    def perfetto(self, path: str | Path) -> None:
        """Write Chrome's trace JSON, for ui.perfetto.dev: a process for each rank, a
        thread for each worker and lane, a slice for each task."""
        threads = {row: thread_idx for thread_idx, row in enumerate(self.rows)}
        events: list[dict[str, Any]] = [
            _named("process_name", rank, 0, f"rank {rank}")
            for rank in sorted({rank for rank, _, _ in threads})
        ]
        for (rank, worker, lane), thread in threads.items():
            name = f"worker {worker} · {lane_name(lane)}"
            events.append(_named("thread_name", rank, thread, name))
            sort = {"sort_index": thread}
            events.append(_meta("thread_sort_index", rank, thread, sort))
        begin, _ = self.span
        for r in self.records:
            events.append(
                {
                    "ph": "X",
                    "name": r.label,
                    "cat": r.call,
                    "pid": r.rank,
                    "tid": threads[r.row],
                    "ts": (r.start_ns - begin) / 1e3,
                    "dur": (r.end_ns - r.start_ns) / 1e3,
                    "args": {
                        "call": r.call,
                        "task": r.task,
                        "tile": r.coordinate,
                        "empty_ns": r.empty_ns,
                    },
                }
            )
        document = {
            "traceEvents": events,
            "displayTimeUnit": "ns",
            "otherData": {"workers": self.workers, "notes": self.notes},
        }
        Path(path).write_text(json.dumps(document))

    def png(
        self,
        path: str | Path,
        title: str = "",
        caption: str = "",
        meanings: Mapping[str, str] | None = None,
    ) -> None:
        """Draw the timeline: a row for each worker and lane, a colour for each call.

        caption: text below the picture. meanings: call name -> text of the legend."""
        # Imported here, as Matplotlib is slow to import.
        from etc_dist.runtime.timeline import draw

        draw(self, path, title, caption, meanings or {})


def lane_name(lane: str) -> str:
    """A lane as text: "transfer.1" is the second warp of the transfer lane."""
    name, _, warp = lane.partition(".")
    return f"{name} lane" + (f", warp {warp}" if warp else "")


def _gpu_records(
    plan: Plan, dims: Mapping[str, int], rank: int, per_warp: Any
) -> Iterator[TaskRecord]:
    count = np.minimum(per_warp["begin"][:, :, :1], per_warp.shape[2] - 1)
    slots = np.arange(per_warp.shape[2])
    worker, warp, slot = np.nonzero((slots >= 1) & (slots <= count))
    stamps = per_warp[worker, warp, slot]
    if not len(stamps):
        return
    # GPUs do not share a clock: each rank's time counts from its first task.
    origin = int(stamps["begin"].min())
    env = plan.graph.environment(dims, rank)
    is_transfer = stamps["lane"] == LANES.index(TRANSFER)
    warps = sorted(set(warp[is_transfer].tolist()))
    for call_idx, call in enumerate(plan.graph.calls):
        rows = np.flatnonzero(stamps["call"] == call_idx)
        if len(rows) == 0:
            continue
        t = stamps["task"][rows].astype(np.int64)
        parts = call.coordinates(t, env).values()
        tiles = np.stack([np.broadcast_to(part, t.shape) for part in parts], axis=1)
        for row, task_idx, tile in zip(rows, t.tolist(), tiles.tolist(), strict=True):
            lane = LANES[int(stamps["lane"][row])]
            if lane == TRANSFER:
                lane = f"{lane}.{warps.index(warp[row])}"
            begin, end = int(stamps["begin"][row]), int(stamps["end"][row])
            empty = int(stamps["empty"][row])
            yield TaskRecord(
                rank,
                int(worker[row]),
                lane,
                begin - origin,
                end - origin,
                call.name,
                task_idx,
                tuple(tile),
                call.loop_names,
                empty_ns=empty,
            )


def _joined(records: Iterable[TaskRecord]) -> Iterator[TaskRecord]:
    """One record per task that several warps ran: from first start to last end, and
    their mean wait for loads."""
    parts: dict[tuple[object, ...], list[TaskRecord]] = defaultdict(list)
    for r in records:
        parts[r.row, r.call, r.task].append(r)
    for of_task in parts.values():
        yield replace(
            of_task[0],
            start_ns=min(r.start_ns for r in of_task),
            end_ns=max(r.end_ns for r in of_task),
            empty_ns=sum(r.empty_ns for r in of_task) // len(of_task),
        )


def _named(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return _meta(kind, process, thread, {"name": name})


def _meta(kind: str, process: int, thread: int, args: object) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": args}
