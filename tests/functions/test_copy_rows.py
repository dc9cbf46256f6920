"""Copies of a step's rows: both bodies."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.functions.copy_rows import copy_rows
from tests.functions.both import both
from tests.functions.compiled import check_compiled
from tests.graphs.calls import one_call

COPIED = one_call(
    1,
    copy_rows(),
    reads=[f"{name} rows int32" for name in "abcd"],
    writes=[f"{name} 2[{row}] rows int32" for name in "yz" for row in (0, 1)],
)


@pytest.mark.parametrize("rows", [1, 260])
def test_each_array_has_its_copy(rows, rng):
    inputs = {n: rng.integers(-9, 9, rows).astype(np.int32) for n in "abcd"}
    for outputs in both(COPIED, inputs, {"rows": rows}):
        copies = (*outputs["y"], *outputs["z"])
        for name, copy in zip("abcd", copies, strict=True):
            np.testing.assert_array_equal(copy, inputs[name])


def test_the_cuda_body_compiles_without_spills():
    check_compiled(COPIED)
