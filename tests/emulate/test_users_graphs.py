"""Graphs of a user's own, made of the device functions that the documentation offers:
the kernels' own text against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.emulate import Emulator
from etc_dist.functions.matmul import TILE, matmul_store
from etc_dist.functions.push_rows import push_rows
from etc_dist.functions.sum_ranks import sum_ranks
from etc_dist.ir import Graph, ceildiv, graph_function, minimum, span, tile
from tests.emulate.cases import check, matmul_of
from tests.layers.reference import Answer, draw


@graph_function
def one_of_a_stack(g: Graph) -> None:
    """y [rows, n] = x[1] of x [3, rows, n], eight rows a task."""
    rows, n = g.dims("rows n")
    x = g.input("x", (3, rows, n), "bfloat16")
    y = g.output("y", (rows, n), "bfloat16")
    (i,) = grid = g.grid(i=ceildiv(rows, 8))
    g.call(push_rows(), grid, reads=[x[1, tile(i, 8), :]], writes=[y[tile(i, 8), :]])


def copied(x: np.ndarray) -> Answer:
    return Answer(x.astype(np.float32), np.abs(x.astype(np.float32)))


@pytest.mark.parametrize("n", [8, 64])
def test_rows_of_a_stack_are_pushed(folder, n):
    x = draw(np.random.default_rng(n), (3, 20, n), "bfloat16")
    program = Emulator(one_of_a_stack(1), folder=folder)
    check(program, [{"x": x}], [copied(x[1])], {"rows": 20, "n": n})


@graph_function
def parts_of_rows(g: Graph) -> None:
    """y [rows, 8] = x[:, 3:11], of x [rows, 16]: not aligned to 16 bytes."""
    rows = g.dims("rows")
    x, y = g.input("x", (rows, 16), "bfloat16"), g.output("y", (rows, 8), "bfloat16")
    (i,) = grid = g.grid(i=rows)
    g.call(push_rows(), grid, reads=[x[i, 3:11]], writes=[y[i, :]])


def test_a_part_of_a_row_may_begin_anywhere(folder):
    x = draw(np.random.default_rng(3), (5, 16), "bfloat16")
    program = Emulator(parts_of_rows(1), folder=folder)
    check(program, [{"x": x}], [copied(x[:, 3:11])], {"rows": 5})


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
    ["bfloat16", "float32", pytest.param("float16", marks=pytest.mark.exhaustive)],
)
def test_a_one_shot_all_reduce_adds_all_ranks(folder, dtype):
    rng = np.random.default_rng(1)
    xs = [draw(rng, (5, 136), dtype) for _ in range(2)]
    wide = [x.astype(np.float32) for x in xs]
    answer = Answer(sum(wide), sum(map(np.abs, wide)))
    program = Emulator(one_shot_all_reduce(2, dtype=dtype), folder=folder)
    near = "float16" if dtype == "float32" else dtype
    check(program, [{"x": x} for x in xs], [answer] * 2, {"rows": 5, "n": 136}, near)


@graph_function
def share_of_k(g: Graph) -> None:
    """y [rows, n] = x @ w.T over 64 of k."""
    rows, n, k = g.dims("rows n k")
    x, w = g.input("x", (rows, k), "bfloat16"), g.input("w", (n, k), "bfloat16")
    y = g.output("y", (rows, n), "bfloat16")
    i, j = grid = g.grid(i=ceildiv(rows, TILE), j=ceildiv(n, TILE))
    share = span(64, minimum(64, k - 64))
    g.call(
        matmul_store("nk", "bfloat16"),
        grid,
        reads=[x[tile(i, TILE), share], w[tile(j, TILE), share]],
        writes=[y[tile(i, TILE), tile(j, TILE)]],
    )


@pytest.mark.parametrize("k", [104, 200])
def test_a_matmul_of_a_slice_of_k(folder, k):
    rng = np.random.default_rng(k)
    x, w = draw(rng, (300, k), "bfloat16"), draw(rng, (40, k), "bfloat16")
    answer = matmul_of(x[:, 64:128], w[:, 64:128])
    dims = {"rows": 300, "n": 40, "k": k}
    check(Emulator(share_of_k(1), folder=folder), [{"x": x, "w": w}], [answer], dims)
