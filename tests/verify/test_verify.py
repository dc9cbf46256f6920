"""Correct programs are proved, with any kind of order between tasks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etc_dist.errors import ArgumentError, RaceError
from etc_dist.ir import GraphFunction, tile
from etc_dist.ops.all_gather_matmul import (
    all_gather_matmul_graph,
    gathered_matmul_graph,
)
from etc_dist.ops.matmul_reduce_scatter import (
    matmul_reduce_scatter_graph,
    returned_matmul_graph,
)
from etc_dist.ops.tile_model import FAMILY, Tiling, choose, dims_of
from etc_dist.ops.tuning import default_tuning
from etc_dist.schedule import schedule_static
from etc_dist.verify.verify import Verified, verify
from tests.conftest import kept_proof
from tests.graphs.kit import ROW, Kit, made
from tests.graphs.mixtures import moe_graph
from tests.graphs.rank_tiles import gather, scatter, tile_dims
from tests.refusals import refused

ranks = st.integers(1, 8)
shapes = st.fixed_dictionaries(
    {"rows": st.integers(1, 70), "n": st.integers(1, 70), "k": st.integers(1, 40)}
)
numbers = st.integers(1, 14)


def check(graph: GraphFunction, workers: int = 4, **dims: Any) -> Verified:
    return verify(schedule_static(graph), dims, workers)


@given(world=ranks, dims=shapes, workers=numbers, split=st.integers(0, 3))
def test_reduce_scatter_is_correct_at_odd_shapes(
    world: int, dims: dict[str, int], workers: int, split: int
) -> None:
    graph = scatter(world)
    dims |= tile_dims(graph, split=min(split, -(-dims["n"] // 16)))
    assert check(graph, workers, **dims).unchecked == ()


@pytest.mark.parametrize("split", [0, 2])
@pytest.mark.parametrize(("world", "k"), [(2, 600), (3, 600), (2, 40_000)])
def test_reduce_scatter_in_turns_is_correct(world: int, k: int, split: int) -> None:
    """Several strips of columns, and with large k several groups of blocks."""
    graph = scatter(world)
    dims = {"rows": 150, "n": 1100, "k": k, **tile_dims(graph, 16, split, 1 + split)}
    env = graph.environment(dims, 0)
    assert env["produced_strips"] > 1
    assert (env["row_group"] < env["tiles_down"]) == (k > 600)
    assert check(graph, 8, **dims).unchecked == ()


@given(world=ranks, dims=shapes, workers=numbers, packet=st.sampled_from([1, 64, 300]))
def test_all_gather_is_correct_at_odd_shapes(
    world: int, dims: dict[str, int], workers: int, packet: int
) -> None:
    graph = gather(world, packet_bytes=packet)
    dims |= tile_dims(graph, split=-(-dims["n"] // 16) // 2)
    assert check(graph, workers, **dims).unchecked == ()


@pytest.mark.parametrize("op", [matmul_reduce_scatter_graph, all_gather_matmul_graph])
def test_real_shapes_are_correct(op: Callable[[int], GraphFunction]) -> None:
    sizes = {"rows": 1024, "n": 13312, "k": 6656}
    parameters = choose((8192, 13312, 6656), 132, FAMILY, default_tuning(), ranks=8)
    dims = sizes | {parameter.dim: parameter.value for parameter in parameters}
    kept_proof(schedule_static(op(8)), dims, 132)


@pytest.mark.parametrize("op", [returned_matmul_graph, gathered_matmul_graph])
@pytest.mark.parametrize("shape", [0, len(FAMILY) // 2, len(FAMILY) - 1])
@pytest.mark.parametrize("parts", [1, 2])
def test_few_rows_are_correct(
    op: Callable[[int], GraphFunction], shape: int, parts: int
) -> None:
    tiling = Tiling(shape, FAMILY[shape].columns, parts - 1, parts)
    check(op(3), 8, rows=100, n=264, k=328, **dims_of(tiling))


def test_verified_counts_all_ranks_and_shows_them() -> None:
    graph = scatter(2)
    proof = check(graph, rows=8, n=16, k=4, **tile_dims(graph))
    # A rank computes 2 tiles, sends 8 rows and sums 8, each in one task of the two
    # turns; 3 operands a tile, else 2.
    assert (proof.tasks, proof.events, proof.accesses) == (12, 6, 20)
    assert proof.show().startswith(
        "verified matmul_reduce_scatter_graph(rows=8, n=16, k=4, shape=0, "
        "column_groups=2, split_tile_columns=0, parts=1) with 4 workers a rank: 12 "
        "tasks, 6 event elements, 20 accesses in "
    )


def two_steps(g: Kit) -> None:
    """Task i of `read` reads what task i of `write` wrote; no event between them."""
    g.do("write", 4, writes=[g.x(4)[ROW]])
    g.do("read", 4, reads=[g.x()[ROW]])


def wait_once(g: Kit) -> None:
    """One wait serves the later tasks of its worker."""
    x, send_event = g.x(2), g.event(expects=2)[0]
    g.do("write", 2, lane="transfer", writes=[x[ROW]], notifies=[send_event])
    g.do("a", reads=[x[:]], waits=[send_event])
    g.do("b", reads=[x[:]])


@pytest.mark.parametrize(("act", "workers"), [(two_steps, 4), (wait_once, 1)])
def test_the_order_of_workers_serves_those_of_one_number(act, workers) -> None:
    check(made(act), workers=workers)
    with pytest.raises(RaceError):
        check(made(act), workers={4: 3, 1: 2}[workers])


def test_tensors_that_events_order_are_checked_once(monkeypatch) -> None:
    def unlike(g: Kit) -> None:
        two_steps(g)
        y, fill_events = g.local("y", (4,), "float32"), g.event("sent", 4)
        g.do("fill", 4, writes=[y[ROW]], notifies=[fill_events[ROW]])
        g.do("use", 4, reads=[y[ROW]], waits=[fill_events[ROW]])

    names = []

    def counted(tasks, cells, tally):
        names.append(cells.tensor.name)

    monkeypatch.setattr("etc_dist.verify.verify.check_own_writes", counted)
    assert not check(made(unlike), workers=4).by_events
    assert names == ["x", "y", "x"]


def relay(g: Kit) -> None:
    """A chain of events orders its ends."""
    first, second = g.event("first")[0], g.event("second")[0]
    g.do("write", writes=[g.x(1)[0]], notifies=[first])
    g.do("pass", waits=[first], notifies=[second])
    g.do("read", reads=[g.x()[0]], waits=[second])


def reuse(g: Kit) -> None:
    """A buffer may be rewritten after its reader notified."""
    x, full, free = g.x(1)[0], g.event("full", 2), g.event("free")[0]
    g.do("fill_0", writes=[x], notifies=[full[0]])
    g.do("use_0", lane="transfer", reads=[x], waits=[full[0]], notifies=[free])
    g.do("fill_1", writes=[x], waits=[free], notifies=[full[1]])
    g.do("use_1", lane="transfer", reads=[x], waits=[full[1]])


def ping_pong(g: Kit) -> None:
    """Two lanes take turns."""
    ping, pong = g.event("ping", 8), g.event("pong", 8)
    g.do("start", notifies=[ping[0]])
    g.do("back", 7, lane="transfer", waits=[ping[ROW]], notifies=[pong[ROW]])
    g.do("there", 7, waits=[pong[ROW]], notifies=[ping[ROW + 1]])
    g.do("end", waits=[ping[7]])


@pytest.mark.parametrize(("act", "workers"), [(relay, 4), (reuse, 4), (ping_pong, 1)])
def test_events_order_tasks(act, workers) -> None:
    check(made(act), workers=workers)


def routed(g: Kit) -> None:
    """A runtime tensor has the number of tasks that send to each of two bins."""
    bin_of, size = g.input("bin_of", (4,), "int32"), g.input("size", (2,), "int32")
    full, to = g.event("full", 2, expects=size.load), bin_of.load(ROW)
    x = g.local("x", (2, 4), "float32")
    g.do("send", 4, writes=[x[to, ROW]], notifies=[full[to]])
    g.do("receive", 2, waits=[full[0], full[1]])


def test_counts_from_runtime_tensors_are_checked_where_given() -> None:
    plan = schedule_static(made(routed))
    tensors = {"bin_of": [np.array([1, 0, 1, 1])], "size": [np.array([1, 3])]}
    assert verify(plan, {}, 2, tensors).unchecked == ()


def test_parts_that_need_absent_tensors_are_named() -> None:
    assert check(made(routed)).unchecked == (
        "the expected count of full (loads from size)",
        "call send, full[bin_of[i]] (loads from bin_of)",
        "call send, x[bin_of[i], i] (loads from bin_of)",
        "races and the order of remote writes",
    )


def test_a_task_beyond_the_edge_touches_nothing() -> None:
    def padded(g: Kit) -> None:
        g.do("write", 5, writes=[g.x(g.dims("n"), kind="output")[tile(ROW, 4)]])

    assert check(made(padded), n=10).accesses == 3


def test_there_is_a_worker() -> None:
    graph = moe_graph(1, experts=8, top_k=2)
    with pytest.raises(ArgumentError, match="from 1 to"):
        check(graph, 0, tokens=1, hidden=8, inner=8)


def three_dims(g: Kit) -> None:
    g.do("write", writes=[g.x(*g.dims("rows n k"))[:, :, :]])


GOOD = {"rows": 1, "n": 1, "k": 1}


@pytest.mark.parametrize(
    ("dims", "words"),
    [
        ({"rows": 1}, "at least 0 for rows, n, k|got: none for n, k to do"),
        ({**GOOD, "m": 1}, "at least 0 for rows, n, k|got: m to do"),
        ({**GOOD, "k": -1}, "k: an integer from 0 on|got: k = -1"),
        ({**GOOD, "k": 1.5}, "k expects an int, got float"),
        ({**GOOD, "k": True}, "k expects an int, got bool"),
        ({**GOOD, "k": None}, "k expects an int, got None"),
    ],
)
def test_dims_are_integers_one_for_each(dims: Any, words: str) -> None:
    plan = schedule_static(made(three_dims))
    for use in (lambda: verify(plan, dims, 4), lambda: plan.show(4, **dims)):
        refused(use, words, (ArgumentError, TypeError))


def test_a_tensor_without_axes_is_one_element() -> None:
    def scalar(g: Kit, waits: bool) -> None:
        x, write_event = g.x()[()], g.event()[0]
        g.do("w", writes=[x], notifies=[write_event])
        g.do("r", reads=[x], waits=[write_event] if waits else [])
        g.do("last", waits=[write_event])

    assert check(made(lambda g: scalar(g, waits=True))).accesses == 2
    with pytest.raises(RaceError, match="w.i=0. on rank 0 writes and r.i=0. on rank 0"):
        check(made(lambda g: scalar(g, waits=False)))
