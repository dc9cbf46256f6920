"""Matmuls on tiles of one worker, some of which are divided along k into parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from etc_dist.functions.epilogue import swiglu
from etc_dist.functions.scaled_weights import weight_input
from etc_dist.functions.tile_matmul import Tiles
from etc_dist.functions.tile_shape import TileShape
from etc_dist.ir import Graph, GraphFunction, ceildiv, graph_function, tile
from etc_dist.ir.tensor import numpy_dtype
from etc_dist.ops.matmul import matmul_graph
from etc_dist.ops.multiply import TiledMatmul, tiles_of_dims
from etc_dist.ops.quantized_rows import rows_for
from tests.emulate.cases import Example, gated, matmul_of
from tests.layers.reference import Answer, draw

TURNS = TileShape(8, 64, swapped=True)
HALVES = TileShape(64, 128, swapped=True)
TALL = TileShape(144, 128, swapped=True)
ROWS = TileShape(128, 112)
WIDE = TileShape(128, 224)
KINDS = (TURNS, HALVES, TALL, ROWS, WIDE)
"""One worker: the warpgroups multiply alternate boxes along k, or have half of the
columns, also of many rows of x; or rows of x, of which WIDE stores a third time."""
GATED_KINDS = (TURNS, HALVES, TALL, TileShape(128, 160))
KN_KINDS = (TURNS, HALVES, TALL, TileShape(128, 192))


@dataclass(frozen=True)
class Division:
    """A size, and its division into tiles: of a shape, of so many columns, of which the
    last `split` columns of tiles are in `parts` parts of k."""

    shape: TileShape
    sizes: tuple[int, int, int]
    columns: int
    split: int
    parts: int

    def dims(self, shapes: Sequence[TileShape]) -> dict[str, int]:
        return {
            **dict(zip("mnk", self.sizes, strict=True)),
            "shape": shapes.index(self.shape),
            "column_groups": self.columns // 8,
            "split_tile_columns": self.split,
            "parts": self.parts,
        }


# Neither rows, columns nor k are multiples of a tile; there are whole tiles, too.
DIVISIONS = {
    "turns": Division(TURNS, (13, 200, 1544), 64, 2, 3),
    "turns, narrow": Division(TURNS, (5, 72, 1544), 24, 1, 2),
    "halves": Division(HALVES, (93, 392, 584), 128, 2, 3),
    "halves, narrow": Division(HALVES, (93, 392, 584), 80, 2, 3),
    "tall": Division(TALL, (141, 264, 200), 128, 1, 2),
    "two tall": Division(TALL, (275, 264, 456), 128, 2, 4),
    "rows": Division(ROWS, (135, 264, 200), 112, 2, 2),
    "wide": Division(WIDE, (135, 520, 200), 224, 2, 2),
}
GATED = {
    "turns": Division(TURNS, (13, 104, 1544), 64, 2, 3),
    "halves": Division(HALVES, (93, 136, 584), 128, 2, 3),
    "halves, narrow": Division(HALVES, (93, 136, 584), 80, 2, 3),
    "tall": Division(TALL, (141, 136, 200), 128, 1, 2),
    "rows": Division(GATED_KINDS[3], (135, 168, 200), 160, 2, 2),
}
KN = {
    "turns": Division(TURNS, (13, 200, 1544), 64, 2, 3),
    "halves": Division(HALVES, (61, 392, 584), 128, 2, 3),
    "tall": Division(TALL, (301, 264, 200), 128, 1, 2),
    "rows": Division(KN_KINDS[3], (133, 392, 200), 192, 2, 2),
}
SHAPES = {"nk": KINDS, "kn": KN_KINDS, "gated": GATED_KINDS}
BY_KIND = {"nk": DIVISIONS, "kn": KN, "gated": GATED}
EVERY = [(kind, name) for kind, cases in BY_KIND.items() for name in cases]


@graph_function
def gated_parts(
    g: Graph,
    *,
    shapes: Sequence[TileShape] = GATED_KINDS,
    dtype: str = "bfloat16",
    w_layout: str = "nk",
) -> None:
    """y = silu(x @ gate.T) * (x @ up.T)."""
    m, n, k = g.dims("m n k")
    x, y = g.input("x", (m, k), dtype), g.output("y", (m, n), dtype)
    weights = [weight_input(g, w, w_layout, n, k, dtype) for w in ("gate", "up")]
    tiles = tiles_of_dims(g, "", shapes, m, w_layout)
    rows, quantized = rows_for(g, "", tiles, x, 2 * n, None)
    TiledMatmul(g, "", tiles, dtype, rows, weights, y, swiglu).add(quantized)


def graph_of(
    kind: str,
    dtype: str = "bfloat16",
    shapes: Sequence[TileShape] | None = None,
) -> GraphFunction:
    """kind: a layout of weights, or "gated"."""
    shapes = shapes or SHAPES[kind]
    if kind == "gated":
        return gated_parts(1, shapes=shapes, dtype=dtype)
    return matmul_graph(1, dtype=dtype, w_layout=kind, shapes=shapes)


def given_to(
    kind: str,
    division: Division,
    dtype: str = "bfloat16",
    shapes: Sequence[TileShape] | None = None,
) -> Example:
    """For graph_of with equal arguments."""
    dims, (m, n, k) = division.dims(shapes or SHAPES[kind]), division.sizes
    if kind == "gated":
        inputs, answers, _ = gated(m, n, k, dtype)
        return inputs, answers, dims
    rng = np.random.default_rng(8)
    x, w = draw(rng, (m, k), dtype), draw(rng, (n, k), dtype)
    weights = w if kind == "nk" else np.ascontiguousarray(w.T)
    return [{"x": x, "w": weights}], [matmul_of(x, w)], dims


def in_order(rng: Any, shape: TileShape, dtype: str) -> tuple[Example, Any]:
    """Three parts whose own sums are exact, and whose sum depends on the order: large,
    small, and the first one's opposite. Also y for the order of k, which is not the
    exact sum."""
    m, n, depth = shape.rows + 3, shape.columns + 8, shape.depth
    x, w = (rng.integers(-1, 2, (rows, depth)) for rows in (m, n))
    small_x, small_w = (rng.integers(-1, 2, (rows, depth)) for rows in (m, n))
    large = 2**13
    x = np.concatenate([x * large, small_x, -x * large], 1).astype(numpy_dtype(dtype))
    w = np.concatenate([w * large, small_w, w * large], 1).astype(numpy_dtype(dtype))
    total = np.zeros((m, n), np.float32)
    for part in range(3):
        of_part = slice(part * depth, (part + 1) * depth)
        total += x[:, of_part].astype(np.float32) @ w[:, of_part].astype(np.float32).T
    y = total.astype(x.dtype)
    assert not np.array_equal(y, (small_x @ small_w.T).astype(x.dtype))
    division = Division(shape, (m, n, 3 * depth), shape.columns, 2, 3)
    return ([{"x": x, "w": w}], [], division.dims((shape,))), y


@graph_function
def two_matmuls(g: Graph, *, shapes: Sequence[TileShape] = GATED_KINDS) -> None:
    """y = x @ w.T, and z = silu(x @ w.T) * (x @ w.T) on tiles of another shape."""
    m, n, k = g.dims("m n k")
    x, w = g.input("x", (m, k), "bfloat16"), g.input("w", (n, k), "bfloat16")
    for name in "yz":
        tiles = tiles_of_dims(g, f"{name}_", shapes, m)
        result = g.output(name, (m, n), "bfloat16")
        options: dict[str, Any] = {"weights": [w]}
        if name == "z":
            options = {"weights": [w, w], "epilogue": swiglu}
        TiledMatmul(g, f"{name}_", tiles, "bfloat16", x, y=result, **options).add()


@graph_function
def in_blocks(g: Graph, *, shapes: Sequence[TileShape], blocks: bool = True) -> None:
    """y = (x @ w.T) @ v.T, on the same tiles of rows. blocks: whether each of them has
    an event of its own."""
    m, n, k = g.dims("m n k")
    x, w = g.input("x", (m, k), "bfloat16"), g.input("w", (n, k), "bfloat16")
    v, y = g.input("v", (k, n), "bfloat16"), g.output("y", (m, k), "bfloat16")
    between = g.local("between", (m, n), "bfloat16")
    first, second = (tiles_of_dims(g, f"{name}_", shapes, m) for name in ("w", "v"))
    matmul = TiledMatmul(g, "w_", first, "bfloat16", x, [w], between)
    block_events = matmul.complete("done", first.rows if blocks else m)
    matmul.add()
    TiledMatmul(g, "v_", second, "bfloat16", between, [v], y).add(block_events)


@graph_function
def chained(g: Graph, *, shapes: Sequence[TileShape]) -> None:
    """y = (x @ w.T) @ w.T with square w: tiles that other tasks read. Dims select the
    shapes, of which a whole number of the second one's rows has those of the first."""
    m, k, *selected = g.dims("m k first_shape second_shape")
    x, w = g.input("x", (m, k), "bfloat16"), g.input("w", (k, k), "bfloat16")
    half, y = g.local("half", (m, k), "bfloat16"), g.output("y", (m, k), "bfloat16")
    first, second = (
        Tiles(g, f"{name}_tile", shape, shapes)
        for name, shape in zip(("first", "second"), selected, strict=True)
    )
    num_blocks = ceildiv(m, first.rows)
    block_events = g.events("done", (num_blocks,), expects=ceildiv(k, first.columns))
    for name, tiles, source, to in (
        ("first", first, x, half),
        ("second", second, half, y),
    ):
        i, j = grid = g.grid(
            **{
                f"{name}_i": ceildiv(m, tiles.rows),
                f"{name}_j": ceildiv(k, tiles.columns),
            }
        )
        of_x, of_w = tile(i, tiles.rows), tile(j, tiles.columns)
        event = block_events[i * tiles.rows // first.rows]
        g.call(
            tiles.matmul("bfloat16"),
            grid,
            reads=[source[of_x, :], w[of_w, :]],
            writes=[to[of_x, of_w]],
            values=tiles.values,
            name=name,
            **{"notifies" if name == "first" else "waits": [event]},
        )


def signs(m: int, k: int, second_shape: int = 0) -> Example:
    """For `chained`: exact products."""
    rng = np.random.default_rng(10)
    x = draw(rng, (m, k), "bfloat16")
    w = np.eye(k, k=8, dtype=np.float32) - np.eye(k, k=8 - k, dtype=np.float32)
    w = w.astype(x.dtype)
    twice = matmul_of(matmul_of(x, w).expected.astype(x.dtype), w)
    answer = Answer(twice.expected, twice.magnitude)
    dims = {"m": m, "k": k, "first_shape": 0, "second_shape": second_shape}
    return [{"x": x, "w": w}], [answer], dims
