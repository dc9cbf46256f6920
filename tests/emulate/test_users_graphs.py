"""Graphs of a user's own, made of the device functions that the documentation offers:
the kernels' own text against NumPy."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from etc_dist.emulate import Emulator
from etc_dist.emulate.rank_memory import WAIT_LIMIT
from etc_dist.functions.add_partials import add_partials
from etc_dist.functions.epilogue import E4M3
from etc_dist.functions.epilogue import partial as unrounded
from etc_dist.functions.push_rows import push_rows
from etc_dist.functions.sum_ranks import sum_ranks
from etc_dist.functions.tile_shape import TileShape
from etc_dist.ir import GraphFunction, minimum, span
from etc_dist.ir.tensor import numpy_dtype
from etc_dist.runtime.cpu import simulate
from tests.conftest import first_always
from tests.emulate.cases import PART, check, copy_on, matmul_of
from tests.graphs.calls import Task, calls, one_call
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


def parts_of_rows(dtype: str) -> GraphFunction:
    """y [rows, 16] = x[:, 3:19], of x [rows, 32]: 7 columns and then 9, which are not
    aligned to 16 bytes. In float8, two tasks write the two bytes of a pair."""
    reads = [f"x rows[i] 32[span(3 + 7 * j, 7 + 2 * j)] {dtype}"]
    writes = [f"y rows[i] 16[span(7 * j, 7 + 2 * j)] {dtype}"]
    return one_call(1, push_rows(), reads, writes, grid="i: rows, j: 2")


@pytest.mark.parametrize("dtype", ["bfloat16", E4M3])
def test_a_part_of_a_row_may_begin_anywhere(dtype):
    x = np.random.default_rng(3).standard_normal((5, 32)).astype(numpy_dtype(dtype))
    program = Emulator(parts_of_rows(dtype), workers=2)
    check(program, [{"x": x}], [copied(x[:, 3:19])], {"rows": 5})


def one_shot_all_reduce(dtype: str) -> GraphFunction:
    """y [rows, n] = the sum of all ranks' x, on each rank."""
    parts = f"""
        symmetric slots [ranks, rows, n] {dtype}
        cross-rank events arrived [rows] expects ranks
    """
    push = Task(
        push_rows(),
        [f"x rows[i] n {dtype}"],
        ["slots.on(d)[rank, i, :]"],
        grid="d: ranks, i: rows",
        notifies=["arrived.on(d)[i]"],
    )
    add = Task(
        sum_ranks(dtype),
        ["slots[:, span(i, 1), tile(j, 64)]"],
        [f"y rows[span(i, 1)] n[tile(j, 64)] {dtype}"],
        grid="i: rows, j: ceildiv(n, 64)",
        waits=["arrived[i]"],
    )
    return calls(2, tasks=[push, add], dims="rows n", parts=parts)


@pytest.mark.parametrize(
    "dtype",
    ["bfloat16", *(pytest.param(t, marks=exhaustive) for t in ("float32", "float16"))],
)
def test_a_one_shot_all_reduce_adds_all_ranks(dtype):
    rng = np.random.default_rng(1)
    xs = [draw(rng, (5, 136), dtype) for _ in range(2)]
    wide = [x.astype(np.float32) for x in xs]
    answer = Answer(sum(wide), sum(map(np.abs, wide)))
    program = Emulator(one_shot_all_reduce(dtype), workers=2)
    near = "float16" if dtype == "float32" else dtype
    check(program, [{"x": x} for x in xs], [answer] * 2, {"rows": 5, "n": 136}, near)


def check_both(graph, inputs, answers, dims, dtype):
    """On the CPU backend and by the CUDA bodies."""
    program = Emulator(graph, workers=2)
    for answer, outputs in zip(
        answers, simulate(program.plan, inputs, dims).outputs, strict=True
    ):
        answer.check(outputs["y"], dtype)
    check(program, inputs, answers, dims, dtype)


