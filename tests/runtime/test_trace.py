"""Traces: order, text, Perfetto's file, the picture, and records of a GPU."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from etc_dist.codegen.layout import TRACE_RECORD
from etc_dist.runtime.trace import TaskRecord, Trace
from tests.graphs.rank_tiles import tile_dims
from tests.runtime.programs import plan_of

FIRST = TaskRecord(0, 0, "tensor", 1000, 4000, "matmul", 0, (0, 1))
SECOND = TaskRecord(0, 0, "tensor", 4000, 5000, "matmul", 1, (1, 1))
PARALLEL = TaskRecord(0, 1, "transfer", 2000, 3000, "sum", 0, (7,))
OTHER = TaskRecord(1, 0, "tensor", 1500, 5500, "matmul", 0, (0, 1))


def test_records_are_sorted_by_row_then_start():
    trace = Trace.of([OTHER, SECOND, PARALLEL, FIRST])
    assert trace.records == (FIRST, SECOND, PARALLEL, OTHER)
    assert trace.rows == ((0, 0, "tensor"), (0, 1, "transfer"), (1, 0, "tensor"))
    assert trace.calls == ("matmul", "sum")
    assert trace.span == (1000, 5500)


def test_merging_is_the_same_in_any_order():
    first, second = Trace.of([FIRST, PARALLEL, SECOND]), Trace.of([OTHER])
    assert Trace.merge([first, second]) == Trace.merge([second, first])
    assert len(Trace.merge([first, second]).records) == 4


def test_merging_keeps_each_note_once():
    traces = [Trace.of([FIRST], ["cpu", "one"]), Trace.of([OTHER], ["cpu"])]
    assert Trace.merge(traces).notes == ("cpu", "one")


def test_the_text_has_a_line_for_each_rank_and_call():
    assert Trace.of([FIRST, SECOND, PARALLEL, OTHER]).show() == (
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
    Trace.of([FIRST, SECOND, PARALLEL, OTHER]).perfetto(tmp_path / "trace.json")
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
    assert threads == [
        "worker 0 · tensor lane",
        "worker 1 · transfer lane",
        "worker 0 · tensor lane",
    ]


@pytest.mark.parametrize("workers", [4, 132])
def test_the_picture_grows_with_the_rows_up_to_a_limit(workers, tmp_path):
    from matplotlib.image import imread

    trace = Trace.of(
        TaskRecord(rank, worker, lane, 1000 * t, 1000 * t + 900, lane, t, (t,))
        for rank in range(4)
        for worker in range(workers)
        for lane in ("tensor", "transfer")
        for t in range(5)
    )
    trace.png(tmp_path / "trace.png")
    height, width, _ = imread(tmp_path / "trace.png").shape
    assert width == 1680
    assert height == {4: 1214, 132: 2160}[workers]


@pytest.fixture
def figure(monkeypatch):
    """The figure that was drawn last."""
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path: drawn.append(self))
    return lambda: drawn[-1]


def bars(figure):
    """Start and width of every bar, by its colour."""
    from matplotlib.colors import to_hex

    (axes,) = figure.axes
    return {
        to_hex(boxes.get_facecolor()[0]): [
            (path.get_extents().x0, path.get_extents().width)
            for path in boxes.get_paths()
        ]
        for boxes in axes.collections
    }


def test_a_short_task_is_drawn_wide_enough_to_be_seen(figure):
    short = TaskRecord(0, 0, "transfer", 0, 1, "sum", 0)
    Trace.of([FIRST, replace(SECOND, end_ns=401_000), short]).png("")
    blue, orange = bars(figure()).values()
    assert blue == [(1.0, 3.0), (4.0, 397.0)]
    assert orange == [(0.0, pytest.approx(401 / 400))]
    assert "Bars below 1 us are drawn that wide." in figure()._supxlabel.get_text()


@pytest.mark.parametrize(
    ("nanoseconds", "unit"), [(10**6, "us"), (175 * 10**6, "ms"), (3 * 10**9, "s")]
)
def test_the_axis_has_a_unit_that_fits(nanoseconds, unit, figure):
    Trace.of([replace(FIRST, start_ns=0, end_ns=nanoseconds)]).png("")
    (axes,) = figure().axes
    assert axes.get_xlabel() == f"{unit} since the first task began"
    assert axes.get_xlim()[1] < 1100


def test_lanes_calls_and_the_whole_picture_are_named_in_words(figure):
    warp = replace(PARALLEL, lane="transfer.1")
    meanings = {"matmul": "GEMM tiles"}
    Trace.of([FIRST, warp], ["A note."]).png("", "A title", "What to see.", meanings)
    (axes,) = figure().axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "worker 0 · tensor lane",
        "worker 1 · transfer lane, warp 1",
    ]
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend == ["matmul: GEMM tiles", "sum"]
    assert figure().get_suptitle() == "A title"
    caption = figure()._supxlabel.get_text()
    assert caption.startswith("What to see.\nEvery bar is a task. A worker is")
    assert "A note." in caption


def test_colours_do_not_depend_on_what_began_first(figure):
    Trace.of([FIRST, PARALLEL]).png("")
    expected = list(bars(figure()))
    Trace.of([FIRST, replace(PARALLEL, start_ns=0)]).png("")
    assert list(bars(figure())) == expected == ["#1f77b4", "#ff7f0e"]


def test_a_gpu_leaves_records_by_warp():
    plan = plan_of("matmul_reduce_scatter", 2)
    per_warp = np.zeros((2, 12, 4), TRACE_RECORD)
    # Two warps run task 3 of the tensor lane together; then warp 1 takes a transfer.
    per_warp[0, 0, :2] = [(1, 0, 0, 0, 0, 0), (100, 200, 0, 1, 3, 20)]
    of_warp = [(2, 0, 0, 0, 0, 0), (110, 230, 0, 1, 3, 10), (300, 310, 1, 4, 5, 0)]
    per_warp[0, 1, :3] = of_warp
    # A warp with more records than its capacity keeps the first three.
    per_warp[1, 8, 0] = (9, 0, 0, 0, 0, 0)
    per_warp[1, 8, 1:] = [(k, k + 1, 1, 4, k, 0) for k in (10, 20, 30)]
    dims = {"rows": 64, "n": 64, "k": 16, **tile_dims(plan.graph)}
    trace = Trace.from_gpu(plan, dims, 1, per_warp)
    assert [(r.worker, r.lane, r.start_ns, r.end_ns) for r in trace.records] == [
        (0, "tensor", 90, 220),
        (0, "transfer.0", 290, 300),
        (1, "transfer.1", 0, 1),
        (1, "transfer.1", 10, 11),
        (1, "transfer.1", 20, 21),
    ]
    assert trace.records[0].empty_ns == 15  # the mean of the warps
    assert trace.notes[1:] == ("The last tasks of 1 warps are missing.",)
    assert trace.workers == 2
    # Owners in turn, beginning with the next rank: task 3 is tile (3, 0) of rank 0.
    assert trace.records[0].label == "tile_matmul[0, 3, 0]"
    assert trace.records[1].label == "sum_ranks[turn=0, 5, 0, 0]"


def test_a_title_is_drawn_as_it_is_written(tmp_path):
    Trace().png(tmp_path / "trace.png", title=r"$\frac{$")
    assert (tmp_path / "trace.png").stat().st_size > 1000
