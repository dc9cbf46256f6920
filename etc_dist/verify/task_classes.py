"""Classes of tasks that the order does not distinguish.

Two tasks of a class are of the same call, in the same turn of its loops, and wait for
and notify the same elements. Each is ordered with any third task as the other one is,
and nothing orders the two: one of them represents both."""

from __future__ import annotations

import numpy as np

from etc_dist.verify.enumeration import NONE, Array, Enumeration
from etc_dist.verify.equal_rows import row_numbers


def task_classes(tasks: Enumeration, *, by_program: bool) -> Array:
    """The class of each task; `by_program`: program order orders tasks, too."""
    counts = [block.count for block in tasks.blocks]
    block = np.repeat(np.arange(len(counts)), counts)
    columns = [block, tasks.turn[1], *tasks.wait.T, *tasks.notify.T]
    if by_program:
        queues = tasks.queues
        places = (queues.queue, queues.position)
        columns += [np.where(queues.strided, place, NONE) for place in places]
    return row_numbers(columns)
