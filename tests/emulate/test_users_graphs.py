"""Graphs of a user's own, made of the device functions that the documentation offers:
the kernels' own text against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.emulate import Emulator
from etc_dist.emulate.rank_memory import WAIT_LIMIT
from etc_dist.functions.add_partials import add_partials
from etc_dist.functions.epilogue import E4M3, partial
from etc_dist.functions.push_rows import push_rows
from etc_dist.functions.sum_ranks import sum_ranks
from etc_dist.functions.tile_matmul import Tiles
from etc_dist.functions.tile_shape import TileShape
from etc_dist.ir import Graph, ceildiv, graph_function, minimum, span, tile, up_to
from etc_dist.ir.tensor import numpy_dtype
from etc_dist.runtime.cpu import simulate
from tests.emulate.cases import PART, check, copy_on, matmul_of
from tests.graphs.calls import one_call
from tests.graphs.dense import SINGLE, dense
from tests.graphs.epilogues import product
from tests.layers.reference import Answer, draw

exhaustive = pytest.mark.exhaustive


def copied(x: np.ndarray) -> Answer:
    return Answer(x.astype(np.float32), np.abs(x.astype(np.float32)))


@pytest.mark.parametrize("n", [8, 64])
def test_rows_of_a_stack_are_pushed(n):
    x = draw(np.random.default_rng(n), (3, 20, n), "bfloat16")
    reads, writes = ["x 3[1] rows/8 n bfloat16"], ["y rows/8 n bfloat16"]
    program = Emulator(one_call(1, push_rows(), reads, writes), workers=2)
    check(program, [{"x": x}], [copied(x[1])], {"rows": 20, "n": n})


def test_a_pace_has_no_limit():
    x = draw(np.random.default_rng(3), (4, 16), "bfloat16")
    reads, writes = ["x rows/2 n bfloat16"], ["y rows/2 n bfloat16"]
    pace = 2 * WAIT_LIMIT * 10**6
    program = Emulator(one_call(1, push_rows(), reads, writes, pace=pace))
    check(program, [{"x": x}], [copied(x)], {"rows": 4, "n": 16})


@graph_function
def parts_of_rows(g: Graph, *, dtype: str) -> None:
    """y [rows, 16] = x[:, 3:19], of x [rows, 32]: 7 columns and then 9, which are not
    aligned to 16 bytes. In float8, two tasks write the two bytes of a pair."""
    rows = g.dims("rows")
    x, y = g.input("x", (rows, 32), dtype), g.output("y", (rows, 16), dtype)
    i, j = grid = g.grid(i=rows, j=2)
    first, count = 7 * j, 7 + 2 * j
    part = x[i, span(3 + first, count)]
    g.call(push_rows(), grid, reads=[part], writes=[y[i, span(first, count)]])


@pytest.mark.parametrize("dtype", ["bfloat16", E4M3])
def test_a_part_of_a_row_may_begin_anywhere(dtype):
    x = np.random.default_rng(3).standard_normal((5, 32)).astype(numpy_dtype(dtype))
    program = Emulator(parts_of_rows(1, dtype=dtype), workers=2)
    check(program, [{"x": x}], [copied(x[:, 3:19])], {"rows": 5})


@graph_function
def one_shot_all_reduce(g: Graph, *, dtype: str) -> None:
    """y [rows, n] = the sum of all ranks' x, on each rank."""
    rows, n = g.dims("rows n")
    world, pieces = g.world_size, ceildiv(n, 64)
    x, y = g.input("x", (rows, n), dtype), g.output("y", (rows, n), dtype)
    slots = g.symmetric("slots", (world, rows, n), dtype)
    arrived = g.events("arrived", (rows,), expects=world, cross_rank=True)
    d, i = grid = g.grid(d=world, i=rows)
    g.call(
        push_rows(),
        grid,
        reads=[x[i, :]],
        writes=[slots.on(d)[g.rank, i, :]],
        notifies=[arrived.on(d)[i]],
    )
    i, j = grid = g.grid(i=rows, j=pieces)
    g.call(
        sum_ranks(dtype),
        grid,
        reads=[slots[:, span(i, 1), tile(j, 64)]],
        writes=[y[span(i, 1), tile(j, 64)]],
        waits=[arrived[i]],
    )


@pytest.mark.parametrize(
    "dtype",
    ["bfloat16", *(pytest.param(t, marks=exhaustive) for t in ("float32", "float16"))],
)
def test_a_one_shot_all_reduce_adds_all_ranks(dtype):
    rng = np.random.default_rng(1)
    xs = [draw(rng, (5, 136), dtype) for _ in range(2)]
    wide = [x.astype(np.float32) for x in xs]
    answer = Answer(sum(wide), sum(map(np.abs, wide)))
    program = Emulator(one_shot_all_reduce(2, dtype=dtype), workers=2)
    near = "float16" if dtype == "float32" else dtype
    check(program, [{"x": x} for x in xs], [answer] * 2, {"rows": 5, "n": 136}, near)


