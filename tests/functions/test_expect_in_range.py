"""An index out of range ends the run."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.emulate import Emulator
from etc_dist.errors import ArgumentError
from etc_dist.functions.expect_in_range import expect_in_range
from etc_dist.runtime.cpu import simulate
from etc_dist.schedule import schedule_static
from tests.graphs.calls import one_call

DIMS = {"rows": 5}
GRAPH = one_call(
    1,
    expect_in_range(),
    ["x rows[index.load(i)] int32"],
    parts="input index [2] int32",
    grid="i: 2",
    name="row_exists",
)


@pytest.fixture(scope="module")
def emulator() -> Emulator:
    return Emulator(GRAPH, workers=2)


@pytest.mark.parametrize(
    ("index", "is_wrong"), [(4, 0), (-1, 1), (5, 1), (2**31 - 1, 1)]
)
def test_index_out_of_range_ends_the_run(index, is_wrong, emulator):
    arrays = {
        "index": np.array([0, index], np.int32),
        "x": np.arange(5, dtype=np.int32),
    }
    plan = schedule_static(GRAPH)
    for run in (
        lambda: simulate(plan, [arrays], DIMS),
        lambda: emulator.run([arrays], DIMS),
    ):
        if is_wrong:
            with pytest.raises(ArgumentError, match="row_exists"):
                run()
        else:
            run()
