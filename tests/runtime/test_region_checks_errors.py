"""Regions of k that are empty at the dims of a run."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from etc_dist.codegen import generate
from etc_dist.emulate.rank_memory import EmulatedMemory
from etc_dist.errors import ArgumentError, CodegenError
from etc_dist.functions.epilogue import partial as unrounded
from etc_dist.functions.tile_shape import TileShape
from etc_dist.ir import GraphFunction
from etc_dist.schedule import schedule_static
from tests.graphs.calls import Made, one_call
from tests.graphs.dense import dense, own_rows

WIDE = TileShape(64, 128, swapped=True)
CHUNK, SPLITS = 128, 3


# Name -> function and values, rows and columns of a tile.
FUNCTIONS: dict[str, tuple[Made, int, int]] = {
    "tile_matmul nk": (dense, 128, 256),
    "tile_matmul kn": (partial(dense, w_layout="kn"), 128, 256),
    "tile_matmul alone": (dense, 128, 128),
    "own rows": (own_rows, 128, 256),
    "fp32": (partial(dense, shape=WIDE, epilogue=unrounded), 64, 128),
}


def split_of_k(name: str, surplus: bool = False) -> GraphFunction:
    """y[s] = the product of split s of k. surplus: a task without k is one without rows
    of z, too."""
    function, rows, columns = FUNCTIONS[name]
    part = f"k[tile(s, {CHUNK})]"
    axes = f"{part} {columns}" if name.endswith("kn") else f"{columns} {part}"
    dtype, z = "float32" if name == "fp32" else "bfloat16", ""
    writes = [f"y {SPLITS}[s] {rows} {columns} {dtype}"]
    if surplus:
        z = f"output z [{rows} * ceildiv(k, {CHUNK}), {columns}] {dtype}"
        writes = [f"z[tile(s, {rows}), :]"]
    reads = [f"x {rows} {part} bfloat16", f"w {axes} bfloat16"]
    options = {"grid": f"s: {SPLITS}", "name": "part", "dims": "k", "parts": z}
    return one_call(1, function, reads, writes, **options)


def memory(graph: Any, k: int) -> None:
    plan = schedule_static(graph)
    EmulatedMemory(plan, generate(plan), [{"k": k}], 2)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_empty_split_of_k_is_refused_before_a_run(name):
    graph = split_of_k(name)
    for k in (2 * CHUNK + 8, 3 * CHUNK):
        memory(graph, k)
    with pytest.raises(ArgumentError) as caught:
        memory(graph, 2 * CHUNK)
    assert caught.value.what == "call part: a region of tile_matmul is empty"
    assert "task part[2], x[" in caught.value.where
    assert caught.value.got == "none: axis 1 has 256 elements"


def test_a_task_that_writes_nothing_may_read_nothing():
    memory(split_of_k("tile_matmul alone", surplus=True), 2 * CHUNK)


def test_a_loaded_place_on_k_is_refused():
    x = "x 128 256[span(first.load(0), 128)] bfloat16"
    first = "input first [4] int32"
    graph = one_call(1, dense, [x, x], ["y 128 128 bfloat16"], parts=first)
    with pytest.raises(CodegenError, match="as its place is loaded"):
        memory(graph, 0)
