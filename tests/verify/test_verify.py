"""Correct programs are proved, with any kind of order between tasks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etc_dist.errors import ArgumentError, RaceError
from etc_dist.ir import Graph, GraphFunction, tile
from etc_dist.layers.moe import moe_graph
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
from tests.graphs.kit import made, touch
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
    chosen = choose((8192, 13312, 6656), 132, FAMILY, default_tuning(), ranks=8)
    check(op(8), 132, **sizes, **{one.dim: one.value for one in chosen})


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
    found = check(graph, rows=8, n=16, k=4, **tile_dims(graph))
    # A rank computes 2 tiles, sends 8 rows and sums 8, each in one task of the two
    # turns; 3 operands a tile, else 2.
    assert (found.tasks, found.events, found.accesses) == (12, 6, 20)
    assert found.show().startswith(
        "verified matmul_reduce_scatter_graph(rows=8, n=16, k=4, shape=0, "
        "column_groups=2, split_tile_columns=0, parts=1) with 4 workers a rank: 12 "
        "tasks, 6 event elements, 20 accesses in "
    )


def two_steps(g: Graph) -> None:
    """Task i of `read` reads what task i of `write` wrote; no event between them."""
    x = g.local("x", (4,), "float32")
    (i,) = grid = g.grid(i=4)
    g.call(touch(0, 1), grid, name="write", writes=[x[i]])
    g.call(touch(1, 0), grid, name="read", reads=[x[i]])


def test_one_worker_runs_its_tasks_in_order() -> None:
    assert check(made(two_steps), workers=4).tasks == 8
    with pytest.raises(RaceError):
        check(made(two_steps), workers=3)


def test_a_chain_of_events_orders_its_ends() -> None:
    def relay(g: Graph) -> None:
        x = g.local("x", (1,), "float32")
        first = g.events("first", (1,), expects=1)
        second = g.events("second", (1,), expects=1)
        grid = g.grid(i=1)
        g.call(touch(0, 1), grid, writes=[x[0]], notifies=[first[0]])
        g.call(touch(0, 0), grid, waits=[first[0]], notifies=[second[0]])
        g.call(touch(1, 0), grid, reads=[x[0]], waits=[second[0]])

    check(made(relay))


def test_one_wait_serves_the_later_tasks_of_its_worker() -> None:
    def wait_once(g: Graph) -> None:
        x = g.local("x", (2,), "float32")
        sent = g.events("sent", (1,), expects=2)
        (i,) = grid = g.grid(i=2)
        send = touch(0, 1, "transfer")
        g.call(send, grid, writes=[x[i]], notifies=[sent[0]])
        g.call(touch(1, 0), g.grid(i=1), name="a", reads=[x[:]], waits=[sent[0]])
        g.call(touch(1, 0), g.grid(i=1), name="b", reads=[x[:]])

    check(made(wait_once), workers=1)
    with pytest.raises(RaceError):
        check(made(wait_once), workers=2)


def test_a_buffer_may_be_rewritten_after_its_reader_notified() -> None:
    def reuse(g: Graph) -> None:
        x = g.local("x", (1,), "float32")
        full = g.events("full", (2,), expects=1)
        free = g.events("free", (1,), expects=1)
        one = g.grid(i=1)
        fill, use = touch(0, 1), touch(1, 0, "transfer")
        g.call(fill, one, name="fill_0", writes=[x[0]], notifies=[full[0]])
        g.call(
            use, one, name="use_0", reads=[x[0]], waits=[full[0]], notifies=[free[0]]
        )
        g.call(
            fill, one, name="fill_1", writes=[x[0]], waits=[free[0]], notifies=[full[1]]
        )
        g.call(use, one, name="use_1", reads=[x[0]], waits=[full[1]])

    check(made(reuse))


def test_two_lanes_take_turns() -> None:
    def ping_pong(g: Graph) -> None:
        ping = g.events("ping", (8,), expects=1)
        pong = g.events("pong", (8,), expects=1)
        (i,) = grid = g.grid(i=7)
        g.call(touch(0, 0), g.grid(i=1), name="start", notifies=[ping[0]])
        back = touch(0, 0, "transfer")
        g.call(back, grid, waits=[ping[i]], notifies=[pong[i]])
        g.call(touch(0, 0), grid, waits=[pong[i]], notifies=[ping[i + 1]])
        g.call(touch(0, 0), g.grid(i=1), name="end", waits=[ping[7]])

    check(made(ping_pong), workers=1)


def routed(g: Graph) -> None:
    """A runtime tensor has the number of tasks that send to each of two bins."""
    bin_of = g.input("bin_of", (4,), "int32")
    size = g.input("size", (2,), "int32")
    x = g.local("x", (2, 4), "float32")
    full = g.events("full", (2,), expects=lambda b: size.load(b))
    (i,) = grid = g.grid(i=4)
    to = bin_of.load(i)
    g.call(touch(0, 1), grid, name="send", writes=[x[to, i]], notifies=[full[to]])
    g.call(touch(0, 0), g.grid(b=2), name="receive", waits=[full[0], full[1]])


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
    def padded(g: Graph) -> None:
        n = g.dims("n")
        y = g.output("y", (n,), "float32")
        (i,) = grid = g.grid(i=5)
        g.call(touch(0, 1), grid, writes=[y[tile(i, 4)]])

    assert check(made(padded), n=10).accesses == 3


def test_there_is_a_worker() -> None:
    graph = moe_graph(1, experts=8, top_k=2)
    with pytest.raises(ArgumentError, match="from 1 to"):
        check(graph, 0, tokens=1, hidden=8, inner=8)


def three_dims(g: Graph) -> None:
    x = g.local("x", g.dims("rows n k"), "float32")
    g.call(touch(0, 1), g.grid(i=1), writes=[x[:, :, :]])


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
    def scalar(g: Graph, *, waits: bool) -> None:
        x, y = g.local("x", (), "float32"), g.output("y", (), "float32")
        done = g.events("done", (1,), expects=1)
        one = g.grid(i=1)
        g.call(touch(0, 1), one, name="w", writes=[x[()]], notifies=[done[0]])
        read = {"reads": [x[()]], "writes": [y[()]]}
        g.call(touch(1, 1), one, name="r", **read, waits=[done[0]] if waits else [])
        g.call(touch(0, 0), one, name="last", waits=[done[0]])

    assert check(made(lambda g: scalar(g, waits=True))).accesses == 3
    with pytest.raises(RaceError, match="w.i=0. on rank 0 writes and r.i=0. on rank 0"):
        check(made(lambda g: scalar(g, waits=False)))
