"""Regions of k that are empty at the dims of a run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from etc_dist.codegen import generate
from etc_dist.emulate.rank_memory import EmulatedMemory
from etc_dist.errors import ArgumentError, CodegenError
from etc_dist.functions.epilogue import partial as in_fp32
from etc_dist.functions.tile_matmul import Tiles
from etc_dist.functions.tile_shape import TileShape
from etc_dist.functions.wide_tile import RowTiles
from etc_dist.ir import Graph, ceildiv, graph_function, span, tile
from etc_dist.schedule import schedule_static
from tests.graphs.dense import SINGLE, dense
from tests.graphs.kit import made

CHUNK, SPLITS = 128, 3


def rows(g: Graph) -> Any:
    tiles = RowTiles(g, "rows")
    return tiles.matmul_rows("bfloat16"), tiles.values


def partial_sums(g: Graph) -> Any:
    tiles = Tiles(g, "logits", 0, [TileShape(64, 128, swapped=True)])
    return tiles.matmul("bfloat16", in_fp32), tiles.values


# Name -> function and values, rows and columns of a tile.
FUNCTIONS: dict[str, tuple[Callable[[Graph], Any], int, int]] = {
    "tile_matmul nk": (dense, 128, 256),
    "tile_matmul kn": (partial(dense, w_layout="kn"), 128, 256),
    "tile_matmul alone": (partial(dense, shape=SINGLE), 128, 128),
    "own rows": (rows, 128, 256),
    "fp32": (partial_sums, 64, 128),
}


@graph_function
def split(g: Graph, *, name: str, surplus: bool = False) -> None:
    """y[s] = the product of split s of k. surplus: a task without k is one without rows
    of y, too."""
    k = g.dims("k")
    make, rows, columns = FUNCTIONS[name]
    (function, values), is_kn = make(g), name.endswith("kn")
    x = g.input("x", (rows, k), "bfloat16")
    w = g.input("w", (k, columns) if is_kn else (columns, k), "bfloat16")
    dtype = "float32" if name == "fp32" else "bfloat16"
    y = g.output("y", (SPLITS, rows, columns), dtype)
    if surplus:
        y = g.output("z", (rows * ceildiv(k, CHUNK), columns), dtype)
    (s,) = grid = g.grid(s=SPLITS)
    part = tile(s, CHUNK)
    weight = w[part, :] if is_kn else w[:, part]
    reads = [x[:, part], *[weight] * (function.reads - 1)]
    writes = [y[tile(s, rows), :] if surplus else y[s, :, :]]
    g.call(function, grid, name="part", reads=reads, writes=writes, values=values)


def memory(graph: Any, k: int) -> None:
    plan = schedule_static(graph)
    EmulatedMemory(plan, generate(plan), [{"k": k}], 2)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_empty_split_of_k_is_refused_before_a_run(name):
    graph = split(1, name=name)
    for k in (2 * CHUNK + 8, 3 * CHUNK):
        memory(graph, k)
    with pytest.raises(ArgumentError) as caught:
        memory(graph, 2 * CHUNK)
    assert caught.value.what == "call part: a region of tile_matmul is empty"
    assert "task part[2], x[" in caught.value.where
    assert caught.value.got == "none: axis 1 has 256 elements"


def test_a_task_that_writes_nothing_may_read_nothing():
    memory(split(1, name="tile_matmul alone", surplus=True), 2 * CHUNK)


def test_a_loaded_place_on_k_is_refused():
    def loaded(g: Graph) -> None:
        first = g.input("first", (4,), "int32")
        x = g.input("x", (128, 256), "bfloat16")
        y = g.output("y", (128, 128), "bfloat16")
        reads, writes = [x[:, span(first.load(0), 128)]] * 2, [y[:, :]]
        function, values = dense(g, SINGLE)
        g.call(function, g.grid(i=1), values=values, reads=reads, writes=writes)

    with pytest.raises(CodegenError, match="as its place is loaded"):
        memory(made(loaded), 0)
