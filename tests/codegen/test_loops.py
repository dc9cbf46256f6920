"""The text of loops: it does not depend on the number of turns."""

from __future__ import annotations

import re

import pytest

from etc_dist.codegen import generate
from etc_dist.ir import GraphFunction
from etc_dist.schedule import SCHEDULES
from tests.graphs.calls import Task, calls
from tests.graphs.decode_steps import decoder
from tests.graphs.kit import touch

F = touch(1, 1)
BOTH = pytest.mark.parametrize("schedule", ["static", "dynamic"])


def layers(turns: int) -> GraphFunction:
    """A loop whose number of turns is a constant of the graph."""
    region = f"{turns}[layer] n[tile(i, 8)] float32"
    operands = [f"x {region}"], [f"y {region}"]
    of_layer = {"grid": "i: 7", "loop": f"layer: {turns}"}
    tasks = [
        Task(F, *operands, name="a", notifies=["done[layer]"], **of_layer),
        Task(F, *operands, name="b", waits=["done[layer]"], **of_layer),
    ]
    parts = f"events done [{turns}] expects 7"
    return calls(1, tasks=tasks, dims="n", parts=parts)


@BOTH
def test_two_and_64_turns_have_the_same_text_but_for_numbers(schedule):
    few, many = (generate(SCHEDULES[schedule](layers(turns))) for turns in (2, 64))
    assert few.arguments == many.arguments
    numbers = [re.findall(r"\b\d+\b", source.text) for source in (few, many)]
    assert set(zip(*numbers, strict=True)) >= {("2", "64"), ("7", "7")}
    assert re.sub(r"\b\d+\b", "#", few.text) == re.sub(r"\b\d+\b", "#", many.text)


@BOTH
def test_a_number_of_turns_that_is_a_dim_is_not_in_the_text(schedule):
    source = generate(SCHEDULES[schedule](decoder(1)), check=False)
    assert source.arguments.dtype.itemsize < 1024
    assert "Turns turns(const Args& g) { return {g.dim_layers, " in source.text or (
        schedule == "dynamic"
    )
    assert not re.search(r"\b64\b", source.text)


def test_a_loop_is_a_part_of_the_list_of_calls():
    source = generate(SCHEDULES["static"](layers(2))).text
    assert "= LoopedCalls<Loop<Loop_tensor_layer, Call_a, Call_b>>;" in source
    assert "Turns turns(const Args& g) { return {2, g.period_tensor_layer, " in source
