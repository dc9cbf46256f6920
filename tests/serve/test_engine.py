"""What the turns of a server do with messages."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import pytest

from etc_dist.serve.engine import Engine
from etc_dist.serve.jobs import Ended, Job, Progress


class Steps:
    """Stands for the owner of the batch: has room for one job, which ends after three
    steps. turns: all that it got. after: the messages that follow a turn."""

    num_drafts = 0, 0

    def __init__(self):
        self.turns, self.running, self.after = [], {}, {}

    @property
    def num_running(self):
        return len(self.running)

    def admit(self, waiting):
        return [] if self.running or not waiting else [waiting.popleft()]

    def run(self, turn):
        self.turns.append(([job.number for job in turn.joins], [*turn.leaves]))
        for number in turn.leaves:
            del self.running[number]
        self.running.update((job.number, 3) for job in turn.joins)
        progress = []
        for number in list(self.running):
            self.running[number] -= 1
            if not self.running[number]:
                del self.running[number]
                progress.append(Progress(number, [7], finish="length"))
        self.inbox += self.after.pop(len(self.turns), ())
        return progress


class Inbox:
    """Stands for the channel of the HTTP server. news: of all jobs."""

    def __init__(self, messages):
        self.messages, self.news = deque(messages), []
        self.receive = self.messages.popleft

    def has_message(self, seconds):
        assert self.messages or seconds == 0, "it would wait for ever"
        return bool(self.messages)

    def send(self, report):
        self.news += report.progress


@pytest.fixture
def engine():
    """Runs messages, and those that are put after some turns; gives the turns."""
    settings = SimpleNamespace(world_limit=60)
    model = SimpleNamespace(
        world=SimpleNamespace(size=1, settings=settings),
        pages=SimpleNamespace(free_pages=1),
    )

    def engine(messages, after):
        steps, inbox = Steps(), Inbox(messages)
        steps.inbox, steps.after = inbox.messages, after
        Engine(model, steps, inbox).run()
        return steps.turns, [progress.number for progress in inbox.news]

    return engine


def job(number):
    return Job(number, [5], 3, frozenset(), None)


def test_jobs_wait_for_room_in_their_order(engine):
    turns, end_order = engine([job(1), job(2)], {6: [Ended()]})
    assert turns[:6] == [([1], []), ([], []), ([], []), ([2], []), ([], []), ([], [])]
    assert end_order == [1, 2]


def test_jobs_leave_once_from_wherever_they_are(engine):
    # 1 runs, 2 waits, 3 has left before any turn; 4 ends, and its client leaves then.
    messages = [job(1), job(2), job(3), 3]
    after = {1: [2, 1, 1, job(4)], 5: [4, Ended()]}
    turns, end_order = engine(messages, after)
    assert turns[:3] == [([1], []), ([], [1]), ([4], [])]
    assert all(turn == ([], []) for turn in turns[3:])
    assert end_order == [4]


def test_an_error_of_the_event_loop_is_raised(engine):
    with pytest.raises(ZeroDivisionError):
        engine([job(1)], {2: [Ended(ZeroDivisionError())]})
