"""Grids whose extent is loaded from an array of the caller: both backends."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.emulate import Emulator
from etc_dist.functions.push_rows import push_rows
from etc_dist.functions.tile_matmul import Tiles
from etc_dist.functions.tile_shape import TileShape
from etc_dist.ir import Graph, ceildiv, graph_function, select, span, tile, up_to
from etc_dist.runtime.cpu import simulate
from etc_dist.verify.verify import verify
from tests.emulate.cases import PART, copy_on, matmul_of
from tests.layers.reference import Answer, draw


@graph_function
def first_rows(g: Graph, *, waits: bool) -> None:
    """y [rows, 2, PART]: the first rows are those of x, as many as given. waits: by way
    of a second tensor."""
    rows = g.dims("rows")
    size = g.let("size", rows * 2 * PART)
    given = g.input("given", (1,), "int32")
    x, y = g.input("x", (size,), "int32"), g.state("y", (size,), "int32")
    half = g.local("half", (size,), "int32")
    copied = g.events("copied", (rows,), expects=2)
    r, k = grid = g.grid(r=rows, k=2)
    place = tile(r * 2 + k, PART)
    if waits:
        g.call(
            copy_on("transfer"),
            grid,
            name="first",
            reads=[x[place]],
            writes=[half[place]],
            notifies=[copied[r].when(r < given.load(0))],
        )
    g.call(
        copy_on("tensor"),
        g.grid(r=up_to(rows, given.load(0)), k=2),
        reads=[(half if waits else x)[place]],
        writes=[y[place]],
        waits=[copied[r]] if waits else [],
    )


@pytest.mark.parametrize("waits", [False, True])
def test_a_count_that_is_given_needs_no_wait(waits):
    program = Emulator(first_rows(1, waits=waits))
    x = np.arange(5 * 2 * PART, dtype=np.int32)
    for count in (-1, 0, 3, 9):
        given = {"given": np.array([count], np.int32), "x": x}
        given["y"] = np.full(x.size, -1, np.int32)
        end = min(max(count, 0), 5) * 2 * PART
        wanted = np.where(np.arange(x.size) < end, x, -1)
        cpu = simulate(program.plan, [given], {"rows": 5}, workers=3)
        np.testing.assert_array_equal(cpu.outputs[0]["y"], wanted)
        assert [task.call for task in cpu.tasks].count("copy_numbers") == end // PART
        for seed in range(2):
            [found] = program.run([given], {"rows": 5}, seed=seed)
            np.testing.assert_array_equal(found["y"], wanted)


def test_a_given_count_is_proved_with_its_data():
    plan = Emulator(first_rows(1, waits=True), schedule="static").plan
    assert verify(plan, {"rows": 5}, 2).unchecked != ()
    tensors = {"given": [np.array([3], np.int32)]}
    assert verify(plan, {"rows": 5}, 2, tensors).unchecked == ()


@graph_function
def first_blocks(g: Graph, *, shape: TileShape) -> None:
    """y [rows, n] = x @ w.T for the first blocks of rows, as many as given, by way of
    copies of x. z [rows, n]: every second block of these, after its matmul."""
    rows, n, k = g.dims("rows n k")
    given = g.input("given", (1,), "int32")
    x, w = g.input("x", (rows, k), "bfloat16"), g.input("w", (n, k), "bfloat16")
    y, z = (g.state(name, (rows, n), "bfloat16") for name in "yz")
    half = g.local("half", (rows, k), "bfloat16")
    tiles = Tiles(g, "tile", 0, [shape])
    blocks, columns = ceildiv(rows, tiles.rows), ceildiv(n, tiles.columns)
    copied = g.events("copied", (blocks,), expects=1)
    done = g.events("done", (blocks,), expects=columns)
    (i,) = grid = g.grid(i=blocks)
    own, count = tile(i, tiles.rows), given.load(0)
    g.call(
        push_rows(),
        grid,
        name="copy",
        reads=[x[own, :]],
        writes=[half[own, :]],
        notifies=[copied[i].when(i < count)],
    )
    i, j = used = g.grid(i=up_to(blocks, count), j=columns)
    g.call(
        tiles.matmul("bfloat16"),
        used,
        values=tiles.values,
        reads=[half[own, :], w[tile(j, tiles.columns), :]],
        writes=[y[own, tile(j, tiles.columns)]],
        waits=[copied[i]],
        notifies=[done[i].when(i % 2)],
    )
    size = select(i < count, i % 2 * tiles.rows, 0)
    odd = span(i * tiles.rows, size)
    g.call(
        push_rows(),
        grid,
        name="second",
        reads=[y[odd, :]],
        writes=[z[odd, :]],
        waits=[done[i].when(i < count).when(i % 2)],
    )


@pytest.mark.parametrize(
    "shape", [TileShape(8, 64, swapped=True), TileShape(128, 64)], ids=str
)
def test_matmuls_wait_and_notify_where_their_conditions_hold(shape):
    rows, n, k = 4 * shape.rows, 72, 64
    rng = np.random.default_rng(2)
    x, w = (draw(rng, (size, k), "bfloat16") for size in (rows, n))
    program = Emulator(first_blocks(1, shape=shape), workers=4)
    whole = matmul_of(x, w)
    for count in (0, 3):
        given = {"given": np.array([count], np.int32), "x": x, "w": w}
        given |= {name: np.zeros((rows, n), x.dtype) for name in "yz"}
        block = np.arange(rows) // shape.rows
        for seed in range(2):
            [found] = program.run([given], seed=seed)
            for name, has in (("y", block < count), ("z", (block < count) & block % 2)):
                keep = has.astype(np.float32)[:, None]
                answer = Answer(whole.expected * keep, whole.magnitude * keep)
                answer.check(found[name])
