"""Grids whose extent is loaded from an array of the caller: both backends."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from etc_dist.emulate import Emulator
from etc_dist.functions.push_rows import push_rows
from etc_dist.functions.tile_shape import TileShape
from etc_dist.ir import GraphFunction
from etc_dist.runtime.cpu import simulate
from etc_dist.verify.verify import verify
from tests.emulate.cases import PART, copy_on, matmul_of
from tests.graphs.calls import Task, calls
from tests.graphs.dense import dense
from tests.layers.reference import Answer, draw


def first_rows(waits: bool) -> GraphFunction:
    """y [rows, 2, PART]: the first rows are those of x, as many as given. waits: by way
    of a second tensor."""
    parts = f"""
        let size = rows * {2 * PART}
        input given [1] int32
        local half [size] int32
        state y [size] int32
        events copied [rows] expects 2
    """
    place = f"[tile(r * 2 + k, {PART})]"
    first = Task(
        copy_on("transfer"),
        [f"x size{place} int32"],
        [f"half{place}"],
        name="first",
        grid="r: rows, k: 2",
        notifies=["copied[r].when(r < given.load(0))"],
    )
    last = Task(
        copy_on("tensor"),
        [f"half{place}" if waits else f"x size{place} int32"],
        [f"y{place}"],
        grid="r: up_to(rows, given.load(0)), k: 2",
        waits=["copied[r]"] if waits else [],
    )
    return calls(1, tasks=[first] * waits + [last], dims="rows", parts=parts)


@pytest.mark.parametrize("waits", [False, True])
def test_a_count_that_is_given_needs_no_wait(waits):
    program = Emulator(first_rows(waits=waits))
    x = np.arange(5 * 2 * PART, dtype=np.int32)
    for count in (-1, 0, 3, 9):
        arrays = {"given": np.array([count], np.int32), "x": x}
        arrays["y"] = np.full(x.size, -1, np.int32)
        end = min(max(count, 0), 5) * 2 * PART
        expected = np.where(np.arange(x.size) < end, x, -1)
        cpu = simulate(program.plan, [arrays], {"rows": 5}, workers=3)
        np.testing.assert_array_equal(cpu.outputs[0]["y"], expected)
        assert [task.call for task in cpu.tasks].count("copy_numbers") == end // PART
        for seed in range(2):
            [outputs] = program.run([arrays], {"rows": 5}, seed=seed)
            np.testing.assert_array_equal(outputs["y"], expected)


def test_a_given_count_is_proved_with_its_data():
    plan = Emulator(first_rows(waits=True), schedule="static").plan
    assert verify(plan, {"rows": 5}, 2).unchecked != ()
    tensors = {"given": [np.array([3], np.int32)]}
    assert verify(plan, {"rows": 5}, 2, tensors).unchecked == ()


def first_blocks(shape: TileShape) -> GraphFunction:
    """y [rows, n] = x @ w.T for the first blocks of rows, as many as given, by way of
    copies of x. z [rows, n]: every second block of these, after its matmul."""
    size, columns = shape.rows, f"[tile(j, {shape.columns})]"
    parts = f"""
        let blocks = ceildiv(rows, {size})
        input given [1] int32
        state y [rows, n] bfloat16
        state z [rows, n] bfloat16
        local half [rows, k] bfloat16
        events copied [blocks] expects 1
        events done [blocks] expects ceildiv(n, {shape.columns})
    """
    block, by_block = f"tile(i, {size})", {"grid": "i: blocks"}
    odd = f"span(i * {size}, select(i < given.load(0), i % 2 * {size}, 0))"
    tasks = [
        Task(
            push_rows(),
            [f"x rows[{block}] k bfloat16"],
            [f"half[{block}, :]"],
            name="copy",
            notifies=["copied[i].when(i < given.load(0))"],
            **by_block,
        ),
        Task(
            partial(dense, shape=shape),
            [f"half[{block}, :]", f"w n{columns} k bfloat16"],
            [f"y[{block}, {columns[1:-1]}]"],
            grid=f"i: up_to(blocks, given.load(0)), j: ceildiv(n, {shape.columns})",
            waits=["copied[i]"],
            notifies=["done[i].when(i % 2)"],
        ),
        Task(
            push_rows(),
            [f"y[{odd}, :]"],
            [f"z[{odd}, :]"],
            name="second",
            waits=["done[i].when(i < given.load(0)).when(i % 2)"],
            **by_block,
        ),
    ]
    return calls(1, tasks=tasks, dims="rows n k", parts=parts)


@pytest.mark.parametrize(
    "shape", [TileShape(8, 64, swapped=True), TileShape(128, 64)], ids=str
)
def test_matmuls_wait_and_notify_where_their_conditions_hold(shape):
    rows, n, k = 4 * shape.rows, 72, 64
    rng = np.random.default_rng(2)
    x, w = (draw(rng, (size, k), "bfloat16") for size in (rows, n))
    program = Emulator(first_blocks(shape), workers=4)
    whole = matmul_of(x, w)
    for count in (0, 3):
        arrays = {"given": np.array([count], np.int32), "x": x, "w": w}
        arrays |= {name: np.zeros((rows, n), x.dtype) for name in "yz"}
        block = np.arange(rows) // shape.rows
        for seed in range(2):
            [outputs] = program.run([arrays], seed=seed)
            for name, has in (("y", block < count), ("z", (block < count) & block % 2)):
                keep = has.astype(np.float32)[:, None]
                answer = Answer(whole.expected * keep, whole.magnitude * keep)
                answer.check(outputs[name])
