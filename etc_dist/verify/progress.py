"""Progress: counts the notifications of every element, and runs all queues."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from etc_dist.errors import DeadlockError, GraphError
from etc_dist.ir.event import EventRef
from etc_dist.verify.enumeration import NONE, Array, Block, Enumeration, Mask
from etc_dist.verify.violations import Fault, Tally

BLOCKED_SHOWN = 6
"""Blocked tasks that one fault names."""
CYCLE_SHOWN = 8
"""Steps of a cycle that one fault names."""


@dataclass(frozen=True)
class Counts:
    """By element: its notifications, its waiting tasks, its expected notifications."""

    notified: Array
    awaited: Array
    expected: Array


def count_notifications(tasks: Enumeration) -> tuple[Counts, list[Fault]]:
    """Refuse elements whose number of notifications differs from the expected one.

    Also refuse elements that are notified on a rank where no task waits for them:
    counters are cleared an epoch later, and such a notification might arrive later."""
    total = tasks.elements.total
    num_notifications, num_waits = (
        np.bincount(table[table != NONE], minlength=total)
        for table in (tasks.notify, tasks.wait)
    )
    expected = num_notifications.copy()
    tally = Tally()
    for event in tasks.plan.graph.events:
        if event.name in tasks.unknown_events | tasks.unknown_counts:
            continue
        for rank, first, at in tasks.elements.of(event):
            here = slice(first, first + (len(at[0]) if at else 1))
            try:
                expected[here] = event.expected(at, tasks.environments[rank])
            except (ArithmeticError, IndexError) as error:
                text = f"the expected count of {event.name} on rank {rank}: {error}"
                fix = "correct expects="
                tally.add(event.name, Fault(GraphError, text, fix))
    counts = Counts(num_notifications, num_waits, expected)
    _check_counts(tasks, counts, tally)
    return counts, tally.faults()


def _check_counts(tasks: Enumeration, counts: Counts, tally: Tally) -> None:
    is_awaited = counts.awaited > 0
    is_awaited[tasks.count_events] = True
    few = is_awaited & (counts.notified < counts.expected)
    many = is_awaited & (counts.notified > counts.expected)
    idle = ~is_awaited & (counts.notified > 0)
    for name, first in tasks.elements.first.items():
        size = int(tasks.elements.shape[name].prod(axis=1).sum())
        for kind, wrong in (("few", few), ("many", many), ("idle", idle)):
            bad = int(first[0]) + np.flatnonzero(wrong[first[0] : first[0] + size])
            if bad.size:
                fault = _count_fault(tasks, counts, kind, int(bad[0]), bad.size)
                tally.add((kind, name), fault)


def _count_fault(
    tasks: Enumeration, counts: Counts, kind: str, element: int, num_times: int
) -> Fault:
    name = tasks.elements.name(element)
    have, want = int(counts.notified[element]), int(counts.expected[element])
    if kind == "idle":
        return Fault(
            GraphError,
            f"{name} is notified {have} times, and no task waits for it there",
            "wait for it in a task of that rank, or drop the notification",
            num_times,
        )
    waiter = _waiter(tasks, element)
    if kind == "few":
        return Fault(
            DeadlockError,
            f"{waiter} waits for {name}; the wait can never be met: it expects {want} "
            f"notifications and all tasks together make {have}",
            "notify the element as often as its `expects` says",
            num_times,
        )
    return Fault(
        GraphError,
        f"{waiter} waits for {name}, which expects {want} notifications and gets "
        f"{have}: the wait may end too early",
        "notify the element as often as its `expects` says",
        num_times,
    )


def _waiter(tasks: Enumeration, element: int) -> str:
    waiters = np.flatnonzero((tasks.wait == element).any(axis=1))
    return tasks.name(int(waiters[0])) if waiters.size else "a surplus task"


def run_queues(tasks: Enumeration, counts: Counts) -> tuple[Array, list[Fault]]:
    """The round in which each task runs, NONE for tasks that never run.

    In a round every queue advances to its first task with a wait that earlier rounds do
    not meet. A ticket lane counts as one queue: its first task that has not run is
    always claimed next or already, so more workers never make less progress. So do the
    unqueued tasks of a queue lane that wait; there every other task that is ready runs,
    and counts as a queue. An element with a wrong count, reported already, counts as
    met after all its notifiers."""
    run = _QueueRun(tasks, counts)
    run.finish()
    if not run.rest.size:
        return run.round, []
    unordered = _QueueRun(_without_order(tasks), counts)
    unordered.finish()
    if unordered.rest.size:
        return run.round, [_deadlock(unordered, _BREAK_CYCLE)]
    return run.round, [_deadlock(run, _CHANGE_ORDER)]


def _without_order(tasks: Enumeration) -> Enumeration:
    """`tasks`, each in a queue with no other task."""
    task_idx = np.arange(tasks.tasks)
    names = ["no queue"] * tasks.tasks
    at = np.zeros_like(task_idx)
    queues = replace(tasks.queues, queue=task_idx, position=at, names=names)
    return replace(tasks, queues=queues)


def suppose_events(tasks: Enumeration) -> tuple[Enumeration, Array]:
    """`tasks` with each unknown event tensor as one element, and the rounds of
    `run_queues` for them. All waits for the tensor wait for that element, all
    notifications notify it: an over-approximation of the order of tasks. If it is
    cyclic, some rounds are NONE."""
    first, names = tasks.elements.total, sorted(tasks.unknown_events)
    wait, notify = tasks.wait.copy(), tasks.notify.copy()
    for block in tasks.blocks:
        here = slice(block.base, block.base + block.count)
        for table, refs in ((wait, block.call.waits), (notify, block.call.notifies)):
            for k, ref in enumerate(refs):
                if ref.events.name in names:
                    element = first + names.index(ref.events.name)
                    table[here, k] = np.where(_may_hold(block, ref), element, NONE)
    rank = np.concatenate((tasks.elements.rank, np.full(len(names), NONE)))
    elements = replace(tasks.elements, rank=rank, total=first + len(names))
    supposed_tasks = replace(tasks, elements=elements, wait=wait, notify=notify)
    run = _QueueRun(supposed_tasks, count_notifications(supposed_tasks)[0])
    run.finish()
    return supposed_tasks, run.round


def _may_hold(block: Block, ref: EventRef) -> Mask | bool:
    """Whether the condition of `ref` holds for tasks of `block`, or may hold."""
    try:
        return ref.holds.is_loaded or block.values(ref.holds) != 0
    except ArithmeticError:  # reported with the element
        return True


class _QueueRun:
    """The state of `run_queues`: the remaining tasks and their unmet waits."""

    def __init__(self, tasks: Enumeration, counts: Counts):
        self.tasks, self.counts = tasks, counts
        queues = tasks.queues
        self.num_left = counts.notified.copy()
        self.round = np.full(tasks.tasks, NONE)
        self.order = np.lexsort((queues.position, queues.queue))
        numbers = np.arange(len(queues.names) + 1)
        bounds = np.searchsorted(queues.queue[self.order], numbers)
        self.at, self.end = bounds[:-1].copy(), bounds[1:]
        """By queue: where in `order` its tasks that have not run begin and end."""
        self.active = np.arange(len(queues.names))
        """The queues whose first task may run."""
        waiter, slot = np.nonzero(tasks.wait != NONE)
        element = tasks.wait[waiter, slot]
        by_element = np.argsort(element, kind="stable")
        self.waiters = waiter[by_element]
        self.span = np.concatenate(([0], np.cumsum(counts.awaited)))
        missing = waiter[self.num_left[element] > 0]
        self.missing = np.bincount(missing, minlength=tasks.tasks)

    def finish(self) -> None:
        """Run all tasks that can ever run."""
        number = 0
        while self.advance(number):
            number += 1

    @property
    def rest(self) -> Array:
        """The tasks that have not run, queue by queue."""
        stuck_tasks: Array = self.order[self.round[self.order] == NONE]
        return stuck_tasks

    def blocked(self) -> Mask:
        return self.missing[self.rest] > 0

    def heads(self) -> Array:
        """The position of each queue's first blocked task."""
        queues = self.tasks.queues
        stuck = self.rest[self.blocked()]
        head = np.full(len(queues.names), np.iinfo(np.int64).max)
        # In reverse, the first of a queue is written last and stays.
        head[queues.queue[stuck][::-1]] = queues.position[stuck][::-1]
        return head

    def advance(self, number: int) -> bool:
        """Run all tasks that can run now; False if there are none."""
        tasks = self.take(number)
        elements = self.tasks.notify[tasks]
        elements = elements[elements != NONE]
        np.subtract.at(self.num_left, elements, 1)
        self.release(np.unique(elements[self.num_left[elements] == 0]))
        return tasks.size > 0

    def take(self, number: int) -> Array:
        """The tasks of the active queues up to the first blocked one of each, which run
        in round `number`."""
        batches = [np.zeros(0, np.int64)]
        # Most queues advance by a few tasks, some by many.
        queues, most = self.active, 8
        while (queues := queues[self.at[queues] < self.end[queues]]).size:
            begin = self.at[queues]
            count = np.minimum(most, self.end[queues] - begin)
            start = np.cumsum(count) - count
            index = np.arange(count.sum()) - np.repeat(start, count)
            task = self.order[np.repeat(begin, count) + index]
            free = np.where(self.missing[task] > 0, index, np.repeat(count, count))
            free = np.minimum.reduceat(free, start)
            batches.append(task[index < np.repeat(free, count)])
            self.at[queues] += free
            queues, most = queues[free == count], 2 * most
        tasks: Array = np.concatenate(batches)
        self.round[tasks] = number
        return tasks

    def release(self, elements: Array) -> None:
        """Count the waits that `elements` meet."""
        begin, count = (
            self.span[elements],
            self.span[elements + 1] - self.span[elements],
        )
        offset = np.repeat(begin - np.cumsum(count) + count, count)
        waiter = self.waiters[offset + np.arange(count.sum())]
        np.subtract.at(self.missing, waiter, 1)
        queues = self.tasks.queues
        waiter = waiter[self.missing[waiter] == 0]
        # A queue advances once its first task is free.
        queue = queues.queue[waiter]
        self.active = np.unique(queue[waiter == self.order[self.at[queue]]])


