"""Reports of the emulator as errors in four parts."""

from __future__ import annotations

from collections.abc import Sequence

from etc_dist.errors import EmulationError, RangeRecord, WaitRecord, WaitTimeoutError
from etc_dist.runtime.device_faults import Record, out_of_range

_FIXES = (
    # words of the report, wanted, fix
    (
        "data race",
        "conflicting accesses that a barrier, event or fence orders",
        "order the two accesses: task.sync() within a task, an event between tasks, "
        "a proxy fence before bulk copies",
    ),
    (
        "out of bounds of all arrays",
        "accesses within the tensors of the graph",
        "compare indices with operand.size, and check that the regions of the call "
        "have the shape that the body expects",
    ),
    (
        "out of bounds of shared memory",
        "accesses within the worker's shared memory",
        "compare indices with Shared::kScratchBytes",
    ),
    (
        "not aligned",
        "addresses that are multiples of the size of the access",
        "begin regions and rows at multiples of the vector's elements, or access "
        "single elements",
    ),
    (
        "an input is written",
        "bodies that write only to the regions of writes=",
        "write to another operand, or declare the tensor as an output or local",
    ),
    (
        "wait for one another",
        "threads that all reach their barriers",
        "call task.sync() and warp functions from all of their threads, outside of "
        "conditions that differ between these",
    ),
    (
        "lanes of a warp",
        "the same call by all lanes of a warp",
        "call warp functions from all 32 lanes, and write to one place from one lane",
    ),
)
_OTHER = (
    "a run without faults",
    "correct the CUDA body, or the regions that its call declares",
)


def emulation_error(report: str, where: str, run: str) -> EmulationError:
    """The error for a report of the library. `where` names the thread."""
    wanted, fix = next(
        (error_parts for part, *error_parts in _FIXES if part in report), _OTHER
    )
    return EmulationError(
        f"the emulated run of {run} failed",
        where=where,
        wanted=wanted,
        got=report,
        fix=fix,
    )


def unfinished(records: Sequence[Record], run: str) -> Exception:
    """The error of a run that waits or data ended, as on GPUs."""
    ranges = [r for r in records if isinstance(r, RangeRecord)]
    if ranges:
        return out_of_range(ranges)
    waits = [r for r in records if isinstance(r, WaitRecord)]
    return WaitTimeoutError(
        f"the emulated run of {run} was ended: a wait was not met",
        where="; ".join(str(w) for w in waits[:4]),
        wanted="each wait met within the emulator's time limit",
        got=f"{len(waits)} waits that were not met",
        fix="check expects=, and that each body ends",
        records=tuple(waits),
    )
