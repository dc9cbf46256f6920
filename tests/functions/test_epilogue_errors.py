"""Refusals of epilogues that do not fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import etc_dist
from etc_dist.codegen import generate
from etc_dist.errors import BuildError, CodegenError, GraphError
from etc_dist.functions.epilogue import PER_COLUMN, epilogue, residual, store
from etc_dist.functions.tile_shape import TileShape
from etc_dist.ir import span
from etc_dist.schedule import schedule_static
from tests.graphs.epilogues import SOURCE, product
from tests.refusals import refused
from tests.verify.waits import change

SHAPE = TileShape(64, 64, swapped=True)


def scale(sums, factors, y):
    y[...] = sums * factors


def declared(body=scale, **options):
    return epilogue(**{"source": SOURCE, "reads": [PER_COLUMN], **options})(body)


def residual_of_all_columns() -> Any:
    graph = product(1, what=residual, shapes=[SHAPE])
    (call,) = graph.calls
    *reads, operand = call.reads
    start, size = (
        (operand.start[0], reads[0].start[1]),
        (operand.size[0], graph.dims[1]),
    )
    operand = replace(operand, start=start, size=size)
    return change(graph, call.name, reads=(*reads, operand))


def first_of_k(size: int) -> Any:
    return product(1, shapes=[SHAPE], part=lambda k: span(0, size))


def generated(graph: Any) -> None:
    generate(schedule_static(graph))


def replaced(sums, y):
    y = sums  # noqa: F841


def more(sums, factors, y, more): ...


def of_scale(**options: Any) -> Any:
    return product(1, what=declared(**options), shapes=[SHAPE])


REFUSALS = {
    "reads": (
        lambda: declared(reads=["column"]),
        "reads= of 'per element', 'per column', 'per row'",
    ),
    "reads as text": (lambda: declared(reads="per column"), "reads= of 'per element'"),
    "writes": (
        lambda: declared(more, writes=["per column"]),
        "writes= of 'per element', 'per row'",
    ),
    "dtype": (
        lambda: declared(dtype="int32"),
        "dtype= of 'bfloat16', 'float16', 'float32', 'float8",
    ),
    "arrays": (
        lambda: declared(reads=[]),
        "wanted: 2 positional parameters: sums, y got: (sums, factors, y) to do",
    ),
    "constants of the matmul": (
        lambda: generated(of_scale(constants={"kTiles": 2})),
        "got: kTiles to do",
    ),
    "residual of other columns": (
        lambda: generated(residual_of_all_columns()),
        "got: axis 1: size n, where another columns is 64 to do",
    ),
    "part of k": (
        lambda: generated(first_of_k(SHAPE.depth // 2)),
        "got: axis 1: size 128|k a multiple of 256",
    ),
    "name of the CUDA half": (
        lambda: etc_dist.build(of_scale(), target="sm_90a"),
        "scale",
    ),
    "dtype of y": (
        lambda: generated(product(1, what=store, shapes=[SHAPE], y_dtype="float32")),
        "got: float32 to do",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_an_epilogue_that_does_not_fit_is_refused(name):
    refused(*REFUSALS[name], (BuildError, CodegenError, GraphError))


def test_a_part_of_k_of_whole_steps_is_taken():
    generated(first_of_k(SHAPE.depth))


def test_the_body_must_fill_y():
    refused(lambda: epilogue(source=SOURCE)(replaced), "does not write its operand y")
