"""Scheduling: a graph function becomes a plan, which stays symbolic."""

from etc_dist.schedule.dynamic import schedule_auto, schedule_dynamic
from etc_dist.schedule.plan import Lane, Plan
from etc_dist.schedule.static import schedule_static

__all__ = ["Lane", "Plan", "schedule_auto", "schedule_dynamic", "schedule_static"]
