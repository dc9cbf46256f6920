"""Tensors, regions and event elements: bounds, views and texts."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.ir import RANK, Graph, Symbol, span, tile
from etc_dist.ir.tensor import numpy_dtype

I = Symbol("i", "coordinate")  # noqa: E741
ENV = {"rows": 10, "n": 6, "rank": 1, "i": 0}


@pytest.fixture
def g() -> Graph:
    return Graph("one", 2)


@pytest.fixture
def x(g):
    rows, n = g.dims("rows n")
    return g.symmetric("x", (rows, n), "float32")


def viewed(region, **values: int) -> list[list[float]]:
    array = np.arange(60).reshape(10, 6)
    return region.view(array, {**ENV, **values}).tolist()


def test_a_tile_is_cut_off_at_the_edge(x):
    region = x[tile(I, 4), 0]
    assert viewed(region, i=1) == [24, 30, 36, 42]
    assert viewed(region, i=2) == [48, 54]
    assert viewed(region, i=3) == []


def test_bounds_of_many_tasks_are_computed_at_once(x):
    (low, high), columns = x[tile(I, 4), :].bounds({**ENV, "i": np.arange(4)})
    assert low.tolist() == [0, 4, 8, 10]
    assert high.tolist() == [4, 8, 10, 10]
    assert columns == (0, 6)


def test_an_axis_indexed_by_an_integer_is_dropped(x):
    assert viewed(x[I, tile(1, 2)], i=3) == [20, 21]
    assert viewed(x[span(3, 1), tile(1, 2)]) == [[20, 21]]


def test_slices_and_spans_name_starts_and_sizes(x):
    assert viewed(x[1:3, :2]) == [[6, 7], [12, 13]]
    assert viewed(x[span(I + 8, 4), 5], i=1) == [59]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda x: x[:, :], "x[:, :]"),
        (lambda x: x[tile(I, 4), 0], "x[i * 4 +: 4, 0]"),
        (lambda x: x[2:5, 1:], "x[2 +: 3, 1 +: n - 1]"),
        (lambda x: x.on((RANK + 1) % 2)[I, :], "x.on((rank + 1) % 2)[i, :]"),
    ],
)
def test_the_text_of_a_region(x, make, text):
    assert str(make(x)) == text


def test_a_remote_region_keeps_its_rank_and_a_local_one_has_none(x):
    assert x[:, :].rank is None
    assert x.on(I)[:, :].rank == I


def test_bytes_of_a_tensor_follow_dims_and_dtype(g, x):
    half = g.local("half", (*x.shape, 3), "bfloat16")
    assert (x.nbytes(ENV), half.nbytes(ENV)) == (240, 360)
    sizes = [numpy_dtype(d).itemsize for d in ("float8_e4m3fn", "bfloat16", "float32")]
    assert sizes == [1, 2, 4]


def test_an_element_of_an_event_tensor_is_a_map_of_coordinates(g):
    ready = g.events("ready", (4, 2), expects=1, cross_rank=True)
    assert str(ready[I // 2, 1]) == "ready[i // 2, 1]"
    assert str(ready.on(RANK + 1)[I, 0]) == "ready.on(rank + 1)[i, 0]"
    assert ready[I, 0].rank is None


def test_expected_counts_may_depend_on_the_element(g):
    n = g.dims("n")
    ready = g.events("ready", (4, 2), expects=lambda i, j: n * i + j)
    assert ready.expected((3, 1), {"n": 10}) == 31
    many = ready.expected((np.arange(4), 1), {"n": 10})
    assert many.tolist() == [1, 11, 21, 31]
