"""Scheduling: a graph function becomes a plan, which stays symbolic."""

from etc_dist.schedule.plan import Lane, Plan
from etc_dist.schedule.static import schedule_static

__all__ = ["Lane", "Plan", "schedule_static"]
