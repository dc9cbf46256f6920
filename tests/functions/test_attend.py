"""Attention over a paged cache: both bodies against a plain reference."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.emulate import Emulator
from etc_dist.functions.append_kv import PagedCache
from etc_dist.runtime.cpu import simulate
from etc_dist.schedule import schedule_static
from tests.conftest import some_of
from tests.functions.compiled import check_compiled
from tests.graphs.paged import EPS, attention, dims_of, draw_step, expected

RAGGED = [[0], [15], [16], [40, 41, 42], [63, 64], [130]]
"""Positions of the rows of each request: decoding, and parts of prompts."""
OF_GEMMA = PagedCache(256, 16, norm_eps=EPS, has_span=True, tables=2, gain_offset=1)
OF_HUNYUAN = PagedCache(128, 64, norm_eps=EPS, has_span=True, normalizes_rotated=True)
CASES = [  # cache, group, KV heads, those of a task, slices
    (PagedCache(64, 16, "bfloat16", EPS), 3, 3, 4, 3),
    (PagedCache(64, 64, "bfloat16"), 1, 2, 2, 2),
    (OF_HUNYUAN, 8, 4, 4, 1),
    (PagedCache(128, 16, "bfloat16", EPS, has_bias=True), 5, 1, 1, 4),
    (PagedCache(64, 16, "float16", has_bias=True), 9, 1, 1, 1),
    (PagedCache(256, 64, "float16"), 8, 4, 4, 1),
    (OF_GEMMA, 2, 2, 2, 3),
]
TOLERANCE = {"bfloat16": 5e-3, "float16": 6e-4}
SOME = pytest.mark.parametrize("case", some_of(CASES, 2), ids=str)


def check(found, given, paged, group):
    y, cache = expected(given, paged, group)
    error = np.linalg.norm(found["y"].astype(np.float64) - y) / np.linalg.norm(y)
    assert error < TOLERANCE[paged.dtype]
    np.testing.assert_allclose(
        found["cache"].astype(np.float32), cache.astype(np.float32), 2**-7, 1e-3
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_attend_to_all_positions_up_to_their_own(case, rng):
    paged, group, kv_heads, together, slices = case
    options = {"together": together, "is_whole": slices == 1}
    graph = attention(1, paged=paged, group=group, **options)
    given = draw_step(rng, paged, group, kv_heads, RAGGED)
    run = simulate(schedule_static(graph), [given], dims_of(given, slices))
    check(run.outputs[0], given, paged, group)


@SOME
def test_the_cuda_bodies_agree(case, rng):
    paged, group, kv_heads, together, slices = case
    options = {"together": together, "is_whole": slices == 1}
    graph = attention(1, paged=paged, group=group, **options)
    given = draw_step(rng, paged, group, kv_heads, RAGGED)
    emulator = Emulator(graph)
    [found] = emulator.run([given], dims_of(given, slices))
    check(found, given, paged, group)


def test_one_slice_has_the_bits_of_combine_slices(rng):
    paged, group, kv_heads, together, slices = CASES[2]
    given = draw_step(rng, paged, group, kv_heads, RAGGED)
    given["position"][:2] = -1, 2**20  # of no request
    options = {"paged": paged, "group": group, "together": together}
    one, other = (
        Emulator(attention(1, is_whole=is_whole, **options)).run(
            [given], dims_of(given, slices)
        )[0]["y"]
        for is_whole in (True, False)
    )
    assert not one[:2].any() and one[2:].any(axis=1).all()
    np.testing.assert_array_equal(one.view(np.int16), other.view(np.int16))


@SOME
def test_the_cuda_bodies_compile_without_spills(case):
    paged, group, _, together, _ = case
    check_compiled(attention(1, paged=paged, group=group, together=together))


def test_results_do_not_depend_on_slices(rng):
    paged = CASES[0][0]
    given = draw_step(rng, paged, 3, 1, RAGGED)
    plan = schedule_static(attention(1, paged=paged, group=3))
    one, few, many = (
        simulate(plan, [given], dims_of(given, slices)).outputs[0]["y"].astype(float)
        for slices in (1, 7, 16)
    )
    np.testing.assert_allclose(few, one, 2**-7, 1e-3)
    np.testing.assert_allclose(many, one, 2**-7, 1e-3)
