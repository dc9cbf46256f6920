"""What cannot be predicted, and what the command says of it."""

from __future__ import annotations

import re

import pytest

from etc_dist import cli
from etc_dist.errors import ArgumentError
from etc_dist.ir import minimum
from etc_dist.ops.all_gather_matmul import all_gather_matmul_graph
from etc_dist.ops.tuning import default_tuning
from etc_dist.predict.machine import Machine
from etc_dist.predict.simulation import simulate_run
from etc_dist.predict.times import ModelTimes, TracedTimes
from etc_dist.runtime.trace import TaskRecord, Trace
from etc_dist.schedule import schedule_dynamic, schedule_static
from tests.graphs.kit import Kit, made
from tests.graphs.mixtures import moe_graph
from tests.graphs.rank_tiles import tile_dims
from tests.graphs.sent_far import send_rows

MODEL = ModelTimes(default_tuning())
SUMS = ["matmul_reduce_scatter", "rows=256", "n=512", "k=64", "--hosts", "2"]


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (
            [*SUMS, "--far-gbs", "-1"],
            "far link cannot be simulated.*of a prediction.*to 1e.09 GB.*gbs = -1,",
        ),
        (
            [*SUMS, "--message-us", "nan"],
            "the far link cannot be simulated.*to 1e.09 us.*message_us = nan.*correct",
        ),
        ([*SUMS, "--far-gbs", "1e-300"], "gbs = 1e-300"),
        ([*SUMS, "--far-latency-us", "1e308"], "latency_us = 1e.308"),
        (
            ["conv", "rows=8"],
            "unknown OPERATION.*wanted: 'all_gather_matmul' or.*'conv'.*choose one",
        ),
        (
            ["mlp", "rows"],
            "dims of a prediction cannot be read.*as in rows=256.*'rows'.*correct it",
        ),
        (
            ["mlp", "rows=8"],
            "dims do not fit.*rows, hidden, inner.*got:    none for hidden",
        ),
        (["mlp", "rows=8", "rows=16"], "each name once.*got:    'rows=16'"),
        (["mlp", "rows=0"], "rows is out of range.*from 1 to .*rows = 0"),
        (["mlp", f"rows={10**20}"], f"rows is out of range.*rows = {10**20}"),
        (
            ["mlp", "rows=2000000000", "hidden=8", "inner=8"],
            "cannot be predicted.*stage_rows.*at most 2000000 tasks.*smaller dims",
        ),
        (["mlp", "rows=" + 5000 * "9"], "dims of a prediction cannot be read"),
        ([*SUMS, "--hosts", 5000 * "9"], "numbers of hosts cannot be read"),
        ([*SUMS, "--hosts", "2,129"], r"hosts \* local_size is out of range.*= 1032"),
        ([*SUMS, "--local-size", "33"], "local_size is out of range.*from 1 to 32"),
        ([*SUMS, "--plot", "."], "cannot be drawn.*.pdf, .png, .svg.*'.'"),
        ([*SUMS, "--plot", "nowhere/a.png"], "an existing folder.*'nowhere/a.png'"),
        ([*SUMS, "--hosts", "2;4"], "hosts cannot be read.*'2;4'.*by commas"),
        ([*SUMS, "--hosts", "0"], "--hosts is out of range"),
        ([*SUMS, "--workers", "0"], "workers is out of range"),
        ([*SUMS, "--local-size", "0"], "local_size is out of range"),
        ([*SUMS, "--trace", "nothing"], "a trace cannot be read.*nothing"),
    ],
)
def test_the_command_refuses_bad_input_by_name(words, parts, capsys):
    assert cli.main(["predict", *words]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and re.search(parts, captured.err, re.DOTALL)


@pytest.mark.parametrize(
    ("calls", "text"),
    [
        (["tile_matmul", "return_rows", "other"], "other, return_rows"),
        (["tile_matmul"], "no time of stage_rows"),
    ],
)
def test_a_trace_of_another_plan_is_refused(calls, text):
    graph = all_gather_matmul_graph(2, local_size=1)
    trace = Trace.of([TaskRecord(0, 0, "tensor", 0, 9, call, 0) for call in calls])
    dims = {"rows": 256, "n": 256, "k": 64, **tile_dims(graph, 64)}
    with pytest.raises(ArgumentError) as error:
        times = TracedTimes.of(graph, trace)
        simulate_run(schedule_static(graph), dims, times, Machine())
    assert error.value.what == "the trace is of another plan"
    assert error.value.where == "graph all_gather_matmul_graph, 2 ranks"
    assert "send_rows" in error.value.wanted and error.value.got == text


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (
            schedule_static(
                moe_graph(2, local_size=1, experts=8, top_k=2, parallel="expert")
            ),
            "loads in ",
        ),
        (schedule_dynamic(send_rows()), "a dynamic schedule"),
    ],
)
def test_tasks_that_depend_on_data_are_refused(plan, text):
    dims = {dim.name: 256 for dim in plan.graph.dims}
    with pytest.raises(ArgumentError, match="cannot be predicted") as error:
        simulate_run(plan, dims, MODEL, Machine())
    assert text in error.value.got


def test_the_model_knows_matmuls_alone():
    plan = schedule_static(send_rows())
    with pytest.raises(ArgumentError, match="time of call fill is not known"):
        simulate_run(plan, {"rows": 3, "n": 8}, MODEL, Machine())


def test_ranks_with_different_numbers_of_tasks_are_refused():
    def more_on_later_ranks(g: Kit) -> None:
        g.do("few", g.let("own", minimum(g.dims("rows"), g.rank + 1)))

    plan = schedule_static(made(more_on_later_ranks, 3))
    with pytest.raises(ArgumentError, match="one rank stands for all") as error:
        simulate_run(plan, {"rows": 8}, MODEL, Machine())
    assert error.value.got == "1 to 3 tasks"
