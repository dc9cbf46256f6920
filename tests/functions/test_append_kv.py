"""Keys and values into a paged cache. `test_attend.py` tests both bodies in range."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from etc_dist.emulate import Emulator
from etc_dist.errors import GraphError
from etc_dist.functions.append_kv import PagedCache
from etc_dist.runtime.cpu import simulate
from etc_dist.schedule import schedule_static
from tests.functions.both import both
from tests.graphs.paged import attention, dims_of, draw_step

PAGED = PagedCache(64, 16)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("request", -1),
        ("request", 1),
        ("position", -1),
        ("position", 2**31 - 1),
        ("position", 48),
        ("table", -1),
        ("table", 4),
    ],
)
def test_rows_out_of_range_touch_no_memory(name, value, rng):
    arrays = draw_step(rng, PAGED, 1, 1, [[40]])
    arrays[name][...] = value
    for outputs in both(program(), arrays, dims_of(arrays, 4, 2)):
        assert outputs["cache"].tobytes() == arrays["cache"].tobytes()
        assert not outputs["y"].any()


@cache
def program():
    return Emulator(attention(1, paged=PAGED, group=1), workers=2)


@pytest.mark.parametrize("sizes", [(96, 16), (64, 24)])
def test_sizes_that_no_body_supports_are_refused(sizes):
    with pytest.raises(GraphError, match="of a paged cache is not supported"):
        PagedCache(*sizes)


def test_the_order_of_rows_does_not_matter(rng):
    arrays = draw_step(rng, PAGED, 1, 2, [[3, 4], [16]])
    turned = {n: a[::-1].copy() if len(a) == 3 else a for n, a in arrays.items()}
    plan, dims = schedule_static(attention(1, paged=PAGED, group=1)), dims_of(arrays, 1)
    outputs, turned_outputs = (
        simulate(plan, [operands], dims).outputs[0] for operands in (arrays, turned)
    )
    assert outputs["cache"].tobytes() == turned_outputs["cache"].tobytes()
    np.testing.assert_array_equal(outputs["y"], turned_outputs["y"][::-1])


def test_a_warp_appends_many_rows(rng):
    arrays = draw_step(rng, PAGED, 1, 1, [[3 * n % 40] for n in range(133)])
    reference, outputs = both(program(), arrays, dims_of(arrays, 4, 2))
    for name in ("cache", "y"):
        close = (a[name].astype(np.float32) for a in (outputs, reference))
        np.testing.assert_allclose(*close, 2**-7, 2**-7)
