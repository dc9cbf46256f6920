"""Classes of tasks that the order does not distinguish.

Two tasks of a class run in the same round, wait for the same elements and notify the
same ones. Each is ordered with any third task as the other one is, and nothing orders
the two: one of them represents both.
"""

from __future__ import annotations

import numpy as np

from etc_dist.verify.enumeration import NONE, Array, Enumeration
from etc_dist.verify.rows import row_numbers


def classes_by_event(tasks: Enumeration, rounds: Array) -> Array:
    """The class of each task, where events alone order tasks."""
    return row_numbers(_columns(tasks, rounds))


def classes_by_order(tasks: Enumeration, rounds: Array) -> Array:
    """The class of each task, where events and program order do."""
    queues = tasks.queues
    place = (queues.queue, queues.position, np.where(queues.whole, NONE, queues.slot))
    strided = (np.where(queues.strided, column, NONE) for column in place)
    return row_numbers((*_columns(tasks, rounds), *strided))


def _columns(tasks: Enumeration, rounds: Array) -> tuple[Array, ...]:
    """What the checks of accesses read of a task, except its place in a queue."""
    tables = (tasks.wait.T, tasks.free_wait.T, tasks.notify.T)
    columns = (column for table in tables for column in table)
    return rounds, *tasks.turn, *columns