def two_parts_of_k(dtype: str) -> GraphFunction:
    """y [rows, n] = x @ w.T, of which each task computes one of two parts of k."""
    shape = TileShape(64, 64, swapped=True)
    parts = f"""
        let blocks = ceildiv(rows, 64)
        let columns = ceildiv(n, 64)
        let part = ceildiv(k, {2 * shape.depth}) * {shape.depth}
        local partials [2, rows, n] float32
        events done [blocks, columns] expects 2
    """
    multiply = Task(
        partial(dense, shape=shape, dtype=dtype, epilogue=unrounded),
        [f"x rows/64@i k[tile(p, part)] {dtype}", f"w n/64@j k[tile(p, part)] {dtype}"],
        ["partials[p, tile(i, 64), tile(j, 64)]"],
        grid="p: 2, i: blocks, j: columns",
        notifies=["done[i, j]"],
    )
    add = Task(
        add_partials(dtype),
        ["partials[:, tile(i, 64), tile(j, 64)]"],
        [f"y rows/64 n/64 {dtype}"],
        waits=["done[i, j]"],
    )
    return calls(1, tasks=[multiply, add], dims="rows n k", parts=parts)


@pytest.mark.parametrize(
    "dtype", ["float16", pytest.param("bfloat16", marks=exhaustive)]
)
def test_parts_of_k_are_added(dtype):
    rng = np.random.default_rng(7)
    x, w = draw(rng, (70, 600), dtype), draw(rng, (72, 600), dtype)
    graph, dims = two_parts_of_k(dtype), {"rows": 70, "n": 72, "k": 600}
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
    arrays = {"x": x, "w": w if w_layout == "nk" else np.ascontiguousarray(w.T)}
    options = {"shapes": [SINGLE], "dtypes": [dtype], "w_layout": w_layout}
    graph = product(1, part=lambda k: span(64, minimum(64, k - 64)), **options)
    dims = {"m": 300, "n": 40, "k": k, "shape": 0}
    check_both(graph, [arrays], [answer], dims, dtype)


def matmul_of_groups(shape: TileShape) -> GraphFunction:
    """y [rows, n]: rows of x in groups, each by its own w. z [groups, k]: the first
    rows of x, after all tasks of a group, some of which are empty."""
    parts = f"""
        let blocks = ceildiv(rows, {shape.rows})
        input first [groups] int32
        input count [groups] int32
        events done [groups] expects blocks * ceildiv(n, {shape.columns})
    """
    block = f"b * {shape.rows}"
    count = f"minimum({shape.rows}, count.load(e) - {block})"
    group_rows = f"rows[span(minimum(first.load(e) + {block}, rows), {count})]"
    columns = f"n[tile(j, {shape.columns})]"
    multiply = Task(
        partial(dense, shape=shape),
        [f"x {group_rows} k bfloat16", f"w groups[e] {columns} k bfloat16"],
        [f"y {group_rows} {columns} bfloat16"],
        grid=f"e: groups, b: blocks, j: ceildiv(n, {shape.columns})",
        notifies=["done[e]"],
    )
    reads, writes = ["x[span(e, 1), :]"], ["z groups[span(e, 1)] k bfloat16"]
    copy = Task(push_rows(), reads, writes, grid="e: groups", waits=["done[e]"])
    return calls(1, tasks=[multiply, copy], dims="rows n k groups", parts=parts)


@pytest.mark.parametrize(
    ("schedule", "shape"),
    first_always(
        [
            ("static", TileShape(8, 64, swapped=True)),
            ("dynamic", TileShape(128, 64)),
            ("static", TileShape(128, 64)),
            ("dynamic", TileShape(8, 64, swapped=True)),
        ],
        2,
    ),
    ids=str,
)
def test_empty_tasks_of_a_users_matmul_notify(schedule, shape):
    rng, count = np.random.default_rng(4), np.array([8, 0, 16], np.int32)
    x, w = (draw(rng, size, "bfloat16") for size in ((24, 32), (3, 40, 32)))
    arrays = {"x": x, "w": w, "count": count, "first": np.cumsum(count) - count}
    arrays["first"] = arrays["first"].astype(np.int32)
    program = Emulator(matmul_of_groups(shape), schedule=schedule, workers=2)
    of_groups = np.split(x, np.cumsum(count)[:-1])
    products = [matmul_of(*pair) for pair in zip(of_groups, w, strict=True)]
    parts = zip(*((a.expected, a.magnitude) for a in products), strict=True)
    answer = Answer(*map(np.concatenate, parts))
    dims = {"rows": 24, "n": 40, "k": 32, "groups": 3}
    outputs = program.run([arrays], dims=dims)[0]
    answer.check(outputs["y"], "bfloat16")
    np.testing.assert_array_equal(outputs["z"], x[:3])


