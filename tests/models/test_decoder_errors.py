"""A decoder with a wrong wait or a wrong number of turns is refused, with the turn."""

from __future__ import annotations

from dataclasses import replace

import pytest

from etc_dist.errors import GraphError
from etc_dist.ir import equal, select
from etc_dist.models.decoder import decoder_graph
from etc_dist.models.sizes import DecoderSizes
from etc_dist.schedule import SCHEDULES
from etc_dist.verify.verify import verify
from tests.models.conftest import SHAPES
from tests.models.test_decoder_sizes import dims_of
from tests.verify.test_verify_errors import change

SIZES = DecoderSizes(6, 2, 64, normalizes_heads=True, page_size=16)
GRAPH = decoder_graph(1, sizes=SIZES, shapes=SHAPES, best_columns=64)
DIMS = dims_of(layers=5, rows=3, steps=3) | {"slices": 2}
DIMS |= {"hidden": 72, "inner": 136, "vocabulary": 520, "all_ids": 520}
TURN = 3
LOOPED = [call.name for call in GRAPH.calls if call.loops == 2]
STEPPED = [call.name for call in GRAPH.calls if call.loops == 1]
WAITS = [(call.name, n) for call in GRAPH.calls for n in range(len(call.waits))]
EARLY = "append_kv", 0
"""A wait after which tasks read before their last one; those of a queue do not."""
for _name in ("attend", "add_mlp_norm", "add_norm"):
    WAITS.remove((_name, 0))  # their few workers have run tasks that wait for the same
BOTH = pytest.mark.parametrize("schedule", ["static", "dynamic"])


def refused(schedule, name, **fields):
    plan = SCHEDULES[schedule](change(GRAPH, name, **fields))
    with pytest.raises(GraphError) as caught:
        verify(plan, dims_with(name), 4)
    return caught.value.got


def dims_with(name):
    """The dims of steps that have tasks of a call."""
    return DIMS | {"samples": int(name in ("least_kept", "sample_column"))}


def call_of(name):
    return next(call for call in GRAPH.calls if call.name == name)


@BOTH
def test_a_decoder_is_proved(schedule):
    verify(SCHEDULES[schedule](GRAPH), DIMS, 4)


@pytest.mark.parametrize(
    ("name", "number", "schedule"),
    [
        (*wait, schedule)
        for wait in WAITS
        for schedule in ("static", "dynamic")
        if (wait, schedule) != (EARLY, "dynamic")
    ],
)
def test_each_wait_is_needed(name, number, schedule):
    waits = call_of(name).waits
    got = refused(schedule, name, waits=waits[:number] + waits[number + 1 :])
    assert f"{name}[" in got or waits[number].events.name in got
    assert "layer=" in got or name not in LOOPED
    assert "[step=" in got or name not in LOOPED + STEPPED


@BOTH
@pytest.mark.parametrize("name", LOOPED)
def test_a_wait_for_the_turn_before_is_refused_with_its_turn(name, schedule):
    *early, wait = call_of(name).waits
    step, layer, *others = wait.index
    before = select(equal(layer, TURN), TURN - 1, layer)
    waits = (*early, replace(wait, index=(step, before, *others)))
    got = refused(schedule, name, waits=waits)
    assert f"{wait.events.name}[0, {TURN}" in got or f"{name}[" in got
    assert f"[step=0, layer={TURN}" in got


@BOTH
@pytest.mark.parametrize("name", LOOPED + STEPPED)
def test_a_wait_for_the_step_before_is_refused_with_its_step(name, schedule):
    *early, wait = call_of(name).waits
    step, *others = wait.index
    before = select(equal(step, 1), 0, step)
    waits = (*early, replace(wait, index=(before, *others)))
    got = refused(schedule, name, waits=waits)
    assert f"{wait.events.name}[1" in got or f"{name}[" in got
    assert "[step=1" in got


@BOTH
@pytest.mark.parametrize(
    ("more", "where"), [(-1, "ready[0, 5]"), (1, "[step=0, layer=5")]
)
def test_another_number_of_turns_is_refused_with_the_turn(more, where, schedule):
    steps, loop, *_ = call_of("attend").axes
    turns = replace(loop, extent=loop.extent + more)
    graph = GRAPH
    for name in LOOPED:
        graph = change(graph, name, axes=(steps, turns, *call_of(name).axes[2:]))
    with pytest.raises(GraphError) as caught:
        verify(SCHEDULES[schedule](graph), DIMS, 4)
    assert where in caught.value.got
