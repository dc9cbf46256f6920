"""Copies of a step's rows: both bodies."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.emulate import Emulator
from etc_dist.functions.copy_rows import copy_rows
from etc_dist.ir import Graph, graph_function
from etc_dist.runtime.cpu import simulate
from etc_dist.schedule import schedule_static
from tests.functions.compiled import check_compiled


@graph_function
def copied(g: Graph) -> None:
    """y [2, rows] and z [2, rows] are a, b, c and d."""
    rows = g.dims("rows")
    given = [g.input(name, (rows,), "int32") for name in "abcd"]
    y, z = (g.output(name, (2, rows), "int32") for name in "yz")
    g.call(
        copy_rows(),
        g.grid(one=1),
        reads=[array[:] for array in given],
        writes=[y[0, :], y[1, :], z[0, :], z[1, :]],
    )


@pytest.mark.parametrize("rows", [1, 260])
def test_each_array_has_its_copy(rows, rng):
    inputs = {n: rng.integers(-9, 9, rows).astype(np.int32) for n in "abcd"}
    graph, dims = copied(1), {"rows": rows}
    for outputs in (
        simulate(schedule_static(graph), [inputs], dims).outputs[0],
        Emulator(graph, workers=2).run([inputs], dims)[0],
    ):
        copies = (*outputs["y"], *outputs["z"])
        for name, copy in zip("abcd", copies, strict=True):
            np.testing.assert_array_equal(copy, inputs[name])


def test_the_cuda_body_compiles_without_spills():
    check_compiled(copied(1))