def check_both(graph, inputs, answers, dims, dtype):
    """On the CPU backend and by the CUDA bodies."""
    program = Emulator(graph, workers=2)
    for answer, found in zip(
        answers, simulate(program.plan, inputs, dims).outputs, strict=True
    ):
        answer.check(found["y"], dtype)
    check(program, inputs, answers, dims, dtype)


@graph_function
def split_of_k(g: Graph, *, dtype: str, parts: int) -> None:
    """y [rows, n] = x @ w.T, of which tasks compute `parts` parts of k."""
    rows, n, k = g.dims("rows n k")
    x, w = g.input("x", (rows, k), dtype), g.input("w", (n, k), dtype)
    y = g.output("y", (rows, n), dtype)
    partials = g.local("partials", (parts, rows, n), "float32")
    shape = TileShape(64, 64, swapped=True)
    tiles = Tiles(g, "tile", 0, [shape])
    blocks, columns = ceildiv(rows, tiles.rows), ceildiv(n, tiles.columns)
    done = g.events("done", (blocks, columns), expects=parts)
    p, i, j = grid = g.grid(p=parts, i=blocks, j=columns)
    of_k = tile(p, ceildiv(k, shape.depth * parts) * shape.depth)
    of_x, of_w = tile(i, tiles.rows), tile(j, tiles.columns)
    g.call(
        tiles.matmul(dtype, partial),
        grid,
        reads=[x[of_x, of_k], w[of_w, of_k]],
        writes=[partials[p, of_x, of_w]],
        notifies=[done[i, j]],
        values=tiles.values,
    )
    i, j = grid = g.grid(i=blocks, j=columns)
    of_x, of_w = tile(i, tiles.rows), tile(j, tiles.columns)
    g.call(
        add_partials(dtype),
        grid,
        reads=[partials[:, of_x, of_w]],
        writes=[y[of_x, of_w]],
        waits=[done[i, j]],
    )


@pytest.mark.parametrize(
    "dtype", ["float16", pytest.param("bfloat16", marks=exhaustive)]
)
def test_parts_of_k_are_added(dtype):
    rng = np.random.default_rng(7)
    x, w = draw(rng, (70, 600), dtype), draw(rng, (72, 600), dtype)
    graph, dims = split_of_k(1, dtype=dtype, parts=2), {"rows": 70, "n": 72, "k": 600}
    check_both(graph, [{"x": x, "w": w}], [matmul_of(x, w)], dims, dtype)


@pytest.mark.parametrize("k", [104, 200])
@pytest.mark.parametrize(
    ("dtype", "w_layout"),
    [("bfloat16", "nk"), pytest.param("float16", "kn", marks=exhaustive)],
)
def test_a_matmul_of_a_slice_of_k(k, dtype, w_layout):
    rng = np.random.default_rng(k)
    x, w = draw(rng, (300, k), dtype), draw(rng, (40, k), dtype)
    answer = matmul_of(x[:, 64:128], w[:, 64:128])
    given = {"x": x, "w": w if w_layout == "nk" else np.ascontiguousarray(w.T)}
    options = {"shapes": [SINGLE], "dtypes": [dtype], "w_layout": w_layout}
    graph = product(1, part=lambda k: span(64, minimum(64, k - 64)), **options)
    dims = {"m": 300, "n": 40, "k": k, "shape": 0}
    check_both(graph, [given], [answer], dims, dtype)


@graph_function
def matmul_of_groups(g: Graph, *, shape: TileShape) -> None:
    """y [rows, n]: rows of x in groups, each by its own w. z [groups, k]: the first
    rows of x, after all tasks of a group, some of which are empty."""
    rows, n, k, groups = g.dims("rows n k groups")
    x = g.input("x", (rows, k), "bfloat16")
    w = g.input("w", (groups, n, k), "bfloat16")
    first, count = (g.input(name, (groups,), "int32") for name in ("first", "count"))
    y = g.output("y", (rows, n), "bfloat16")
    z = g.output("z", (groups, k), "bfloat16")
    tiles = Tiles(g, "tile", 0, [shape])
    blocks, columns = ceildiv(rows, tiles.rows), ceildiv(n, tiles.columns)
    done = g.events("done", (groups,), expects=blocks * columns)
    e, b, j = grid = g.grid(e=groups, b=blocks, j=columns)
    start = minimum(first.load(e) + b * tiles.rows, rows)
    own = span(start, minimum(tiles.rows, count.load(e) - b * tiles.rows))
    g.call(
        tiles.matmul("bfloat16"),
        grid,
        values=tiles.values,
        reads=[x[own, :], w[e, tile(j, tiles.columns), :]],
        writes=[y[own, tile(j, tiles.columns)]],
        notifies=[done[e]],
    )
    (e,) = grid = g.grid(e=groups)
    own = span(e, 1)
    g.call(push_rows(), grid, reads=[x[own, :]], writes=[z[own, :]], waits=[done[e]])


