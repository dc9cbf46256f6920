"""Graphs with an epilogue, and their inputs and expected results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from etc_dist.functions.epilogue import (
    PER_COLUMN,
    PER_ELEMENT,
    PER_ROW,
    Epilogue,
    epilogue,
)
from etc_dist.functions.scaled_weights import weight_input
from etc_dist.functions.tile_matmul import Tiles, TileShape
from etc_dist.ir import Graph, ceildiv, graph_function, tile
from etc_dist.ir.tensor import numpy_dtype
from etc_dist.ops.order import tile_grid
from tests.layers.reference import Answer

SOURCE = Path(__file__).with_suffix(".cuh")


@epilogue(
    source=SOURCE,
    reads=[PER_COLUMN, PER_ROW],
    writes=[PER_ELEMENT, PER_ROW],
    constants={"kFactor": 0.5},
)
def all_kinds(sums: Any, bias: Any, factors: Any, y: Any, old: Any, most: Any) -> None:
    """y is what is left of sums * factor + bias without its row's largest number."""
    made = sums * factors[:, None] + bias
    largest = np.abs(made).max(axis=1)
    old[...] = sums
    y[...] = made - np.float32(0.5) * largest[:, None]
    most[...] = largest


@epilogue(source=SOURCE, gated=True, reads=[PER_ELEMENT], writes=[PER_ROW])
def gated_sums(gate: Any, up: Any, other: Any, y: Any, sums: Any) -> None:
    made = np.maximum(gate, 0) * up + other.astype(np.float32)
    y[...] = made
    sums[...] = made.sum(axis=1)


@epilogue(source=SOURCE, gated=True)
def only_rounded(gate: Any, up: Any, y: Any) -> None:
    y[...] = gate * up


@epilogue(source=SOURCE, dtype="float8_e4m3fn")
def unchanged(sums: Any, y: Any) -> None:
    y[...] = sums


@graph_function
def applied(
    g: Graph,
    *,
    what: Epilogue,
    shapes: Sequence[TileShape],
    y_dtype: str = "bfloat16",
    w_layout: str = "nk",
) -> None:
    """y [m, n] and the other results of one matmul; reads are r0, r1, writes s0, s1."""
    m, n, k, shape = g.dims("m n k shape")
    x = g.input("x", (m, k), "bfloat16")
    names = [f"w{i}" for i in range(what.weights)]
    weights = [weight_input(g, name, w_layout, n, k, "bfloat16") for name in names]
    tiles = Tiles(g, "tile", shape, shapes, w_layout=w_layout)
    width = tiles.half_columns() if what.gated else tiles.columns
    strip = tiles.strip_columns(gated=what.gated)
    strips = tiles.strips(gated=what.gated)
    of = tile_grid(g, "", (m, n), tiles.rows, width)
    by_strip = (ceildiv(n, strip), m), (tile(of.grid[1], strips), of.rows)
    kinds: dict[str, Any] = {
        PER_ELEMENT: ((m, n), (of.rows, of.columns)),
        PER_COLUMN: ((n,), (of.columns,)),
        PER_ROW: ((m,), (of.rows,)),
    }
    reads = []
    for i, kind in enumerate(what.reads):
        extents, region = kinds[kind]
        dtype = "float32" if kind == PER_ROW else "bfloat16"
        reads.append(g.input(f"r{i}", extents, dtype)[region])
    writes = [g.output("y", (m, n), y_dtype)[of.rows, of.columns]]
    for i, kind in enumerate(what.writes):
        extents, region = by_strip if kind == PER_ROW else kinds[kind]
        writes.append(g.output(f"s{i}", extents, "float32")[region])
    g.call(
        tiles.matmul("bfloat16", what),
        of.grid,
        reads=[x[of.rows, :], *tiles.weight_tiles(weights, of.columns), *reads],
        writes=writes,
        order=of.order,
        values=tiles.values,
    )


@graph_function
def applied_to_a_stack(g: Graph, *, shape: TileShape) -> None:
    """`applied` with all_kinds to the matrices of a stack: each array has an axis of
    matrices in front."""
    matrices, m, n, k = g.dims("matrices m n k")
    tiles = Tiles(g, "tile", 0, [shape])
    strip, strips = tiles.strip_columns(), tiles.strips()
    x, w = (
        g.input(*a, "bfloat16")
        for a in (("x", (matrices, m, k)), ("w0", (matrices, n, k)))
    )
    bias = g.input("r0", (matrices, n), "bfloat16")
    factors = g.input("r1", (matrices, m), "float32")
    y = g.output("y", (matrices, m, n), "bfloat16")
    old = g.output("s0", (matrices, m, n), "float32")
    most = g.output("s1", (matrices, ceildiv(n, strip), m), "float32")
    s, i, j = grid = g.grid(
        s=matrices, i=ceildiv(m, tiles.rows), j=ceildiv(n, tiles.columns)
    )
    rows, columns = tile(i, tiles.rows), tile(j, tiles.columns)
    g.call(
        tiles.matmul("bfloat16", all_kinds),
        grid,
        reads=[x[s, rows, :], w[s, columns, :], bias[s, columns], factors[s, rows]],
        writes=[
            y[s, rows, columns],
            old[s, rows, columns],
            most[s, tile(j, strips), rows],
        ],
        values=tiles.values,
    )


def inputs_of(what: Epilogue, m: int, n: int, k: int) -> dict[str, Any]:
    """The inputs of `applied`: whole numbers, so that sums are exact in any order."""
    rng = np.random.default_rng(m * n + k)
    bf16 = numpy_dtype("bfloat16")

    def whole(*shape: int) -> Any:
        return np.rint(rng.standard_normal(shape)).astype(np.float32)

    extents = {PER_ELEMENT: (m, n), PER_COLUMN: (n,), PER_ROW: (m,)}
    arrays = {"x": whole(m, k).astype(bf16)}
    arrays |= {f"w{i}": whole(n, k).astype(bf16) for i in range(what.weights)}
    for i, kind in enumerate(what.reads):
        read = whole(*extents[kind])
        arrays[f"r{i}"] = read if kind == PER_ROW else read.astype(bf16)
    return arrays


def applied_given(m: int, n: int, k: int, shape: TileShape) -> Any:
    """The inputs, results and dims of `applied` with `all_kinds`."""
    inputs = inputs_of(all_kinds, m, n, k)
    x, w, bias, factors = (a.astype(np.float32) for a in inputs.values())
    made = (x @ w.T) * factors[:, None] + bias
    width = shape.strip_columns(gated=False)
    largest = np.abs(made)
    for start in range(0, n, width):
        part = largest[:, start : start + width]
        part[...] = part.max(axis=1, keepdims=True)
    answer = Answer(made - largest / 2, np.abs(made) + largest)
    return [inputs], [answer], {"m": m, "n": n, "k": k, "shape": 0}
