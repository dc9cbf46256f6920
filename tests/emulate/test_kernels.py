"""The kernels' own text, run thread by thread: layers and collectives against NumPy, at
shapes of every kind of tile and under either schedule, the same bits for other orders
of events, and no two accesses without one."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.emulate import Emulator
from etc_dist.functions.grouped_matmul import grouped_store
from etc_dist.functions.tile_matmul import TileShape
from etc_dist.ir import Graph, ceildiv, graph_function, minimum, span, tile
from etc_dist.layers.mlp import mlp_graph
from etc_dist.layers.mlp_tiles import mlp_tiles_graph
from etc_dist.layers.moe_few_tokens import moe_few_tokens_graph
from etc_dist.layers.moe_graph import moe_graph
from etc_dist.ops.all_gather_matmul import all_gather_matmul_graph
from etc_dist.ops.float_partials import float_partials_graph
from etc_dist.ops.matmul_reduce_scatter import matmul_reduce_scatter_graph
from tests.codegen.graphs import three_matmuls
from tests.conftest import first_always
from tests.emulate.cases import (
    check,
    copy_on,
    counted_late,
    four_matmuls,
    matmul,
    matmul_and_scratch,
    matmul_of,
    matmul_reduce_scatter,
    mlp,
    moe,
    named,
    numbers,
    sent_at_once,
    set_some,
    some_numbers,
    square_tiles_and_pairs,
    tiles,
)
from tests.emulate.stages import copied_twice, copies, gathered, gathered_last
from tests.layers.reference import (
    Answer,
    draw,
    draw_experts,
    moe_reference,
    own_experts,
)

exhaustive = pytest.mark.exhaustive
SCHEDULES = ["static", "dynamic"]
MOSTLY_STATIC = ["static", pytest.param("dynamic", marks=exhaustive)]
MOSTLY_DYNAMIC = ["dynamic", pytest.param("static", marks=exhaustive)]


MOE_SIZES = [
    (1, 64, 64),  # tiles of one row
    (40, 136, 200),  # narrow tiles
    (300, 64, 72),  # short ones of half as many columns
    (300, 320, 264),  # and of all
    (680, 640, 200),  # long ones: of two turns
    # More blocks of tokens than a warp has lanes, and than a lane has threads.
    (1100, 8, 8),
    (8200, 8, 8),
]


@pytest.mark.parametrize(
    "tokens, hidden, inner, schedule",
    first_always(
        [
            *[(*MOE_SIZES[0], "dynamic"), (*MOE_SIZES[1], "static")],
            *[(*MOE_SIZES[0], "static"), (*MOE_SIZES[1], "dynamic")],
            *[(*s, schedule) for s in MOE_SIZES[2:] for schedule in SCHEDULES],
        ],
        2,
    ),
)
def test_mixture_of_experts(folder, schedule, tokens, hidden, inner):
    graph = moe_graph(1, experts=8, top_k=2)
    given = moe(tokens, 8, 2, hidden, inner, "bfloat16")
    check(Emulator(graph, schedule=schedule, folder=folder), *given)


@exhaustive
def test_logits_in_tiles(folder):
    graph = moe_graph(1, experts=8, top_k=1, dtype="float16", score_tasks=1)
    check(Emulator(graph, folder=folder), *moe(150, 8, 1, 72, 24, "float16"), "float16")


@pytest.mark.parametrize("schedule", MOSTLY_DYNAMIC)
@pytest.mark.parametrize(
    "tokens, hidden, tasks",
    [
        (3, 104, 8),
        (1, 1000, 1),  # more pairs than scratch has room for
        pytest.param(1, 200, 132, marks=exhaustive),
    ],
)
def test_mixture_of_experts_of_few_tokens(folder, schedule, tokens, hidden, tasks):
    graph = moe_few_tokens_graph(1, experts=16, top_k=3, product_tasks=tasks)
    given = moe(tokens, 16, 3, hidden, 56, "bfloat16")
    check(Emulator(graph, schedule=schedule, folder=folder), *given)


@pytest.mark.parametrize("schedule", MOSTLY_STATIC)
@pytest.mark.parametrize(
    "parallel, tokens",
    [
        ("expert", 20),
        pytest.param("expert", 150, marks=exhaustive),
        pytest.param("tensor", 150, marks=exhaustive),
    ],
)
def test_mixture_of_experts_of_two_ranks(folder, schedule, parallel, tokens):
    hidden, inner = 136, 64
    graph = moe_graph(2, experts=8, top_k=2, parallel=parallel)
    rng = np.random.default_rng(2)
    weights = draw_experts(rng, 8, hidden, inner)
    x = draw(rng, (2 * tokens, hidden), "bfloat16")
    answer = moe_reference(x, weights, 2)
    halves = [np.split(a, 2) for a in (answer.expected, answer.magnitude)]
    rows = [x, x] if parallel == "tensor" else np.split(x, 2)
    inputs = [
        {"x": np.ascontiguousarray(rows[r])}
        | named(own_experts(weights, parallel, r, 2))
        for r in range(2)
    ]
    dims = {"shard" if parallel == "tensor" else "tokens": tokens, "hidden": hidden}
    dims["inner"] = inner // 2 if parallel == "tensor" else inner
    answers = [Answer(*pair) for pair in zip(*halves, strict=True)]
    check(Emulator(graph, schedule=schedule, folder=folder), inputs, answers, dims)


@pytest.mark.parametrize("schedule", MOSTLY_STATIC)
def test_dense_mlp_of_two_ranks(folder, schedule):
    program = Emulator(mlp_graph(2), schedule=schedule, folder=folder)
    check(program, *mlp(2, 40, hidden=192, inner=136))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_dense_mlp_of_tiles(folder, schedule):
    """More than a block of rows; square tiles, then pairs that split k."""
    shapes = [TileShape(128, 128), TileShape(64, 64, "k", swapped=True)]
    graph = mlp_tiles_graph(2, shapes=shapes)
    program = Emulator(graph, schedule=schedule, folder=folder)
    check(program, *mlp(2, 140, 192, 136, gate_up_shape=0, down_shape=1))


def test_weights_that_are_loaded_ahead_fill_the_ring(folder):
    graph = mlp_tiles_graph(1, shapes=[TileShape(128, 256)])
    program = Emulator(graph, folder=folder)
    check(program, *mlp(1, 40, 640, 640, gate_up_shape=0, down_shape=0))


@pytest.mark.parametrize("schedule", MOSTLY_DYNAMIC)
@pytest.mark.parametrize(
    "rows, w_layout",
    [
        (200, "kn"),
        # More tiles for a peer than are on their way at once.
        pytest.param(600, "nk", marks=exhaustive),
    ],
)
def test_matmul_and_reduce_scatter(folder, schedule, rows, w_layout):
    graph = matmul_reduce_scatter_graph(2, w_layout=w_layout)
    check(
        Emulator(graph, schedule=schedule, folder=folder),
        *matmul_reduce_scatter(rows, w_layout),
    )


@pytest.mark.parametrize("schedule", MOSTLY_STATIC)
def test_reduce_scatter_of_partial_sums_in_fp32(folder, schedule):
    inputs, answers, dims = matmul_reduce_scatter(200)
    inputs = [{**i, "x": i["x"].reshape(2 * dims["rows"], dims["k"])} for i in inputs]
    program = Emulator(float_partials_graph(2), schedule=schedule, folder=folder)
    check(program, inputs, answers, dims)


@pytest.mark.parametrize("schedule", MOSTLY_STATIC)
def test_all_gather_and_matmul(folder, schedule):
    rows, n, k = 200, 264, 136
    rng = np.random.default_rng(5)
    xs = [draw(rng, (rows, k), "bfloat16") for _ in range(2)]
    inputs = [{"x": x, "w": draw(rng, (n, k), "bfloat16")} for x in xs]
    whole = np.stack(xs)
    answers = [matmul_of(whole, i["w"]) for i in inputs]
    dims = {"rows": rows, "n": n, "k": k}
    graph = all_gather_matmul_graph(2)
    check(Emulator(graph, schedule=schedule, folder=folder), inputs, answers, dims)


@pytest.mark.parametrize(
    "ranks, graph, schedule",
    first_always(
        [
            (2, sent_at_once, "static"),
            (1, counted_late, "dynamic"),
            (2, sent_at_once, "dynamic"),
            (1, counted_late, "static"),
        ],
        2,
    ),
)
def test_graphs_of_copies(folder, schedule, ranks, graph):
    check(Emulator(graph(ranks), schedule=schedule, folder=folder), *numbers(ranks))


@pytest.mark.parametrize("schedule", MOSTLY_STATIC)
def test_tiles_and_scratch(folder, schedule):
    check(
        Emulator(matmul_and_scratch(1), schedule=schedule, folder=folder),
        *matmul(300, 264, 136),
    )


@pytest.mark.parametrize("schedule", MOSTLY_STATIC)
def test_different_matmuls_in_one_program(folder, schedule):
    program = Emulator(three_matmuls(1), schedule=schedule, folder=folder)
    check(program, *four_matmuls(300, 264, 200))


@pytest.mark.parametrize("schedule", MOSTLY_STATIC)
def test_pairs_exchange_sums_after_square_tiles(folder, schedule):
    graph = square_tiles_and_pairs(1)
    program = Emulator(graph, workers=2, schedule=schedule, folder=folder)
    check(program, *tiles(256, 256, 64))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_of_different_sizes(folder, schedule):
    program = Emulator(copied_twice(1), schedule=schedule, folder=folder)
    check(program, *copies(2000))


def test_gathered_tiles_after_others(folder):
    check(Emulator(gathered_last(1), folder=folder), *gathered(200, 264))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("lane", ["tensor", pytest.param("transfer", marks=exhaustive)])
def test_a_task_with_nothing_left_runs_no_body(folder, schedule, lane):
    given, expected = some_numbers()
    program = Emulator(set_some(1, lane=lane), schedule=schedule, folder=folder)
    del given["y"]
    [found] = program.run([given], {"n": len(expected)})
    assert (found["y"] == expected).all()


ROWS, COLUMNS = 16, 256


@graph_function
def two_matmuls(g: Graph) -> None:
    """y = (x w) v in tiles, most of them empty. The event that a task of the second
    GEMM notifies is loaded from memory that another lane has written."""
    count, k, n = g.dims("count k n")
    sizes = g.input("sizes", (count,), "int32")
    given = g.input("given", (count,), "int32")
    x = g.input("x", (count * ROWS, k), "bfloat16")
    w = g.input("w", (1, k, k), "bfloat16")
    v = g.input("v", (1, n, k), "bfloat16")
    y = g.output("y", (count * ROWS, n), "bfloat16")
    seen = g.output("seen", (count,), "int32")
    to = g.local("to", (count,), "int32")
    half = g.local("half", (count * ROWS, k), "bfloat16")
    columns = g.let("columns", ceildiv(n, COLUMNS))
    all_columns = span(0, minimum(2 * COLUMNS, k))
    known = g.events("known", (count,), expects=1)
    begun = g.events("begun", (count,), expects=1)
    done = g.events("done", (count,), expects=columns)
    (r,) = grid = g.grid(r=count)
    g.call(
        copy_on("transfer"),
        grid,
        reads=[given[span(r, 1)]],
        writes=[to[span(r, 1)]],
        notifies=[known[r]],
        order=lambda t: (count - 1 - t,),
    )
    (r,) = grid = g.grid(r=count)
    rows = span(r * ROWS, minimum(ROWS, sizes.load(r)))
    g.call(
        grouped_store("bfloat16"),
        grid,
        name="first",
        reads=[x[rows, :], w[0, all_columns, :]],
        writes=[half[rows, all_columns]],
        notifies=[begun[r]],
        empty_until=lambda t: count,
    )
    j, r = grid = g.grid(j=columns, r=count)
    rows = span(r * ROWS, minimum(ROWS, sizes.load(r)))
    g.call(
        grouped_store("bfloat16"),
        grid,
        name="second",
        reads=[half[rows, :], v[0, tile(j, COLUMNS), :]],
        writes=[y[rows, tile(j, COLUMNS)]],
        waits=[begun[r], known[r]],
        notifies=[done[to.load(r)]],
        empty_until=lambda t: t + 1,
    )
    (r,) = grid = g.grid(r=count)
    g.call(
        copy_on("transfer"),
        grid,
        name="end",
        reads=[sizes[span(r, 1)]],
        writes=[seen[span(r, 1)]],
        waits=[done[r]],
    )


@pytest.mark.parametrize("schedule", MOSTLY_DYNAMIC)
def test_groups_of_empty_tasks_notify_what_is_loaded(folder, schedule):
    count, k, n = 40, 64, 600
    rng = np.random.default_rng(6)
    sizes = np.zeros(count, np.int32)
    sizes[:2] = 5, 6
    given = rng.permutation(count).astype(np.int32)
    x, w, v = (
        draw(rng, s, "bfloat16") for s in ((count * ROWS, k), (1, k, k), (1, n, k))
    )
    w, v = np.sign(w), np.sign(v)
    program = Emulator(two_matmuls(1), schedule=schedule, folder=folder)
    inputs = {"sizes": sizes, "given": given, "x": x, "w": w, "v": v}
    for seed in range(3):
        dims = {"count": count, "k": k, "n": n}
        [found] = program.run([inputs], dims, seed=seed, runs=2)
        y, seen = found["y"], found["seen"]
        half = (x.astype(np.float32) @ w[0].astype(np.float32).T).astype(x.dtype)
        whole = half.astype(np.float32) @ v[0].astype(np.float32).T
        live = np.concatenate([np.arange(s) + r * ROWS for r, s in enumerate(sizes)])
        assert np.allclose(y[live].astype(np.float32), whole[live], rtol=1e-2, atol=0.5)
        assert np.isnan(np.delete(y, live, 0).astype(np.float32)).all()
        assert (seen == sizes).all()
