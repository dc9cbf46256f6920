"""Scheduling: a graph function becomes a plan, which stays symbolic.

plan.py      lanes, units and policies, as arithmetic; loops.py: the loops of a lane
static.py    the static plan
dynamic.py   the dynamic plan"""

from etc_dist.schedule.dynamic import schedule_dynamic
from etc_dist.schedule.plan import Lane, Plan
from etc_dist.schedule.static import schedule_static

SCHEDULES = {
    "static": schedule_static,
    "dynamic": schedule_dynamic,
    "auto": schedule_static,
}
"""What `schedule=` may be. No record of a recent commit shows a program that is faster
under the dynamic schedule."""

__all__ = ["SCHEDULES", "Lane", "Plan", "schedule_dynamic", "schedule_static"]
