"""Copies of a row at loaded places: both bodies."""

from __future__ import annotations

import numpy as np

from etc_dist.functions.scatter_row import scatter_row
from tests.functions.both import both
from tests.functions.compiled import check_compiled
from tests.graphs.calls import one_call
from tests.layers.reference import draw

COPIES, WIDTH = 3, 1032
"""Columns of a task: more than its threads copy at once."""
PLACES = [f"place.load(r, {k})" for k in range(COPIES)]
SCATTERED = one_call(
    1,
    scatter_row(COPIES, "bfloat16"),
    [f"x rows[span(r, 1)] columns[tile(j, {WIDTH})] bfloat16"],
    [f"y[span(maximum(0, {place}), minimum(1, {place} + 1)), tile(j, {WIDTH})]"
     for place in PLACES],
    dims="rows columns places",
    parts=f"""
        input place [rows, {COPIES}] int32
        state y [places, columns] bfloat16
    """,
    grid=f"r: rows, j: ceildiv(columns, {WIDTH})",
)  # fmt: skip


def test_rows_are_copied_to_their_places(rng):
    x, y = draw(rng, (4, 1096), "bfloat16"), draw(rng, (9, 1096), "bfloat16")
    place = np.array([[4, 0, 8], [-1, -1, -1], [-1, 2, -1], [5, -1, 1]], np.int32)
    arrays = {"x": x, "place": place, "y": y}
    reference = y.copy()
    reference[place[place >= 0]] = x[np.nonzero(place >= 0)[0]]
    dims = {"rows": 4, "columns": 1096, "places": 9}
    for outputs in both(SCATTERED, arrays, dims):
        np.testing.assert_array_equal(outputs["y"], reference)


def test_the_cuda_body_compiles_without_spills():
    check_compiled(SCATTERED)
