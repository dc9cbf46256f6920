"""Runs with data that cause races or leave outputs unwritten are errors."""

from __future__ import annotations

from typing import Any

import pytest

from etc_dist import Program
from etc_dist.errors import GraphError, RaceError, WorldError
from tests.graphs.ragged import ragged_attention, scatter, scattered, sequences
from tests.runtime.test_run_check import run

pytestmark = pytest.mark.mpi


def fault_of(program: Program, operands: dict[str, Any]) -> GraphError:
    """What a run raises, with the same text on all ranks."""
    with pytest.raises(GraphError) as caught:
        run(program, operands)
    assert len(set(program.world.gather(str(caught.value)))) == 1
    return caught.value


@pytest.mark.parametrize("schedule", ["static", "dynamic"])
def test_attention_without_an_event_between_its_calls_is_a_race(
    schedule, checked, make_program
):
    program = make_program(
        ragged_attention(checked.size, waits=False), schedule=schedule
    )
    for seed in range(2):
        error = fault_of(program, sequences(seed + checked.rank))
        assert type(error) is RaceError
        assert "a run gave no valid result: graph ragged_attention is not" in error.what
        assert "at rows=10, with the run's first, count" in error.where
        assert "score_row[r=" in error.got and "weigh_rows[s=" in error.got
        assert "scores[0:1] on rank 0; no event orders them" in error.got


@pytest.mark.parametrize("schedule", ["static", "dynamic"])
def test_a_scatter_that_leaves_rows_unwritten_is_refused(
    schedule, checked, make_program
):
    program = make_program(scatter(checked.size), schedule=schedule)
    error = fault_of(program, scattered([4] * 12))
    assert "y[4:5, 0:4] on rank 0 is written by move_row[i=0] on rank 0" in error.got
    assert "no task writes y[0:4, 0:4] on rank 0, a part of the output" in error.got


def test_data_of_one_rank_are_an_error_on_all_and_the_next_run_works(
    checked, make_program
):
    program, last = make_program(scatter(checked.size)), checked.size - 1
    places = [0, 1, 1, 3] if checked.rank == last else [3, 2, 1, 0]
    for _ in range(2):
        error = fault_of(program, scattered(places))
        assert f"y[1:2, 0:4] on rank {last} is written by move_row[i=1]" in error.got
        x = scattered([3, 2, 1, 0])
        assert (run(program, x) == x["x"][::-1]).all()


def test_a_run_that_is_checked_cannot_be_captured(checked, make_program, monkeypatch):
    program = make_program(scatter(checked.size))
    monkeypatch.setattr("etc_dist.program.is_capturing", lambda *_: True)
    with pytest.raises(WorldError, match="whose runs are checked cannot be captured"):
        run(program, scattered([0, 1, 2, 3]))
