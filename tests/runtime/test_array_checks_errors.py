"""Arrays whose shapes do not give the dims of a graph."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.errors import ArgumentError
from etc_dist.ir import Graph
from etc_dist.ir.dims import checked_dims
from etc_dist.runtime.array_checks import Expected, bind_dims, check_arrays
from etc_dist.runtime.arrays import Array, inspect
from tests.graphs.kit import made
from tests.refusals import refused


def gathered(g: Graph) -> None:
    """Its only input has the rows of all ranks."""
    rows, n = g.dims("rows n")
    g.input("x", (g.world_size * rows, n), "float32")


GATHERED = made(gathered, 2)
PLAIN = made(lambda g: g.input("x", g.dims("rows n"), "float32"), 2)


@pytest.mark.parametrize(
    ("graph", "shape", "fix"),
    [
        (GATHERED, (8, 4), "in the graph, give an input an axis that is just rows"),
        (PLAIN, (8,), "check the number of axes of each array"),
    ],
)
def test_dims_that_no_axis_gives_are_refused(graph, shape, fix):
    x = inspect("x", np.zeros(shape, np.float32))
    with pytest.raises(ArgumentError, match="dims of .* cannot be found") as caught:
        bind_dims(graph, {"x": x})
    assert caught.value.fix.startswith(fix)
    assert "x [" in caught.value.wanted


def test_dims_that_no_axis_gives_may_be_chosen():
    x = inspect("x", np.zeros((8, 4), np.float32))
    assert bind_dims(GATHERED, {"x": x}, {"rows": 4}) == {"rows": 4, "n": 4}


@pytest.mark.parametrize(
    ("dims", "kind", "text"),
    [
        ({"row": 4}, ArgumentError, "wanted: integers of at least 0 for rows, n"),
        ({"rows": -1}, ArgumentError, "rows is out of range"),
        ({"rows": 2.0}, TypeError, "rows expects an int, got float"),
    ],
)
def test_chosen_dims_that_do_not_fit_are_refused(dims, kind, text):
    x = inspect("x", np.zeros((8, 4), np.float32))
    with pytest.raises(kind, match=text):
        bind_dims(GATHERED, {"x": x}, dims)


@pytest.mark.parametrize("kind", ["local", "symmetric", "events", "output"])
def test_negative_extents_are_refused(kind):
    def small(g: Graph) -> None:
        n = g.dims("n")
        g.input("x", (n,), "float32")
        options = {"expects": 1} if kind == "events" else {"dtype": "float32"}
        getattr(g, kind)("part", (n - 4, n - 4), **options)

    text = "axes of length 0 or more\n  got:    part .-2, -2"
    with pytest.raises(ArgumentError, match=text):
        bind_dims(made(small), {"x": inspect("x", np.ones(2, np.float32))})
    with pytest.raises(ArgumentError, match=text):
        checked_dims(made(small), {"n": 2})


def test_an_output_of_negative_extent_on_a_peer_is_refused_on_all_ranks():
    def smaller(g: Graph) -> None:
        n = g.dims("n")
        g.input("x", (n,), "float32")
        g.output("y", (n - 4 * g.rank,), "float32")

    with pytest.raises(ArgumentError, match=r"got:    y of rank 1 \[-2\]"):
        bind_dims(made(smaller, 2), {"x": inspect("x", np.ones(2, np.float32))})


@pytest.mark.parametrize(
    ("by_element", "words"),
    [
        (True, "wanted: s at an address that is a multiple of 16|got: [3] float32"),
        (False, "wanted: s with 16-byte aligned rows of a multiple of 16 bytes"),
    ],
)
def test_an_address_that_gpus_do_not_take_is_named(by_element, words):
    s = Array(0x1004, (3,), "float32", 0, "C", None, "s")
    expected = Expected("s", (3,), "float32", by_element=by_element)
    words += "|at 0x1004"
    refused(lambda: check_arrays("f", [expected], {"s": s}, 0), words, ArgumentError)
