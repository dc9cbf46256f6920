"""A row attends to positions that steps wrote: the counts against sets of positions."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.errors import ArgumentError
from etc_dist.models import load
from etc_dist.models.pages import PageTable, RowLimits
from tests.models.small import make_model

SIZE, PAGES = 4, 7


def places_of(table, request, positions):
    return [(int(table[request, p // SIZE]), p % SIZE) for p in positions]


def draw_rows(rng, table, places_of_tokens):
    """Rows of some requests: mostly the next positions, in any order."""
    rows = []
    for request in rng.permutation(3)[: rng.integers(1, 4)]:
        places = places_of(table, request, range(12))
        first_place = next(
            (n for n, p in enumerate(places) if p not in places_of_tokens), 11
        )
        first = first_place if rng.random() < 0.6 else rng.integers(12)
        rows += [(request, p) for p in range(first, min(first + rng.integers(4), 12))]
    return rng.permutation(np.array(rows, np.int32).reshape(-1, 2)).T


def test_random_steps_agree_with_sets_of_positions(rng):
    outcomes = []
    for _ in range(60):
        pages, places, limits_of_tables = PageTable(3, 3, SIZE, PAGES), set(), {}
        tables = [rng.permutation(9).reshape(3, 3) % PAGES for _ in range(2)]
        tables.append(np.array([[0, 1, 2], [3, 4, -1], [5, -1, -1]]))
        for _ in range(40):
            table = tables[rng.integers(3)]
            if rng.random() < 0.1:
                freed = rng.integers(PAGES, size=2)
                pages.written.forget(freed)
                places = {place for place in places if place[0] not in freed}
            examination = pages.examine(table)
            requests, positions = draw_rows(rng, table, places)
            rows = list(zip(requests.tolist(), positions.tolist(), strict=True))
            new = {place for q, p in rows for place in places_of(table, q, [p])}
            if len(new) < len(requests) or -1 in {page for page, _ in new} or not new:
                continue
            up_to = {c for q, p in rows for c in places_of(table, q, range(p + 1))}
            are_written = places.issuperset(up_to - new)
            is_apart = (
                len(set(requests)) == len(requests) and not examination.has_shared
            )
            limits = RowLimits(examination, table, is_apart)
            limits = limits_of_tables.setdefault(
                (examination.digest, requests.tobytes()), limits
            )
            gap = pages.written.gap(limits, requests, positions)
            assert (gap is None) == are_written
            outcomes.append((is_apart, examination.has_shared, are_written))
            if are_written:
                places |= new
                pages.written.add(positions + 1)
            else:
                row, missing = gap
                assert missing < positions[row]
                [place] = places_of(table, requests[row], [missing])
                assert place not in places | new
    assert len(set(outcomes)) == 6
    assert min(outcomes.count(outcome) for outcome in set(outcomes)) > 9


@pytest.fixture
def model(tmp_path, rng, one_rank):
    options = {"positions": 64, "page_size": 16, "steps_per_launch": 4}
    with load(make_model(tmp_path, rng), batch=2, world=one_rank, **options) as model:
        yield model


TABLE = np.arange(8).reshape(2, 4)


@pytest.mark.mpi(ranks=[1])
def test_a_position_that_no_step_wrote_is_refused(model):
    model.step([1] * 17, [0] * 17, range(17), TABLE)
    for ids, requests, positions, text in (
        ([1], [0], [18], "row 0 at position 18 of request 0, whose position 17 "),
        (
            [1, 1],
            [0, 1],
            [17, 2],
            "row 1 at position 2 of request 1, whose position 0 ",
        ),
        ([1] * 3, [0] * 3, [20, 19, 17], "row 0 at .* whose position 18 was never"),
    ):
        with pytest.raises(ArgumentError, match=text):
            model.step(ids, requests, positions, TABLE)
    model.step([1] * 3, [0, 1, 0], [18, 0, 17], TABLE)
    model.step([1], [0], [5], TABLE)  # again
    model.step([1, 1], [0, 1], [19, 1], TABLE)


@pytest.mark.mpi(ranks=[1])
def test_a_row_that_ends_early_writes_no_later_position(model):
    ids = model.steps([5], [0], [0], TABLE, count=4)[:, 0]
    count = int(np.flatnonzero(ids == ids[1])[0]) + 1
    model.steps([5], [1], [0], TABLE, count=4, stops=[[ids[1]]])
    with pytest.raises(ArgumentError, match=f"position {count} was never written"):
        model.steps([5], [1], [count + 1], TABLE, count=2)
    model.steps([5], [1], [count], TABLE, count=2)
    model.steps([5], [0], [4], TABLE, count=2)


@pytest.mark.mpi(ranks=[1])
def test_pages_that_a_batch_has_freed_are_not_written(model):
    model.step([1] * 3, [0] * 3, range(3), TABLE)
    texts = model.generate([[1] * 20, [2]], max_new_tokens=3)
    for request in (0, 1):
        with pytest.raises(ArgumentError, match="position 0 was never written"):
            model.step([1], [request], [1], TABLE)
    model.step([1] * 2, [0] * 2, range(2), TABLE)
    assert model.generate([[1] * 20, [2]], max_new_tokens=3) == texts