@pytest.mark.parametrize(
    "shape", [TileShape(8, 64, swapped=True), TileShape(128, 64)], ids=str
)
@pytest.mark.parametrize("schedule", ["static", "dynamic"])
def test_empty_tasks_of_a_users_matmul_notify(schedule, shape):
    rng, count = np.random.default_rng(4), np.array([8, 0, 16], np.int32)
    x, w = (draw(rng, size, "bfloat16") for size in ((24, 32), (3, 40, 32)))
    given = {"x": x, "w": w, "count": count, "first": np.cumsum(count) - count}
    given["first"] = given["first"].astype(np.int32)
    graph = matmul_of_groups(1, shape=shape)
    program = Emulator(graph, schedule=schedule, workers=2)
    of_groups = np.split(x, np.cumsum(count)[:-1])
    products = [matmul_of(*pair) for pair in zip(of_groups, w, strict=True)]
    parts = zip(*((one.expected, one.magnitude) for one in products), strict=True)
    answer = Answer(*map(np.concatenate, parts))
    dims = {"rows": 24, "n": 40, "k": 32, "groups": 3}
    found = program.run([given], dims=dims)[0]
    answer.check(found["y"], "bfloat16")
    np.testing.assert_array_equal(found["z"], x[:3])


@graph_function
def rows_of_turns(g: Graph, *, has_matmul: bool) -> None:
    """y [turns, rows, 3, PART]: x [rows, 3, PART], as many rows in each turn as given.
    seen [turns] has their numbers. has_matmul: with a matmul of other tasks."""
    turns, rows = g.dims("turns rows")
    given = g.input("given", (turns,), "int32")
    size = g.let("size", rows * 3 * PART)
    x, y = g.input("x", (size,), "int32"), g.state("y", (turns * size,), "int32")
    seen = g.output("seen", (turns,), "int32")
    counts, half = (
        g.local("counts", (turns,), "int32"),
        g.local("half", y.shape, "int32"),
    )
    known = g.events("known", (turns,), expects=1)
    copied = g.events("copied", (turns, rows), expects=3)
    done = g.events("done", (turns,), expects=lambda turn: counts.load(turn) * 3)
    if has_matmul:
        a = g.input("a", (SINGLE.columns, SINGLE.columns), "bfloat16")
        product = g.output("product", (SINGLE.rows, SINGLE.columns), "bfloat16")
        matmul, values = dense(g)
        g.call(
            matmul,
            g.grid(one=1),
            values=values,
            reads=[a[: SINGLE.rows, :], a[:, :]],
            writes=[product[:, :]],
        )
    with g.loop(turn=turns) as turn:
        own = span(turn, 1)
        g.call(
            copy_on("transfer"),
            g.grid(i=1),
            name="count",
            reads=[given[own]],
            writes=[counts[own]],
            notifies=[known[turn]],
        )
        r, k = grid = g.grid(r=up_to(rows, counts.load(turn)), k=3)
        to = half[tile(turn * rows * 3 + r * 3 + k, PART)]
        g.call(
            copy_on("tensor"),
            grid,
            name="first",
            reads=[x[tile(r * 3 + k, PART)]],
            writes=[to],
            waits=[known[turn]],
            notifies=[copied[turn, r]],
        )
        k, r = grid = g.grid(k=3, r=up_to(rows, counts.load(turn)))
        place = tile(turn * rows * 3 + r * 3 + k, PART)
        g.call(
            copy_on("tensor"),
            grid,
            name="second",
            reads=[half[place]],
            writes=[y[place]],
            waits=[known[turn], copied[turn, r]],
            notifies=[done[turn]],
        )
        g.call(
            copy_on("transfer"),
            g.grid(i=1),
            name="see",
            reads=[counts[own]],
            writes=[seen[own]],
            waits=[known[turn], done[turn]],
        )


@pytest.mark.parametrize("schedule", ["static", "dynamic"])
@pytest.mark.parametrize("has_matmul", [False, True])
def test_tasks_beyond_a_loaded_extent_do_not_exist(has_matmul, schedule):
    given = np.array([3, 0, 5, 1], np.int32)
    x = np.arange(5 * 3 * PART, dtype=np.int32)
    inputs = {"given": given, "x": x, "y": np.full(4 * x.size, -1, np.int32)}
    if has_matmul:
        inputs["a"] = np.eye(SINGLE.columns).astype(numpy_dtype("bfloat16"))
    dims = {"turns": 4, "rows": 5}
    program = Emulator(
        rows_of_turns(1, has_matmul=has_matmul), schedule=schedule, workers=2
    )
    rows = np.arange(5)[:, None] < given
    wanted = np.where(rows.T[..., None], x.reshape(5, -1), -1).reshape(-1)
    simulated = simulate(program.plan, [inputs], dims, workers=4)
    for seed in range(2):
        [found] = program.run([inputs], dims, seed=seed, runs=2 - seed)
        for outputs in (found, simulated.outputs[0]):
            np.testing.assert_array_equal(outputs["y"], wanted)
            np.testing.assert_array_equal(outputs["seen"], given)
    tasks = [task.call for task in simulated.tasks]
    assert tasks.count("second") == 3 * given.sum()
