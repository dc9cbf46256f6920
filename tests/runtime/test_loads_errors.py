"""Data that is out of range."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import etc_dist
from etc_dist import Program, World
from etc_dist.codegen.layout import CONTROL, EVENT_WAIT, OUT_OF_RANGE
from etc_dist.errors import (
    ArgumentError,
    EtcDistError,
    GraphError,
    RangeRecord,
    WaitRecord,
    WaitTimeoutError,
)
from etc_dist.ir import GraphFunction
from etc_dist.runtime.cpu import simulate
from etc_dist.runtime.device_faults import Record, decode, out_of_range
from etc_dist.runtime.last_run import Executor
from etc_dist.schedule import schedule_static
from tests.graphs.calls import one_call
from tests.graphs.permute import inputs, permute, reference
from tests.ops.arrays import Arrays
from tests.runtime.programs import send
from tests.runtime.test_loads import deal, deal_inputs

ROUTING = [0, 2, 1, 1]


def stopped(
    graph: GraphFunction, arrays: list[dict[str, Any]], seed: int = 0, **dims: int
) -> EtcDistError:
    with pytest.raises(EtcDistError) as caught:
        simulate(schedule_static(graph), arrays, dims, seed=seed)
    return caught.value


# ------------------------------------------------------------------- data out of range


@pytest.mark.parametrize("bad", [-1, 4, 2**31 - 1])
def test_an_expert_that_does_not_exist_is_named(bad, seed):
    error = stopped(permute(1), [inputs([0, bad, 1])], seed, n=3)
    assert type(error) is ArgumentError
    assert "the data of a run does not fit its graph" in error.what
    assert "rank 0" in error.where and "lane: move_row[1]" in error.where
    assert error.wanted == "an index within [4], in filled[expert[i]]"
    assert error.got == str(bad)


@pytest.mark.parametrize(("shifted", "offset"), [(-1, "-1"), (3, "4")])
def test_a_region_that_starts_outside_of_its_tensor_is_named(shifted, offset):
    error = stopped(permute(1, shifted=shifted), [inputs([1, 0])], seed=1, n=2)
    assert type(error) is ArgumentError
    assert "a start of 0 .. 2, in packed[" in error.wanted
    assert error.got in (offset, "3")


def chained(row: str = "table.load(at.load(0))") -> GraphFunction:
    """y is a row of x."""
    parts = """
        input at [1] int32
        input table [2] int32
    """
    return one_call(1, send, [f"x 4[{row}] 4 float32"], ["y 4 float32"], parts=parts)


def chain(at: int, table: tuple[int, int] = (1, 3)) -> list[dict[str, Any]]:
    x = np.ones((4, 4), np.float32)
    return [{"x": x, "at": np.array([at], "i4"), "table": np.array(table, "i4")}]


@pytest.mark.parametrize("at", [-1, 2])
def test_a_load_from_beyond_its_tensor_is_named(at):
    error = stopped(chained(), chain(at))
    assert type(error) is ArgumentError
    assert error.wanted == "loads in range, in x[table[at[0]], :]"
    assert error.got == f"table[at[0]]: index {at} is outside of [0, 2)"


def test_a_row_that_is_dropped_from_the_view_must_exist():
    error = stopped(chained(), chain(1, (0, 4)))
    assert (error.wanted, error.got) == (
        "a start of 0 .. 3, in x[table[at[0]], :]",
        "4",
    )


@pytest.mark.parametrize(
    ("divisor", "text"),
    [
        ("n", "at[0]"),
        ("minimum(n, 3)", "min(at[0], 3)"),
        ("maximum(0, n)", "max(0, at[0])"),
        ("(minimum(n + 4, 3) % 3)", "(min(at[0] + 4, 3) % 3)"),
    ],
)
def test_a_division_by_a_loaded_zero_is_named(divisor, text):
    row = "4 // " + re.sub(r"\bn\b", "at.load(0)", divisor)
    error = stopped(chained(row), chain(0))
    assert type(error) is ArgumentError
    assert f"x[4 // {text}, :]" in error.wanted and "zero" in error.got


@pytest.mark.parametrize("bad", [-1, 2])
def test_a_rank_that_does_not_exist_is_named(bad):
    arrays = deal_inputs([0, 1, 2, 6, 7, 8])
    arrays[1]["owner"][0, 0] = bad
    error = stopped(deal(), arrays)
    assert type(error) is ArgumentError
    assert "rank 1" in error.where and "send[0]" in error.where
    assert "a rank of 0 .. 1, in box.on(owner[i, 0])" in error.wanted
    assert error.got == str(bad)


def test_an_index_without_loads_out_of_range_is_a_graph_error():
    beyond = one_call(1, send, ["x 4[4] float32"], ["y 4 float32"])
    error = stopped(beyond, [{"x": np.ones(4, np.float32)}])
    assert type(error) is GraphError


# ------------------------------------------------------------------------ on all ranks


@pytest.fixture
def short_timeout(world: World) -> Iterator[World]:
    before = world.settings
    world.settings = replace(before, wait_limit=1.0)
    yield world
    world.settings = before


@pytest.fixture
def run(short_timeout) -> Callable[[Program, list[int]], list[list[float]]]:
    arrays = Arrays(short_timeout.backend)

    def run(program: Program, routing: list[int]) -> list[list[float]]:
        operands = {name: arrays.put(array) for name, array in inputs(routing).items()}
        y = program.run(**operands)["y"]
        program.synchronize()
        rows: list[list[float]] = arrays.get(y).tolist()
        return rows

    return run


@pytest.mark.mpi
@pytest.mark.parametrize("schedule", ["static", "dynamic"])
@pytest.mark.parametrize("bad", [-1, 4, 2**31 - 1])
def test_bad_data_of_one_rank_is_an_error_on_all_and_the_next_run_works(
    bad, schedule, run, short_timeout
):
    program = etc_dist.compile(
        permute(short_timeout.size), short_timeout, schedule=schedule
    )
    last = short_timeout.size - 1
    for _ in range(2):
        assert run(program, ROUTING) == reference(ROUTING)
        routing = [0, 1, bad, 3] if short_timeout.rank == last else ROUTING
        with pytest.raises(ArgumentError) as caught:
            run(program, routing)
        assert f"rank {last}, worker" in caught.value.where
        assert "move_row[2]" in caught.value.where
        assert "filled[expert[i]]" in caught.value.wanted
        assert len(set(short_timeout.gather(str(caught.value)))) == 1
    assert run(program, ROUTING) == reference(ROUTING)
    program.close()


class Ended(Executor):
    """A backend that ends runs like a GPU: the host reads the failure later."""

    workers = 4

    def __init__(self, world: World, records: list[Record]):
        self.ends, self._has_failed = False, False
        self._records, self._rank = records, world.rank

    def prepare(self, arrays: Any, dims: Any) -> Any:
        return arrays

    def launch(self, launch: Any, stream: Any = None) -> None:
        self._has_failed = self.ends

    def failure(self) -> list[Record] | None:
        return self._records if self._has_failed else None

    def reset(self) -> None:
        self._has_failed = False


@pytest.mark.mpi
@pytest.mark.parametrize("alone", [False, True])
def test_the_next_call_reports_a_run_that_data_ended_on_one_rank(
    alone, short_timeout, unverified
):
    unmet = WaitRecord(
        short_timeout.rank, 1, "tensor", "double_rows[0]", "filled[0]", 0, 1
    )
    outside = RangeRecord(
        short_timeout.rank, 2, "transfer", "move_row[3]", "a map", "a value"
    )
    last = short_timeout.size - 1
    executor = Ended(short_timeout, [outside if short_timeout.rank == last else unmet])
    program = Program(
        schedule_static(permute(short_timeout.size)), short_timeout, executor, "", 0
    )
    arrays = Arrays(short_timeout.backend)
    operands = {name: arrays.put(array) for name, array in inputs(ROUTING).items()}
    for act in (program.synchronize, lambda: program.run(**operands)):
        executor.ends = short_timeout.rank == last or not alone
        program.run(**operands)
        with pytest.raises(ArgumentError) as caught:
            act()
        where = f"rank {last}, worker 2, transfer lane: move_row[3]"
        assert (caught.value.where, caught.value.got) == (where, "a value")
        executor.ends = False
        program.run(**operands)
        program.synchronize()
    program.close()


# --------------------------------------------------------------------- device's records


def control(*faults: tuple[int, ...]) -> Any:
    block = np.zeros(1, CONTROL)[0]
    block["faults"] = len(faults)
    for n, fault in enumerate(faults):
        block["fault"][n] = fault
    return block


def test_range_records_replace_the_waits_that_they_caused():
    plan = schedule_static(permute(1))
    waits = (0, 0, 2, 1, EVENT_WAIT, 1, 0, 1)
    records = decode(
        plan, control(waits, (5, 1, 1, 2, OUT_OF_RANGE, 0, 0, 0)), {"n": 4}, 0, 132
    )
    assert [str(r) for r in records] == ["rank 0, worker 5, transfer lane: move_row[2]"]
    (record,) = records
    assert isinstance(record, RangeRecord)
    assert record.wanted == (
        "elements, regions, ranks, loads and 32-bit results in range, in "
        "packed[place[i] +: 1, :], filled[expert[i]]"
    )
    (record,) = decode(plan, control(waits), {"n": 4}, 0, 132)
    assert "double_rows[1] waits for filled[0]" in str(record)


def test_many_tasks_out_of_range_are_one_error():
    records = [
        RangeRecord(rank, 0, "tensor", f"move_row[{rank}]", "in range", str(rank))
        for rank in range(6)
    ]
    error = out_of_range(records)
    assert not isinstance(error, WaitTimeoutError)
    assert error.where.count("rank") == 4 and error.where.endswith("; and 2 more")
    assert (error.wanted, error.got) == ("in range", "0")