_CHANGE_ORDER = (
    "order the calls of a lane, and the tasks of a call, so that a notifier comes "
    "before the tasks that wait for it"
)
_BREAK_CYCLE = (
    "drop a wait of the cycle, or notify its event from a task that does not depend on "
    "it: no order of these tasks avoids the deadlock"
)


def _deadlock(run: _QueueRun, fix: str) -> Fault:
    """The first tasks that are blocked, and a cycle among the queues."""
    tasks, head = run.tasks, run.heads()
    queues = tasks.queues
    stuck = run.rest[run.blocked()]
    stuck = stuck[queues.position[stuck] == head[queues.queue[stuck]]]
    lines = [f"{run.rest.size} tasks can never run"]
    lines += [_blocked(run, int(task)) for task in stuck[:BLOCKED_SHOWN]]
    if stuck.size > BLOCKED_SHOWN:
        lines.append(f"and {stuck.size - BLOCKED_SHOWN} more are blocked")
    lines.append("a cycle:")
    cycle = _cycle(run, int(stuck[0]), stuck)
    lines += [f"  {step}" for step in cycle[:CYCLE_SHOWN]]
    if len(cycle) > CYCLE_SHOWN:
        lines.append(f"  and {len(cycle) - CYCLE_SHOWN} steps more, back to the first")
    return Fault(DeadlockError, "\n      ".join(lines), fix)


