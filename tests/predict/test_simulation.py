"""Predicted runs, with times that are computed by hand."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from etc_dist import cli
from etc_dist.functions.scaled_weights import PER_BLOCK, Scaling
from etc_dist.functions.tile_shape import TileShape
from etc_dist.ops.matmul import matmul_graph
from etc_dist.ops.tile_model import Tiling, dims_of
from etc_dist.ops.tuning import default_tuning
from etc_dist.predict.machine import Link, Machine
from etc_dist.predict.simulation import simulate_run
from etc_dist.predict.table import OPERATIONS, predict_hosts
from etc_dist.predict.times import TASK_US, ModelTimes, TracedTimes
from etc_dist.runtime.trace import TaskRecord, Trace
from etc_dist.schedule import schedule_static
from tests.graphs.sent_far import send_rows
from tests.world.jobs import run_on_hosts

DIMS = {
    "all_gather_matmul": {"rows": 512, "n": 1024, "k": 512},
    "matmul_reduce_scatter": {"rows": 512, "n": 1024, "k": 512},
    "mlp": {"rows": 512, "hidden": 512, "inner": 512},
}
NO_TIME = Link("near", 1.0)
MACHINE = Machine(workers=1, near=NO_TIME, launch_us=0, poll_us=0)


def predict_three(link: Link, **times: float) -> float:
    """The time of three rows of 20,000 bytes on 2 hosts x 1."""
    graph, machine = send_rows(), replace(MACHINE, far=link)
    plan, dims = schedule_static(graph), {"rows": 3, "n": 5000}
    return simulate_run(plan, dims, TracedTimes(graph, times), machine).us


@pytest.mark.parametrize(
    ("gbs", "us"),
    [
        # Rows are filled at 10, 20 and 30, and sent 1 later. The last message occupies
        # the link for its cost of 4, arrives 5 later, and is acknowledged 5 later.
        (10, 30 + 1 + 4 + 5 + 5),
        # A message occupies the link for 20, from 11 on.
        (1, 11 + 3 * 20 + 5 + 5),
    ],
)
def test_a_run_takes_as_long_as_by_hand(gbs, us):
    link = Link("far", gbs, latency_us=5, message_us=4)
    assert predict_three(link, fill=10, send=1, use=2) == us


def test_sending_waits_for_the_start_of_the_other_host():
    # The start occupies the link for 4 and arrives at 104; the first message ends at
    # 109, the last one at 117, and both latencies follow.
    link = Link("far", 10, latency_us=100, message_us=4)
    assert predict_three(link, fill=0, send=1, use=2) == 104 + 1 + 3 * 4 + 200


def test_what_follows_the_last_message_counts():
    link = Link("far", 10, latency_us=1, message_us=4)
    assert predict_three(link, fill=10, send=1, use=50) == 30 + 1 + 4 + 1 + 50


def test_a_tile_of_float8_reads_half_the_weights():
    dims = {"m": 8, "n": 64, "k": 8192, **dims_of(Tiling(0, 64))}
    times, tuning = [], default_tuning()
    for w_layout in ("nk", Scaling(PER_BLOCK, "float32").w_layout):
        plan = schedule_static(matmul_graph(1, w_layout=w_layout))
        times.append(simulate_run(plan, dims, ModelTimes(tuning), MACHINE).us)
    constants = tuning.tiles
    saved = 64 * 8192 / constants.worker_bytes_per_us
    # By a worker alone, their widening takes longer than their loads.
    assert 0.2 * saved < times[0] - times[1] < 1.1 * saved


def test_tiles_of_float8_activations_are_faster_and_follow_their_rows():
    dims = {"m": 128, "n": 160, "k": 8192}
    times, rate = [], default_tuning().tiles.worker_bytes_per_us
    for shape, quantizes in (
        (TileShape(128, 160), False),
        (TileShape(128, 160, float8=True), True),
    ):
        layout = Scaling(PER_BLOCK, "float32", quantizes=True).w_layout
        options = {"w_layout": layout} if quantizes else {}
        plan = schedule_static(matmul_graph(1, shapes=[shape], **options))
        numbers = dims | dims_of(Tiling(0, 160))
        times.append(
            simulate_run(plan, numbers, ModelTimes(default_tuning()), MACHINE).us
        )
    # One worker quantizes all rows, eight in a task.
    quantized = 16 * TASK_US + 128 * (3 * 8192 + 4 * 64) / rate
    assert 0.5 * times[0] < times[1] - quantized < 0.75 * times[0]


@pytest.mark.parametrize("name", OPERATIONS)
def test_more_bandwidth_is_never_slower(name):
    links = [Link("far", gbs, 3, 2) for gbs in (0.1, 1, 10, 100)]
    predictions = [
        next(predict_hosts(name, DIMS[name], [3], 2, Machine(8, far=link)))
        for link in links
    ]
    times = [prediction.us for prediction in predictions]
    assert times == sorted(times, reverse=True) and times[0] > 2 * times[-1]
    assert all(prediction.us > prediction.bound_us for prediction in predictions)
    assert predictions[0].bound_by == "far bytes"


def test_the_docs_have_the_predictions():
    text = Path(__file__).parents[2].joinpath("docs", "hosts.md").read_text()
    (line,) = re.findall(r"^\| 4 \| (.*) \|$", text, re.MULTILINE)
    cells = []
    for name, n, k in (
        ("matmul_reduce_scatter", 8192, 512),
        ("all_gather_matmul", 512, 8192),
    ):
        dims = {"rows": 256, "n": n, "k": k}
        (run,) = predict_hosts(name, dims, [4], 8, Machine())
        bound = run.bound_by.removesuffix(" bytes")
        cells.append(f"{run.us / 1e3:.2f} ({run.bound_us / run.us:.0%}, {bound})")
    assert line.replace(" %", "%").split(" | ")[1::2] == cells


def test_bytes_of_a_rank():
    """A block of rows goes once to each other host, but for those that stay on the
    rank, through the near rank with the owner's local rank."""
    name = "matmul_reduce_scatter"
    (prediction,) = predict_hosts(name, DIMS[name], [3], 2, replace(MACHINE, workers=2))
    rows = 512 * 1024 * 2  # bytes of those of a rank
    assert prediction.far_bytes == 2 * rows and prediction.hosts == 3
    assert prediction.near_us == 3 * rows / 1e3
    # Each sum of a block, of 256 rows, leaves in one message.
    assert prediction.messages == 2 * 2


