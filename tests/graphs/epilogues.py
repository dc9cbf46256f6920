"""Products of matrices by one call with an epilogue, and their inputs and results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from etc_dist.functions.epilogue import (
    PER_COLUMN,
    PER_ELEMENT,
    PER_ROW,
    Epilogue,
    epilogue,
    store,
)
from etc_dist.functions.scaled_weights import weight_input
from etc_dist.functions.tile_matmul import Tiles
from etc_dist.functions.tile_shape import TileShape
from etc_dist.ir import Expr, Graph, ceildiv, graph_function, tile
from etc_dist.ir.tensor import numpy_dtype
from etc_dist.ops.tile_order import tile_grid
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
    values = sums * factors[:, None] + bias
    largest = np.abs(values).max(axis=1)
    old[...] = sums
    y[...] = values - np.float32(0.5) * largest[:, None]
    most[...] = largest


@epilogue(source=SOURCE, gated=True, reads=[PER_ELEMENT], writes=[PER_ROW])
def gated_sums(gate: Any, up: Any, residual: Any, y: Any, sums: Any) -> None:
    values = np.maximum(gate, 0) * up + residual.astype(np.float32)
    y[...] = values
    sums[...] = values.sum(axis=1)


@epilogue(source=SOURCE, gated=True)
def only_rounded(gate: Any, up: Any, y: Any) -> None:
    y[...] = gate * up


@epilogue(source=SOURCE, dtype="float8_e4m3fn")
def unchanged(sums: Any, y: Any) -> None:
    y[...] = sums


@graph_function
def product(
    g: Graph,
    *,
    shapes: Sequence[TileShape],
    what: Epilogue = store,
    dtypes: Sequence[str] = ("bfloat16",),
    y_dtype: str | None = None,
    w_layout: str = "nk",
    part: Callable[[Expr], Any] | None = None,
    size: tuple[int, int] | None = None,
    stacked: bool = False,
    is_biased: bool = False,
) -> None:
    """y [m, n] = x @ w.T, and the other results of an epilogue, which also reads r0, r1
    and writes s0, s1. Gated ones have the weights gate and up. dtypes: of products of
    one program, whose names end in them. part: of k. size: rows and columns of a task,
    default those of a tile. stacked: all arrays have an axis of matrices in front.
    is_biased: the biases of each weight, b0 and b1 [n], are added to its sums."""
    stack = (g.dims("matrices"),) if stacked else ()
    m, n, k, shape = g.dims("m n k shape")
    for dtype in dtypes:
        end = f"_{dtype}" if len(dtypes) > 1 else ""
        tiles = Tiles(g, f"tile{end}", shape, shapes, m, w_layout)
        weights = [
            weight_input(g, f"{name}{end}", w_layout, n, k, dtype, stack)
            for name in weights_of(what)
        ]
        width = tiles.half_columns() if what.gated else tiles.columns
        of = tile_grid(g, end.strip("_"), (m, n), *(size or (tiles.rows, width)))
        grid, rows, columns, order = of.grid, of.rows, of.columns, of.order
        place: tuple[Expr, ...] = ()
        if stacked:
            *place, i, j = grid = g.grid(s=stack[0], i=of.down, j=of.across)
            rows, columns, order = tile(i, tiles.rows), tile(j, width), None
        strip = tiles.strip_columns(gated=what.gated)
        strips = tile(grid[-1], tiles.strips(gated=what.gated))
        axes: dict[str, Any] = {
            PER_ELEMENT: {m: rows, n: columns},
            PER_COLUMN: {n: columns},
            PER_ROW: {m: rows},
            BY_STRIP: {ceildiv(n, strip): strips, m: rows},
        }
        operands: dict[str, list[Any]] = {"input": [], "output": []}
        of_k = part(k) if part else slice(None)
        biases = [PER_COLUMN] * (len(weights) * is_biased)
        for kind, name, along, of_array in (
            ("input", "x", {m: rows, k: of_k}, dtype),
            *_arrays("input", "b", biases, axes, dtype),
            *_arrays("input", "r", what.reads, axes, dtype),
            ("output", "y", axes[PER_ELEMENT], y_dtype or dtype),
            *_arrays("output", "s", what.writes, axes, "float32"),
        ):
            array = getattr(g, kind)(f"{name}{end}", (*stack, *along), of_array)
            operands[kind].append(array[(*place, *along.values())])
        x, *reads = operands["input"]
        g.call(
            tiles.matmul(dtype, what, is_biased=is_biased),
            grid,
            name=f"tile_matmul{end}",
            reads=[x, *tiles.weight_tiles(weights, columns, of_k, (*place,)), *reads],
            writes=operands["output"],
            order=order,
            values=tiles.values,
        )


BY_STRIP = "per row and strip"


def _arrays(
    kind: str, letter: str, kinds: Sequence[str], axes: dict[str, Any], dtype: str
) -> Iterator[tuple[str, str, Any, str]]:
    """The arrays of an epilogue: what they are, names, axes and dtypes."""
    for operand_idx, kind_of_operand in enumerate(kinds):
        is_by_row = kind_of_operand == PER_ROW
        along = axes[BY_STRIP if is_by_row and kind == "output" else kind_of_operand]
        yield kind, f"{letter}{operand_idx}", along, "float32" if is_by_row else dtype


def weights_of(what: Epilogue) -> tuple[str, ...]:
    """The names of the weights of a product."""
    return ("gate", "up") if what.gated else ("w",)


def inputs_of(what: Epilogue, m: int, n: int, k: int) -> dict[str, Any]:
    """The inputs of `product`: whole numbers, so that sums are exact in any order."""
    rng = np.random.default_rng(m * n + k)
    bf16 = numpy_dtype("bfloat16")

    def whole(*shape: int) -> Any:
        return np.rint(rng.standard_normal(shape)).astype(np.float32)

    extents = {PER_ELEMENT: (m, n), PER_COLUMN: (n,), PER_ROW: (m,)}
    arrays = {"x": whole(m, k).astype(bf16)}
    arrays |= {name: whole(n, k).astype(bf16) for name in weights_of(what)}
    for i, kind in enumerate(what.reads):
        read = whole(*extents[kind])
        arrays[f"r{i}"] = read if kind == PER_ROW else read.astype(bf16)
    return arrays


def applied_given(m: int, n: int, k: int, shape: TileShape) -> Any:
    """The inputs, results and dims of `product` with `all_kinds`."""
    inputs = inputs_of(all_kinds, m, n, k)
    x, w, bias, factors = (a.astype(np.float32) for a in inputs.values())
    values = (x @ w.T) * factors[:, None] + bias
    width = shape.strip_columns(gated=False)
    largest = np.abs(values)
    for start in range(0, n, width):
        part = largest[:, start : start + width]
        part[...] = part.max(axis=1, keepdims=True)
    answer = Answer(values - largest / 2, np.abs(values) + largest)
    return [inputs], [answer], {"m": m, "n": n, "k": k, "shape": 0}
