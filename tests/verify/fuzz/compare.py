"""The verifier's verdict on a program, to be compared with the oracle's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pprint import pformat

from etc_dist.errors import GraphError, ScheduleError
from etc_dist.schedule import schedule_static
from etc_dist.schedule.dynamic import plan_dynamic
from etc_dist.schedule.plan import Plan
from etc_dist.verify.verify import verify
from tests.verify.fuzz.oracle import ACCEPTED, judge
from tests.verify.fuzz.program import Body, Program, build
from tests.verify.fuzz.shrink import shrink
from tests.verify.fuzz.tasks import is_queued


def plans(program: Program, body: Body | None = None) -> Iterator[Plan]:
    """The static plan, and the dynamic one if there is one."""
    yield schedule_static(graph := build(program, body))
    names = [c.name for c in program.calls if c.waits and not is_queued(c)]
    with suppress(ScheduleError):
        yield plan_dynamic(graph, names)


def verdict(program: Program, plan: Plan) -> str:
    """Accepted, or the name of the error."""
    try:
        verify(plan, program.dims, program.workers, program.arrays())
    except GraphError as error:
        return type(error).__name__
    return ACCEPTED


def verdicts(program: Program) -> list[tuple[str, frozenset[str]]]:
    """The verdict on each plan of `program`, and the oracle's possible ones."""
    return [
        (verdict(program, plan), judge(program, plan.schedule == "dynamic"))
        for plan in plans(program)
    ]


def differs(program: Program) -> bool:
    """Whether the verifier and the oracle disagree."""
    return any(
        outcome not in allowed_verdicts
        for outcome, allowed_verdicts in verdicts(program)
    )


def report(program: Program) -> str:
    """The smallest part of `program` on which they disagree."""
    small = shrink(program, differs)
    return f"{pformat(small)}\n{build(small).show()}{verdicts(small)}"
