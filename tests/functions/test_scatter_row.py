"""Copies of a row at loaded places: both bodies."""

from __future__ import annotations

import numpy as np

from etc_dist.functions.scatter_row import scatter_row
from etc_dist.ir import Graph, ceildiv, graph_function, maximum, minimum, span, tile
from tests.functions.both import both
from tests.functions.compiled import check_compiled
from tests.layers.reference import draw

COPIES, WIDTH = 3, 1032
"""Columns of a task: more than its threads copy at once."""


@graph_function
def scattered(g: Graph) -> None:
    rows, columns, places = g.dims("rows columns places")
    x = g.input("x", (rows, columns), "bfloat16")
    place = g.input("place", (rows, COPIES), "int32")
    y = g.state("y", (places, columns), "bfloat16")
    r, j = grid = g.grid(r=rows, j=ceildiv(columns, WIDTH))
    of = [place.load(r, k) for k in range(COPIES)]
    to = [span(maximum(0, p), minimum(1, p + 1)) for p in of]
    g.call(
        scatter_row(COPIES, "bfloat16"),
        grid,
        reads=[x[span(r, 1), tile(j, WIDTH)]],
        writes=[y[rows, tile(j, WIDTH)] for rows in to],
    )


def test_rows_are_copied_to_their_places(rng):
    x, y = draw(rng, (4, 1096), "bfloat16"), draw(rng, (9, 1096), "bfloat16")
    place = np.array([[4, 0, 8], [-1, -1, -1], [-1, 2, -1], [5, -1, 1]], np.int32)
    given = {"x": x, "place": place, "y": y}
    wanted = y.copy()
    wanted[place[place >= 0]] = x[np.nonzero(place >= 0)[0]]
    dims = {"rows": 4, "columns": 1096, "places": 9}
    for found in both(scattered(1), given, dims):
        np.testing.assert_array_equal(found["y"], wanted)


def test_the_cuda_body_compiles_without_spills():
    check_compiled(scattered(1))
