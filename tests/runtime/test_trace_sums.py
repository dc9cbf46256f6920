"""Where the time of a run goes, from its trace and from a file."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from etc_dist import cli
from etc_dist.errors import ArgumentError
from etc_dist.runtime.trace import TaskRecord, Trace
from etc_dist.runtime.trace_file import read_trace
from etc_dist.runtime.trace_sums import PARTS, show_sums, sum_lane
from etc_dist.runtime.trace_turn import show_turn
from examples.add_row_sum import add_row_sum
from tests.ops.arrays import Arrays


def task(worker, start, end, call, turn, empty=0, lane="tensor"):
    at = (turn, worker), ("layer",)
    return TaskRecord(0, worker, lane, start, end, call, worker, *at, empty)


# Worker 0 waits for loads, worker 1 for worker 0; worker 2 has no task.
TRACE = Trace.of(
    [
        task(0, 1000, 5000, "matmul", 0, 3000),
        task(0, 5500, 9000, "matmul", 1, 2500),
        task(1, 5000, 6000, "norm", 0),
        task(1, 9000, 11000, "norm", 1),
        task(1, 6000, 7000, "copy", 0, lane="transfer.1"),
    ],
    ["A note."],
    workers=3,
)


def test_the_parts_of_a_lane_add_up_to_its_time():
    sums = sum_lane(TRACE, "tensor")
    assert (sums.workers, sums.time) == (3, 30_000)
    matmul, norm = sums.calls["matmul"], sums.calls["norm"]
    assert (matmul.compute, matmul.events, matmul.pages) == (2000, 500, 5500)
    assert (norm.compute, norm.events, norm.pages) == (3000, 7000, 0)
    assert sums.idle == 2000 + 10_000


def test_the_text_has_a_line_for_each_call_and_says_what_bounds_the_step():
    assert show_sums(TRACE) == (
        "Turns are summed: layer (2).\n"
        "tensor lane, 3 workers for 10.0 us; us of one on average:\n"
        "call       tasks    compute     events      pages        all   share\n"
        "matmul         2        0.7        0.2        1.8        2.7   26.7%\n"
        "norm           2        1.0        2.3                   3.3   33.3%\n"
        "idle                                                     4.0   40.0%\n"
        "all                     1.7        2.5        1.8       10.0  100.0%\n"
        "transfer lane, 1 warp for 10.0 us; us of one on average:\n"
        "call     tasks    compute     events      pages        all   share\n"
        "copy         1        1.0                              1.0   10.0%\n"
        "idle                                                   9.0   90.0%\n"
        "all                   1.0                             10.0  100.0%\n"
        "The step is bound by workers without further tasks: 40.0% of the workers' "
        "time.\n"
        "A note.\n"
    )


@pytest.mark.parametrize(
    ("records", "text"),
    [
        ([task(0, 0, 9, "a", 0, 8), task(0, 10, 12, "b", 0)], "empty pages, .* in a "),
        ([task(0, 0, 9, "a", 0, 4), task(0, 10, 12, "b", 0)], "computing: .* in a "),
        ([task(0, 0, 2, "a", 0), task(0, 10, 12, "b", 0)], "for events: .* in b "),
    ],
)
def test_what_most_of_the_time_is_bounds_the_step(records, text):
    last = show_sums(Trace.of(records)).splitlines()[-1]
    assert re.search(text, last)


def test_ranks_are_summed_with_their_own_clocks():
    records = [task(0, 0, 8, "a", 0), task(1, 0, 4, "a", 0)]
    later = [replace(r, rank=1, start_ns=99, end_ns=99 + r.end_ns) for r in records]
    sums = sum_lane(Trace.of([*records, *later]), "tensor")
    assert (sums.workers, sums.time, sums.idle) == (4, 32, 8)


def test_the_command_sums_a_file(tmp_path, capsys):
    TRACE.perfetto(tmp_path / "trace.json")
    assert show_sums(read_trace(tmp_path / "trace.json")) == show_sums(TRACE)
    assert cli.main(["trace", str(tmp_path / "trace.json")]) == 0
    assert capsys.readouterr().out == show_sums(TRACE)


def test_a_turn_of_a_loop_is_shown_by_call(tmp_path, capsys):
    TRACE.perfetto(tmp_path / "trace.json")
    command = ["trace", str(tmp_path / "trace.json"), "--loop", "layer"]
    assert cli.main([*command, "--turn", "0"]) == 0
    assert capsys.readouterr().out == (
        "call      tasks      start  first end   last end     a task  its loads\n"
        "matmul        1        0.0        4.0        4.0        4.0        3.0\n"
        "norm          1        4.0        5.0        5.0        1.0        0.0\n"
        "copy          1        5.0        6.0        6.0        1.0        0.0\n"
        "A note.\n"
    )
    assert cli.main(command) == 0
    assert capsys.readouterr().out == show_turn(TRACE, "layer", 1)


def test_of_other_loops_the_last_turn_is_shown():
    at = ("step", "layer")
    records = [
        replace(task(0, t, t + step, "a", 0), loops=at, coordinate=(step, layer, 0))
        for t, (step, layer) in enumerate([(1, 0), (1, 1), (2, 0), (2, 1)])
    ]
    text = show_turn(Trace.of(records), "layer", 0)
    assert text == show_turn(Trace.of(records[2:3]), "layer", 0)


def test_a_turn_has_the_tasks_of_all_turns_of_loops_within_it():
    records = [replace(task(0, 5, 9, "begin", 0), loops=("step",), coordinate=(0, 0))]
    records += [
        replace(
            task(0, 10 + t, 11 + t, "a", 0),
            loops=("step", "layer"),
            coordinate=(0, t, 0),
        )
        for t in range(3)
    ]
    lines = show_turn(Trace.of(records), "step", 0).splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["begin", "1"], ["a", "3"]]


def test_a_turn_of_no_loop_is_refused(tmp_path, capsys):
    TRACE.perfetto(tmp_path / "trace.json")
    assert cli.main(["trace", str(tmp_path / "trace.json"), "--turn", "0"]) == 1
    assert "--turn with --loop" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("loop", "turn", "text"),
    [("layer", 2, "a turn from 0 to 1"), ("step", None, "a loop of the run: layer")],
)
def test_a_turn_that_a_trace_does_not_have_is_refused(loop, turn, text):
    with pytest.raises(ArgumentError) as caught:
        show_turn(TRACE, loop, turn)
    assert caught.value.wanted == text


@pytest.mark.mpi
def test_a_run_is_summed(make_program, world, tmp_path):
    arrays = Arrays(world.backend)
    a = arrays.put(np.ones((300, 128), np.float32))
    program = make_program(add_row_sum(world.size), trace=True)
    program.run(a=a, b=a)
    program.trace().perfetto(tmp_path / "trace.json")
    trace = read_trace(tmp_path / "trace.json")
    sums = [sum_lane(trace, lane) for lane in ("tensor", "transfer")]
    assert [s.calls["add"].tasks + s.calls["row_sum"].tasks for s in sums] == [
        10 * world.size,
        3 * world.size,
    ]
    assert sums[0].workers == world.size * program.workers
    assert all(s.of_part(part) >= 0 for s in sums for part in PARTS)


def test_a_trace_without_tasks_has_no_table():
    assert show_sums(Trace()) == show_turn(Trace(), "layer") == "trace: no tasks\n"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"traceEvents": 3}',
        '{"traceEvents": [{"ph": "X", "name": "x", "pid": 1, "tid": 1}]}',
        '{"traceEvents": [{"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, '
        '"args": {"name": "main"}}, {"ph": "X", "name": "x", "pid": 1, "tid": 1}]}',
    ],
)
def test_other_files_are_refused(text, tmp_path):
    (tmp_path / "trace.json").write_text(text)
    with pytest.raises(ArgumentError) as caught:
        read_trace(tmp_path / "trace.json")
    assert caught.value.where == str(tmp_path / "trace.json")
    assert "ETC_DIST_TRACE=1" in caught.value.fix


def test_a_missing_file_is_refused(capsys):
    assert cli.main(["trace", "/nowhere.json"]) == 1
    assert "No such file" in capsys.readouterr().err
