"""Copies of chosen rows to adjacent places: both bodies."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.emulate import Emulator
from etc_dist.functions.pack_rows import PACKED_ROWS, TENSOR_ROWS, pack_rows
from etc_dist.ir import Graph, ceildiv, graph_function, tile
from etc_dist.ir.function import TENSOR, TRANSFER
from etc_dist.runtime.cpu import simulate
from etc_dist.schedule import schedule_static
from tests.functions.compiled import check_compiled
from tests.layers.reference import draw

# More rows in a task of the tensor lane than it has warps.
LANES = {TRANSFER: PACKED_ROWS, TENSOR: 2 * TENSOR_ROWS + 1}


@graph_function
def packed(g: Graph, *, lane: str) -> None:
    tokens, columns, rows = g.dims("tokens columns rows")
    x = g.input("x", (tokens, columns), "bfloat16")
    numbers = g.input("numbers", (rows,), "int32")
    y = g.output("y", (rows, columns), "bfloat16")
    (c,) = grid = g.grid(c=ceildiv(rows, LANES[lane]))
    some = tile(c, LANES[lane])
    g.call(
        pack_rows("bfloat16", lane),
        grid,
        reads=[x[:, :], numbers[some]],
        writes=[y[some, :]],
    )


@pytest.mark.parametrize("lane", LANES)
def test_rows_are_copied_in_the_order_of_their_numbers(lane, rng):
    # More columns than a warp has in flight, and a task of fewer rows.
    dims = {"tokens": 5, "columns": 2056, "rows": 2 * LANES[lane] + 1}
    x = draw(rng, (dims["tokens"], dims["columns"]), "bfloat16")
    numbers = rng.integers(0, dims["tokens"], dims["rows"]).astype(np.int32)
    given, graph = {"x": x, "numbers": numbers}, packed(1, lane=lane)
    simulated = simulate(schedule_static(graph), [given], dims).outputs[0]
    emulated = Emulator(graph, workers=2).run([given], dims)[0]
    for found in (simulated, emulated):
        np.testing.assert_array_equal(found["y"], x[numbers])


@pytest.mark.parametrize("lane", LANES)
def test_the_cuda_body_compiles_without_spills(lane):
    check_compiled(packed(1, lane=lane))
