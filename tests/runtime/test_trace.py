"""Traces: order, text, Perfetto's file, the picture, and what a GPU leaves."""

from __future__ import annotations

import json

import matplotlib.image
import numpy as np
import pytest

from etc_dist.runtime.trace import TaskRecord, Trace
from tests.runtime.programs import plan_of

FIRST = TaskRecord(0, 0, "tensor", 1000, 4000, "matmul", 0, (0, 1))
SECOND = TaskRecord(0, 0, "tensor", 4000, 5000, "matmul", 1, (1, 1))
BESIDE = TaskRecord(0, 1, "transfer", 2000, 3000, "sum", 0, (7,))
OTHER = TaskRecord(1, 0, "tensor", 1500, 5500, "matmul", 0, (0, 1))


def test_records_are_sorted_by_row_then_start():
    trace = Trace.of([OTHER, SECOND, BESIDE, FIRST])
    assert trace.records == (FIRST, SECOND, BESIDE, OTHER)
    assert trace.rows == ((0, 0, "tensor"), (0, 1, "transfer"), (1, 0, "tensor"))
    assert trace.calls == ("matmul", "sum")
    assert trace.span == (1000, 5500)


def test_merging_is_the_same_in_any_order():
    one, two = Trace.of([FIRST, BESIDE, SECOND]), Trace.of([OTHER])
    assert Trace.merge([one, two]) == Trace.merge([two, one])
    assert len(Trace.merge([one, two]).records) == 4


def test_the_text_has_a_line_for_each_rank_and_call():
    assert Trace.of([FIRST, SECOND, BESIDE, OTHER]).show() == (
        "rank  call      tasks     total us    mean us    busy\n"
        "   0  matmul        2          4.0       2.00  100.0%\n"
        "   0  sum           1          1.0       1.00   25.0%\n"
        "   1  matmul        1          4.0       4.00  100.0%\n"
    )


def test_an_empty_trace_has_a_text_and_a_picture(tmp_path):
    assert Trace().show() == "trace: no tasks\n"
    Trace().png(tmp_path / "empty.png")
    Trace().perfetto(tmp_path / "empty.json")
    assert json.loads((tmp_path / "empty.json").read_text())["traceEvents"] == []


def test_perfetto_gets_a_slice_for_each_task(tmp_path):
    Trace.of([FIRST, SECOND, BESIDE, OTHER]).perfetto(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert [s["name"] for s in slices] == [
        "matmul[0, 1]",
        "matmul[1, 1]",
        "sum[7]",
        "matmul[0, 1]",
    ]
    assert [(s["pid"], s["ts"], s["dur"]) for s in slices] == [
        (0, 0.0, 3.0),
        (0, 3.0, 1.0),
        (0, 1.0, 1.0),
        (1, 0.5, 4.0),
    ]
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {"rank 0", "rank 1"}
    threads = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert threads == ["worker 0 tensor", "worker 1 transfer", "worker 0 tensor"]


@pytest.mark.parametrize("workers", [4, 132])
def test_the_picture_grows_with_the_rows_up_to_a_limit(workers, tmp_path):
    trace = Trace.of(
        TaskRecord(rank, worker, lane, 1000 * t, 1000 * t + 900, lane, t, (t,))
        for rank in range(4)
        for worker in range(workers)
        for lane in ("tensor", "transfer")
        for t in range(5)
    )
    trace.png(tmp_path / "trace.png")
    height, width, _ = matplotlib.image.imread(tmp_path / "trace.png").shape
    assert width == 1680
    assert height == {4: 1070, 132: 2160}[workers]


RECORD = np.dtype(
    [("begin", "u8"), ("end", "u8"), ("lane", "u4"), ("call", "u4"), ("task", "u4")]
)


def test_a_gpu_leaves_records_by_warp():
    plan = plan_of("matmul_reduce_scatter", 2)
    per_warp = np.zeros((2, 12, 4), RECORD)
    # Two warps run task 3 of the tensor lane together; then warp 1 takes a transfer.
    per_warp[0, 0, :2] = [(1, 0, 0, 0, 0), (100, 200, 0, 0, 3)]
    per_warp[0, 1, :3] = [(2, 0, 0, 0, 0), (110, 230, 0, 0, 3), (300, 310, 1, 1, 5)]
    # A warp that ran more than there was room for keeps the first three.
    per_warp[1, 8] = [(9, 0, 0, 0, 0)] + [(k, k + 1, 1, 1, k) for k in (10, 20, 30)]
    # The transfer lane forwards what the tensor lane made.
    per_warp[1, 9, :2] = [(1, 0, 0, 0, 0), (40, 50, 1, 0, 3)]
    dims = {"rows": 64, "n": 64, "k": 16}
    trace = Trace.from_gpu(plan, dims, 1, per_warp)
    assert [(r.worker, r.lane, r.start_ns, r.end_ns) for r in trace.records] == [
        (0, "tensor", 90, 220),
        (0, "transfer.0", 290, 300),
        (1, "transfer.1", 0, 1),
        (1, "transfer.1", 10, 11),
        (1, "transfer.1", 20, 21),
        (1, "transfer.2", 30, 40),
    ]
    assert trace.records[-1].label == "matmul_send (forward)[0, 3, 0]"
    # Owners in turn, beginning with the next rank: task 3 is tile (3, 0) of rank 0.
    assert trace.records[0].label == "matmul_send[0, 3, 0]"
    # Four pieces a tile: task 5 is piece (0, 1) of tile (1, 0).
    assert trace.records[1].label == "sum_slots[1, 0, 0, 1]"
