"""The queue between the threads of a server: what its turns do with messages."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from etc_dist.serve.engine import Engine
from etc_dist.serve.jobs import Ended, Job, Progress
from etc_dist.serve.metrics import Metrics


class Steps:
    """Stands for the owner of the batch: has room for one job, which ends after three
    steps. turns: all that it got. put: what a step is followed by."""

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
        for message in self.after.pop(len(self.turns), ()):
            self.engine.put(message)
        return progress


@pytest.fixture
def engine():
    """Runs messages, and those that are put after some turns; gives the turns."""
    settings = SimpleNamespace(world_limit=60)
    model = SimpleNamespace(
        world=SimpleNamespace(size=1, settings=settings),
        pages=SimpleNamespace(free_pages=1),
    )

    def engine(messages, after):
        steps, news = Steps(), []
        steps.engine, steps.after = Engine(model, steps, Metrics(1)), after
        for message in messages:
            steps.engine.put(message)
        steps.engine.run(news.extend)
        return steps.turns, [one.number for one in news]

    return engine


def job(number):
    return Job(number, [5], 3, frozenset(), None)


def test_jobs_wait_for_room_in_their_order(engine):
    turns, ended = engine([job(1), job(2)], {6: [Ended()]})
    assert turns[:6] == [([1], []), ([], []), ([], []), ([2], []), ([], []), ([], [])]
    assert ended == [1, 2]


def test_jobs_leave_once_from_wherever_they_are(engine):
    # 1 runs, 2 waits, 3 has left before any turn; 4 ends, and its client leaves then.
    messages = [job(1), job(2), job(3), 3]
    after = {1: [2, 1, 1, job(4)], 5: [4, Ended()]}
    turns, ended = engine(messages, after)
    assert turns[:3] == [([1], []), ([], [1]), ([4], [])]
    assert all(turn == ([], []) for turn in turns[3:])
    assert ended == [4]


def test_an_error_of_the_event_loop_is_raised(engine):
    with pytest.raises(ZeroDivisionError):
        engine([job(1)], {2: [Ended(ZeroDivisionError())]})