def _unmet(run: _QueueRun, task: int) -> int:
    """The first unmet element of `task`."""
    waits = run.tasks.wait[task]
    waits = waits[waits != NONE]
    return int(waits[run.num_left[waits] > 0][0])


def _blocked(run: _QueueRun, task: int) -> str:
    element = _unmet(run, task)
    want = int(run.counts.expected[element])
    have = int(run.counts.notified[element] - run.num_left[element])
    return (
        f"{run.tasks.name(task)} waits for {run.tasks.elements.name(element)}: "
        f"have {have}, want {want}"
    )


def _cycle(run: _QueueRun, task: int, stuck: Array) -> list[str]:
    """Follow the blocking tasks until one of them repeats.

    One always does: every unmet element has a notifier that did not run, and a blocked
    task in the queue of that notifier."""
    tasks, queues = run.tasks, run.tasks.queues
    text_by_task: dict[int, str] = {}
    while task not in text_by_task:
        element = _unmet(run, task)
        notifiers = np.flatnonzero((tasks.notify == element).any(axis=1))
        notifier = int(notifiers[run.round[notifiers] == NONE][0])
        text = f"{tasks.name(task)} waits for {tasks.elements.name(element)}"
        queue = int(queues.queue[notifier])
        following = notifier
        if notifier not in stuck:
            following = int(stuck[queues.queue[stuck] == queue][0])
            text += (
                f", which {tasks.name(notifier)} notifies, after "
                f"{tasks.name(following)} in {queues.names[queue]}"
            )
        else:
            text += f", which {tasks.name(notifier)} notifies"
        text_by_task[task] = text
        task = following
    steps = list(text_by_task)
    return [text_by_task[t] for t in steps[steps.index(task) :]]