def rows_of_turns(has_matmul: bool) -> GraphFunction:
    """y [turns, rows, 3, PART]: x [rows, 3, PART], as many rows in each turn as given.
    seen [turns] has their numbers. has_matmul: with a matmul of other tasks."""
    parts = f"""
        let size = rows * 3 * {PART}
        state y [turns * size] int32
        local counts [turns] int32
        local half [turns * size] int32
        events known [turns] expects 1
        events copied [turns, rows] expects 3
        events done [turn: turns] expects counts.load(turn) * 3
    """
    rows, place = "up_to(rows, counts.load(turn))", f"[tile(r * 3 + k, {PART})]"
    of_turn = f"[tile(turn * rows * 3 + r * 3 + k, {PART})]"
    at_turn, loop = "[span(turn, 1)]", {"loop": "turn: turns"}
    square = f"{SINGLE.columns} {SINGLE.columns} bfloat16"
    multiply = Task(
        dense, [f"a {square}", "a[:, :]"], [f"product {square}"], grid="one: 1"
    )
    tasks = [
        Task(
            copy_on("transfer"),
            [f"given turns{at_turn} int32"],
            [f"counts{at_turn}"],
            name="count",
            notifies=["known[turn]"],
            **loop,
        ),
        Task(
            copy_on("tensor"),
            [f"x size{place} int32"],
            [f"half{of_turn}"],
            name="first",
            grid=f"r: {rows}, k: 3",
            waits=["known[turn]"],
            notifies=["copied[turn, r]"],
            **loop,
        ),
        Task(
            copy_on("tensor"),
            [f"half{of_turn}"],
            [f"y{of_turn}"],
            name="second",
            grid=f"k: 3, r: {rows}",
            waits=["known[turn]", "copied[turn, r]"],
            notifies=["done[turn]"],
            **loop,
        ),
        Task(
            copy_on("transfer"),
            [f"counts{at_turn}"],
            [f"seen turns{at_turn} int32"],
            name="see",
            waits=["known[turn]", "done[turn]"],
            **loop,
        ),
    ]
    tasks = [multiply] * has_matmul + tasks
    return calls(1, tasks=tasks, dims="turns rows", parts=parts)


@pytest.mark.parametrize(
    ("has_matmul", "schedule"),
    first_always(
        [(False, "static"), (True, "dynamic"), (False, "dynamic"), (True, "static")], 2
    ),
)
def test_tasks_beyond_a_loaded_extent_do_not_exist(has_matmul, schedule):
    counts = np.array([3, 0, 5, 1], np.int32)
    x = np.arange(5 * 3 * PART, dtype=np.int32)
    inputs = {"given": counts, "x": x, "y": np.full(4 * x.size, -1, np.int32)}
    if has_matmul:
        inputs["a"] = np.eye(SINGLE.columns).astype(numpy_dtype("bfloat16"))
    dims = {"turns": 4, "rows": 5}
    program = Emulator(rows_of_turns(has_matmul), schedule=schedule, workers=2)
    rows = np.arange(5)[:, None] < counts
    expected = np.where(rows.T[..., None], x.reshape(5, -1), -1).reshape(-1)
    simulated = simulate(program.plan, [inputs], dims, workers=4)
    for seed in range(2):
        [emulated] = program.run([inputs], dims, seed=seed, runs=2 - seed)
        for outputs in (emulated, simulated.outputs[0]):
            np.testing.assert_array_equal(outputs["y"], expected)
            np.testing.assert_array_equal(outputs["seen"], counts)
    tasks = [task.call for task in simulated.tasks]
    assert tasks.count("second") == 3 * counts.sum()
