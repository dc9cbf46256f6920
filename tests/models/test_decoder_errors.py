"""A decoder with a wrong wait or a wrong number of turns is refused, with the turn."""

from __future__ import annotations

from dataclasses import replace

import pytest

from etc_dist.functions.plan_shares import LEAST_RUN
from etc_dist.models.decoder import decoder_graph
from etc_dist.models.sizes import DecoderSizes
from tests.models.steps import SHAPES, in_parts, plan_data, share_dims
from tests.models.test_decoder_sizes import dims_of
from tests.refusals import refused
from tests.verify.waits import Proved, change

SIZES = DecoderSizes(6, 2, 64, normalizes_heads=True, page_size=16)
GRAPH = decoder_graph(1, sizes=SIZES, shapes=SHAPES, best_columns=64)
DIMS = dims_of(layers=4, rows=3, steps=2) | share_dims(2)
DIMS |= in_parts(1, 2)
DIMS |= {"hidden": 136, "inner": 136, "vocabulary": 520, "all_ids": 520}
TURN = 3
LOOPED = [call.name for call in GRAPH.calls if call.loops == 2]
STEPPED = [call.name for call in GRAPH.calls if call.loops == 1]
STEPPED.remove("plan_shares")  # its worker has embedded a row of the step
DATA = plan_data(DIMS)
WAITS = Proved(GRAPH, DIMS).waits
COVERED = "plan_shares", "append_kv", "combine_slices", "add_mlp_norm", "add_norm"
COVERED += ("attend_prompt",)
for _name in COVERED:
    WAITS.remove((_name, 0))  # their few workers have run tasks that wait for the same
ALL = {n > 0: Proved(GRAPH, DIMS | {"samples": n}, DATA) for n in range(2)}
NUM_ROWS = 3 + 2 * LEAST_RUN
OF_PROMPTS = DIMS | {"rows": NUM_ROWS, "outputs": NUM_ROWS, "most_blocks": 3}
BLOCKS = Proved(GRAPH, OF_PROMPTS, plan_data(OF_PROMPTS))
BOTH = pytest.mark.parametrize("schedule", ["static", "dynamic"])


def of_steps(name: str) -> Proved:
    """At the dims of steps that have tasks of a call."""
    if name == "attend_prompt":
        return BLOCKS
    return ALL[name in ("least_kept", "sample_column")]


@BOTH
def test_a_decoder_is_proved(schedule):
    ALL[False].check(schedule)
    BLOCKS.check(schedule)


@BOTH
@pytest.mark.parametrize("wait", WAITS, ids=str)
def test_each_wait_is_needed(wait, schedule):
    name, number = wait
    fault = of_steps(name).lacks(schedule, name, number)
    assert "layer=" in fault or name not in LOOPED
    assert "[step=" in fault or name not in LOOPED + STEPPED


@BOTH
@pytest.mark.parametrize("name", LOOPED)
def test_a_wait_for_the_turn_before_is_refused_with_its_turn(name, schedule):
    fault = of_steps(name).before(schedule, name, -1, 1, TURN)
    event = of_steps(name).call(name).waits[-1].events.name
    assert f"{event}[0, {TURN}" in fault or f"{name}[" in fault
    assert f"[step=0, layer={TURN}" in fault


@BOTH
@pytest.mark.parametrize("name", LOOPED + STEPPED)
def test_a_wait_for_the_step_before_is_refused_with_its_step(name, schedule):
    fault = of_steps(name).before(schedule, name, -1, 0, 1)
    event = of_steps(name).call(name).waits[-1].events.name
    assert f"{event}[1" in fault or f"{name}[" in fault
    assert "[step=1" in fault


@BOTH
@pytest.mark.parametrize(
    ("more", "where"), [(-1, "ready[0, 4]"), (1, "[step=0, layer=4")]
)
def test_another_number_of_turns_is_refused_with_the_turn(more, where, schedule):
    steps, loop, *_ = ALL[False].call("attend").axes
    turns = replace(loop, extent=loop.extent + more)
    graph = GRAPH
    for name in LOOPED:
        graph = change(
            graph, name, axes=(steps, turns, *ALL[False].call(name).axes[2:])
        )
    refused(lambda: ALL[False].check(schedule, graph), where)
