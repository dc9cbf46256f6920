"""Refusals of epilogues that do not fit."""

from __future__ import annotations

import pytest

import etc_dist
from etc_dist.codegen import generate
from etc_dist.errors import BuildError, CodegenError, GraphError
from etc_dist.functions.epilogue import PER_COLUMN, epilogue, residual, store
from etc_dist.functions.tile_matmul import Tiles, TileShape
from etc_dist.ir import Graph, graph_function
from etc_dist.ops.order import tile_grid
from etc_dist.schedule import schedule_static
from tests.functions.epilogues import SOURCE, applied

SHAPE = TileShape(64, 64, "k", swapped=True)


def scale(sums, factors, y):
    y[...] = sums * factors


def declared(body=scale, **options):
    return epilogue(**{"source": SOURCE, "reads": [PER_COLUMN], **options})(body)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"reads": ["column"]}, "reads= of 'per element', 'per column', 'per row'"),
        ({"writes": ["per column"]}, "writes= of 'per element', 'per row'"),
        ({"dtype": "int32"}, "dtype= of 'bfloat16', 'float16', 'float32', 'float8"),
    ],
)
def test_kinds_and_dtypes_must_be_known(options, wanted):
    body = {"writes": lambda sums, factors, y, more: None}.get(next(iter(options)))
    with pytest.raises(GraphError) as caught:
        declared(body or scale, **options)
    assert wanted in caught.value.wanted


def test_the_body_must_take_all_arrays():
    with pytest.raises(GraphError) as caught:
        declared(reads=[])
    assert caught.value.wanted == "2 positional parameters: sums, y"
    assert caught.value.got == "(sums, factors, y)"


def test_the_body_must_fill_y():
    def replaced(sums, factors, y):
        y = sums * factors  # noqa: F841

    with pytest.raises(GraphError, match="does not write its operand y"):
        declared(replaced)


def test_arguments_have_types():
    with pytest.raises(TypeError, match="reads= of epilogue"):
        declared(reads="per column")
    with pytest.raises(TypeError, match="epilogue of Tiles.matmul"):
        Tiles(Graph("one", 1), "tile", 0, [SHAPE]).matmul("bfloat16", scale)


def test_constants_must_not_replace_those_of_the_matmul():
    graph = applied(1, what=declared(constants={"kTiles": 2}), shapes=[SHAPE])
    with pytest.raises(CodegenError) as caught:
        generate(schedule_static(graph))
    assert caught.value.got == "kTiles"


def test_a_residual_must_have_the_rows_and_columns_of_y():
    @graph_function
    def shifted(g: Graph) -> None:
        m, n, k = g.dims("m n k")
        x, w = g.input("x", (m, k), "bfloat16"), g.input("w", (n, k), "bfloat16")
        other = g.input("other", (m, n), "bfloat16")
        y, tiles = g.output("y", (m, n), "bfloat16"), Tiles(g, "tile", 0, [SHAPE])
        of = tile_grid(g, "", (m, n), 64, 64)
        g.call(
            tiles.matmul("bfloat16", residual),
            of.grid,
            reads=[x[of.rows, :], w[of.columns, :], other[of.rows, :]],
            writes=[y[of.rows, of.columns]],
            values=tiles.values,
        )

    with pytest.raises(CodegenError) as caught:
        generate(schedule_static(shifted(1)))
    assert caught.value.got == "axis 1: size n, where another columns is 64"


def test_a_share_of_k_is_a_multiple_of_a_step():
    @graph_function
    def first_columns(g: Graph, *, width: int) -> None:
        m, n, k = g.dims("m n k")
        x, w = g.input("x", (m, k), "bfloat16"), g.input("w", (n, k), "bfloat16")
        y, tiles = g.output("y", (m, n), "bfloat16"), Tiles(g, "tile", 0, [SHAPE])
        of = tile_grid(g, "", (m, n), 64, 64)
        g.call(
            tiles.matmul("bfloat16"),
            of.grid,
            reads=[x[of.rows, :width], w[of.columns, :width]],
            writes=[y[of.rows, of.columns]],
            values=tiles.values,
        )

    assert generate(schedule_static(first_columns(1, width=SHAPE.step)))
    with pytest.raises(CodegenError) as caught:
        generate(schedule_static(first_columns(1, width=SHAPE.step // 2)))
    assert caught.value.got == "axis 1: size 256"
    assert "k a multiple of 512" in caught.value.wanted


def test_the_cuda_half_must_have_the_name_of_the_body():
    graph = applied(1, what=declared(), shapes=[SHAPE])
    with pytest.raises(BuildError, match="scale"):
        etc_dist.build(graph, target="sm_90a")


def test_y_has_the_dtype_of_the_epilogue():
    graph = applied(1, what=store, shapes=[SHAPE], y_dtype="float32")
    with pytest.raises(CodegenError) as caught:
        generate(schedule_static(graph))
    assert caught.value.got == "float32"
