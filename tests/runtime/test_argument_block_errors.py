"""Shapes that a program's CUDA bodies cannot run at."""

from __future__ import annotations

from dataclasses import replace

import pytest

from etc_dist.codegen import generate
from etc_dist.emulate.rank_memory import EmulatedMemory
from etc_dist.errors import ArgumentError
from etc_dist.functions.push_rows import push_rows
from etc_dist.functions.sum_ranks import sum_ranks
from etc_dist.ir import GraphFunction
from etc_dist.ir.function import TENSOR
from etc_dist.runtime.argument_block import Places, fill
from etc_dist.runtime.memory_plan import Capacity, plan_memory
from etc_dist.schedule import schedule_static
from tests.graphs.calls import Task, calls, one_call
from tests.graphs.kit import made

PLACES = Places((0,), control=0, status=0, local=0, wait_limit=1)


def sums(ranks: int, dtype: str = "bfloat16") -> GraphFunction:
    reads, kinds = [f"slots ranks 4/2 n {dtype}"], {"slots": "symmetric"}
    return one_call(ranks, sum_ranks(dtype), reads, [f"y 4/2 n {dtype}"], kinds=kinds)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_that_are_not_stored_in_whole_units_are_refused(dtype):
    plan = schedule_static(sums(2, dtype))
    EmulatedMemory(plan, generate(plan), [{"n": 24}] * 2, 2)
    with pytest.raises(ArgumentError) as caught:
        EmulatedMemory(plan, generate(plan), [{"n": 12}] * 2, 2)
    error = caught.value
    assert error.what == "a row of tensor slots cannot be stored on a GPU"
    assert error.wanted.startswith("rows of a multiple of 8 elements")
    assert error.got == f"n = 12 elements of {dtype}"


def test_a_dim_beyond_32_bits_is_refused():
    plan = schedule_static(sums(1))

    def filled(n: int) -> int:
        block = fill(plan, generate(plan), {"n": n}, 0, Capacity(), PLACES, 132)
        return int(block["dim_n"])

    assert filled(2**31 - 8) == 2**31 - 8
    with pytest.raises(ArgumentError, match="2147483648, as indices") as caught:
        filled(2**31)
    assert caught.value.got == "n = 2147483648"


@pytest.mark.parametrize(
    ("tasks", "turns", "workers", "more_units"),
    [(1, 2**31 - 9, (8, 132), 123), (3, 2**29, (3, 2), 2)],
)
def test_units_of_all_turns_have_numbers_of_32_bits(tasks, turns, workers, more_units):
    """Those of no call, and of a wave after the last one, included."""
    row, of_turn = "4[0] 8 float32", {"grid": f"i: {tasks}", "loop": "turn: turns"}
    task = Task(push_rows(TENSOR), [f"x {row}"], [f"y {row}"], **of_turn)
    plan = schedule_static(calls(1, tasks=[task], dims="turns"))
    lanes = [replace(lane, dependent_loops=("turn",)) for lane in plan.lanes]
    plan = replace(plan, lanes=tuple(lanes))
    arguments = plan, generate(plan), {"turns": turns}, 0, Capacity(), PLACES
    assert fill(*arguments, workers[0])["dim_turns"] == turns
    with pytest.raises(ArgumentError, match="2147483648, as indices") as caught:
        fill(*arguments, workers[1])
    assert caught.value.got == f"units of lane tensor = {2**31 + more_units}"


def test_a_divisor_that_no_task_divides_by_is_zero():
    graph = one_call(
        1,
        sum_ranks("float32"),
        ["parts ranks 4/1 m float32"],
        ["y 4/1 m float32"],
        dims="m n",
        kinds={"parts": "symmetric"},
        order="select(equal(n, 0), t, t // maximum(1, m // n))",
    )
    plan = schedule_static(graph)
    source = generate(plan)
    divisors = enumerate(source.arguments.divisors)
    (number,) = (number for number, expr in divisors if expr.depth > 0)
    for n, prepared in ((0, [0, 0]), (8, [2**31, 0])):
        block = fill(plan, source, {"m": 8, "n": n}, 0, Capacity(), PLACES, 132)
        assert list(block["divisor"][number]) == prepared


def test_events_beyond_32_bits_are_refused():
    waits = made(lambda g: g.do("w", waits=[g.event("e", g.dims("n"), expects=0)[0]]))
    plan = schedule_static(waits)
    assert plan_memory(plan, {"n": 2**31 - 1}).event_count == 2**31 - 1
    with pytest.raises(ArgumentError, match="event tensors of graph body are too"):
        plan_memory(plan, {"n": 2**31})
