"""Equal accesses of one tensor are proved once."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest

from etc_dist.ir.expr import wrap
from etc_dist.ir.tensor import Region, Tensor
from etc_dist.schedule import SCHEDULES
from etc_dist.verify import cells
from etc_dist.verify.boxes import Boxes, Cut, boxes_of
from etc_dist.verify.enumeration import BODY, EARLY, Access
from etc_dist.verify.happens_before import HappensBefore
from etc_dist.verify.verify import verify
from tests.conftest import first_always
from tests.graphs.decode_list import decode_list
from tests.graphs.decode_steps import decoder

BOTH = pytest.mark.parametrize("schedule", ["static", "dynamic"])
AXES, EXTENT, TASKS, CLASSES = 2, 4, 5, 2


def draw(rng: np.random.Generator, classes: np.ndarray) -> tuple[Boxes, HappensBefore]:
    """The boxes of a few operands of tasks 0 .. TASKS - 1, which no event orders."""
    shape = (wrap(EXTENT),) * AXES
    tensor = Tensor("x", shape, "float32", "local")
    region = Region(tensor, None, (wrap(0),) * AXES, shape, (True,) * AXES)
    accesses = []
    for _ in range(rng.integers(1, 4)):
        task = np.flatnonzero(rng.random(TASKS) < 0.6)
        low = rng.integers(EXTENT, size=(AXES, task.size))
        high = rng.integers(low, EXTENT) + 1
        if rng.integers(3):  # a row, with the first columns or the last ones
            high[0] = low[0] + 1
            low[1], high[1] = (0, high[1]) if rng.integers(2) else (low[1], EXTENT)
        write, phase = bool(rng.integers(2)), int(rng.choice([EARLY, BODY]))
        rank = np.zeros(task.size, np.int64)
        accesses.append(Access(region, write, task, rank, low, high, phase))
    tables = [np.zeros((CLASSES, 0), np.int64)] * 3
    order = HappensBefore(classes, np.zeros(CLASSES, np.int64), *tables, 0)
    return boxes_of(accesses, 0, AXES), order


def situations(cut: Cut, classes: np.ndarray) -> set[object]:
    """What the cells differ in: their accesses, and pairs of them that need an order or
    are of one task."""
    kinds, boxes = set(), cut.boxes
    for cell in product(*map(range, cut.shape)):
        at = np.array(cell)[:, None]
        here = np.flatnonzero(((cut.begin <= at) & (at < cut.end)).all(axis=0))
        kind = [(int(classes[boxes.task[n]]), int(boxes.operand[n])) for n in here]
        pairs = {
            (frozenset({kind[a], kind[b]}), bool(boxes.task[m] == boxes.task[n]))
            for (a, m), (b, n) in combinations(enumerate(here), 2)
            if boxes.write[m] or boxes.write[n]
        }
        kinds.add((frozenset(kind), frozenset(pairs)))
    return kinds


@pytest.mark.parametrize("count", first_always([(250,), (1000,)], 1))
def test_reduced_boxes_have_cells_of_each_kind(count, rng):
    smaller = 0
    for _ in range(count):
        classes = rng.integers(CLASSES, size=TASKS)
        boxes, order = draw(rng, classes)
        every = boxes.cut([EXTENT] * AXES)
        reduced = boxes.reduced([EXTENT] * AXES, order)
        assert situations(reduced, classes) == situations(every, classes)
        smaller += reduced.cells < every.cells
    assert smaller > count / 20


@BOTH
@pytest.mark.parametrize(("requests", "pages"), [(256, 64), (512, 64), (256, 128)])
def test_a_work_list_costs_about_its_tasks(requests, pages, schedule, monkeypatch):
    # Each item may load any request's count, and each request loads its own.
    monkeypatch.setattr(cells, "MOST_CELLS", requests * pages)
    plan = SCHEDULES[schedule](decode_list(1))
    verified = verify(plan, {"requests": requests, "pages": pages}, 132)
    assert verified.tasks == 1 + requests * pages + requests


@BOTH
def test_tasks_with_events_of_their_own_cost_little_each(schedule, monkeypatch):
    monkeypatch.setattr(cells, "MOST_CELLS", 64 * 64)
    plan = SCHEDULES[schedule](decode_list(1, arrives=True))
    assert verify(plan, {"requests": 64, "pages": 64}, 132).tasks == 1 + 8192 + 64


@BOTH
def test_the_layers_of_a_decoder_cost_little_each(schedule, monkeypatch):
    monkeypatch.setattr(cells, "MOST_CELLS", 64 * 320)
    plan = SCHEDULES[schedule](decoder(1))
    assert verify(plan, {"layers": 64, "rows": 20}, 132).tasks > 60000