def test_times_are_means_of_a_trace():
    records = [
        TaskRecord(rank, 0, lane, 0, ns, call, rank)
        for call, lane in (("fill", "tensor"), ("send", "transfer.0"), ("use", "t"))
        for rank, ns in enumerate((1000, 3000))
    ]
    times = TracedTimes.of(send_rows(), Trace.of(records))
    assert times.us == {"fill": 2.0, "send": 2.0, "use": 2.0}


def test_a_traced_run_over_hosts_has_the_times_of_far_tasks():
    source = """
import numpy as np, etc_dist
from etc_dist.predict.times import TracedTimes
from tests.graphs.exchange_hosts import exchange_hosts, rows_of

world = etc_dist.start()
graph = exchange_hosts(2, local_size=1)
with etc_dist.compile(graph, world, trace=True) as program:
    program.run(x=rows_of(world.rank), y=np.zeros((10, 4), np.float32))
    trace = program.trace()
sent = [r for r in trace.records if r.call == "send_1"]
assert sorted(r.rank for r in sent) == [0, 0, 0, 1, 1, 1], sent
times = TracedTimes.of(graph, trace).us
assert times.keys() == {call.name for call in graph.calls}, times
assert min(times.values()) > 0, times
print("traced", flush=True)
world.close()
"""
    code, output = run_on_hosts(source, 2)
    assert code == 0, output
    assert output.count("traced") == 2


def test_the_command_prints_the_notes_of_a_trace(tmp_path, capsys):
    calls = ("tile_matmul", "sum_near", "send_sums", "sum_hosts")
    records = [TaskRecord(0, 0, "tensor", 0, 9, call, 0) for call in calls]
    file = str(tmp_path / "trace.json")
    Trace.of(records, ["Times of CPUs."]).perfetto(file)
    sizes = ["rows=256", "n=512", "k=64", "--hosts", "2", "--local-size", "1"]
    words = ["predict", "matmul_reduce_scatter", *sizes, "--trace", file]
    assert cli.main(words) == 0
    assert "\nnote of the trace: Times of CPUs.\nhosts " in capsys.readouterr().out
