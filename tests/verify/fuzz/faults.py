"""Faults that are planted in the verifier, each a statement of one function changed.

A fault that no longer fits is to be planted again where the statement went."""

from __future__ import annotations

import functools
import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

from etc_dist.verify import (
    boxes,
    cells,
    coverage,
    enumerate_plan,
    enumeration,
    happens_before,
    progress,
    races,
)


@dataclass(frozen=True)
class Fault:
    """`old` occurs once in the source of `function`, and `new` takes its place.
    `program` is the number of one that shows it."""

    name: str
    function: FunctionType
    old: str
    new: str
    program: int

    def __str__(self) -> str:
        return self.name.replace(" ", "-")


FAULTS = (
    Fault(
        "an empty grid waits for the event of its count",
        enumerate_plan._Reader.count_events,
        "not call.waits_for_count or not int(call.tasks.evaluate(block.env))",
        "not call.waits_for_count",
        41,
    ),
    Fault(
        "a wait may end too early",
        progress._check_counts,
        "counts.notified > counts.expected",
        "counts.notified > counts.expected + 1",
        22,
    ),
    Fault(
        "one notification needs no wait",
        progress._check_counts,
        "counts.notified > 0",
        "counts.notified > 1",
        32,
    ),
    Fault(
        "tasks of a ticket lane are ordered",
        enumeration.place,
        "lane.policy == STRIDED and not block.call.function.roles",
        "not block.call.function.roles",
        7,
    ),
    Fault(
        "any notification follows a remote write",
        coverage.check_remote_writes,
        "ranks == access.rank[:, None]",
        "ranks != NONE",
        256,
    ),
    Fault(
        "matmuls of one worker are ordered",
        enumeration.place,
        "lane.policy == STRIDED and not block.call.function.roles",
        "lane.policy == STRIDED",
        102,
    ),
    Fault(
        "early reads come after all waits",
        enumeration.Enumeration.free_wait.func,
        "len(block.call.waits) - block.call.function.begins_early",
        "len(block.call.waits)",
        1606,
    ),
    Fault(
        "a loaded wait orders its own load",
        enumeration.Enumeration.free_wait.func,
        "k >= end or ref in block.call.loaded_waits",
        "k >= end",
        28,
    ),
    Fault(
        "writes need no order after reads",
        races.Races.check,
        "in (before, after)",
        "in (before,)",
        45,
    ),
    Fault(
        "chains of steps are searched in too few levels",
        happens_before.HappensBefore.search,
        "self.level[second[pairs]].max()",
        "self.level[second[pairs]].min()",
        9,
    ),
    Fault(
        "operands of several tasks of a class are those of one",
        boxes._kinds,
        "(writes > 0) & (operands > 1)",
        "(writes > 0) & (operands > 9)",
        313,
    ),
    Fault(
        "a task that gathers needs no value",
        cells.merged,
        "np.logical_and.reduceat(cells.gathered | cells.write, at)",
        "np.logical_or.reduceat(cells.gathered, at)",
        116,
    ),
    Fault(
        "a task may be the first to write what it reads",
        coverage.check_reads,
        "(is_own | (writer == NONE))",
        "(writer == NONE)",
        265,
    ),
)


@functools.cache
def _code(fault: Fault) -> CodeType:
    function = fault.function
    source = textwrap.dedent(inspect.getsource(function))
    source = source[source.index("def ") :]
    times = source.count(fault.old)
    assert times == 1, f"{fault.name}: {function.__qualname__} has it {times} times"
    source = "from __future__ import annotations\n" + source
    names: dict[str, Any] = {}
    exec(source.replace(fault.old, fault.new), function.__globals__, names)
    code: CodeType = names[function.__name__].__code__
    return code


@contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """The verifier with `fault`, in the block of `with`."""
    sound = fault.function.__code__
    fault.function.__code__ = _code(fault)
    try:
        yield
    finally:
        fault.function.__code__ = sound
