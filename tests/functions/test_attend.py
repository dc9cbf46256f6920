"""Attention over a paged cache: both bodies against a plain reference."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from etc_dist.emulate import Emulator
from etc_dist.functions.append_kv import PagedCache
from etc_dist.runtime.cpu import simulate
from etc_dist.schedule import schedule_static
from tests.conftest import some_of
from tests.functions.compiled import check_compiled
from tests.graphs.paged import EPS, attention, dims_of, draw_step, expected

exhaustive = pytest.mark.exhaustive
RAGGED = [[0], [15], [16], [40, 41, 42], [63, 64], [130], [900], [511]]
"""Positions of the rows of each request: decoding, and parts of prompts."""
OF_GEMMA = PagedCache(256, 16, norm_eps=EPS, has_span=True, tables=2, gain_offset=1)
OF_GEMMA = replace(OF_GEMMA, score_cap=0.5)
OF_HUNYUAN = PagedCache(128, 64, norm_eps=EPS, has_span=True, normalizes_rotated=True)
CASES = [  # cache, group, KV heads, lists of a task, tasks of a head
    (PagedCache(64, 16, "bfloat16", EPS), 3, 3, 2, 8),
    (OF_HUNYUAN, 8, 2, 2, 3),
    (PagedCache(64, 128, "bfloat16"), 1, 2, 1, 7),
    (PagedCache(128, 16, "bfloat16", EPS, has_bias=True), 5, 1, 1, 8),
    (PagedCache(64, 32, "float16", has_bias=True, has_sinks=True), 9, 1, 2, 7),
    (PagedCache(256, 64, "float16"), 8, 1, 2, 3),
    (OF_GEMMA, 2, 2, 2, 4),
]
TOLERANCE = {"bfloat16": 5e-3, "float16": 6e-4}


def in_some_order(step):
    """Each `step`-th case with rows in order or not, in turn. Others are exhaustive."""
    pairs = [
        pytest.param(
            *(case, in_order),
            marks=[] if case_idx % step == 0 and in_order == turn else exhaustive,
        )
        for case_idx, case in enumerate(CASES)
        for turn in [bool(case_idx // step % 2)]
        for in_order in (False, True)
    ]
    return pytest.mark.parametrize(("case", "in_order"), pairs, ids=str)


def check(outputs, arrays, paged, group):
    y, cache = expected(arrays, paged, group)
    error = np.linalg.norm(outputs["y"].astype(np.float64) - y) / np.linalg.norm(y)
    assert error < TOLERANCE[paged.dtype]
    np.testing.assert_allclose(
        outputs["cache"].astype(np.float32), cache.astype(np.float32), 2**-7, 1e-3
    )


def drawn(case, rng, rows=RAGGED):
    """A graph, inputs and, for rows in order or not, dims."""
    paged, group, kv_heads, lists, tasks = case
    graph = attention(1, paged=paged, group=group)
    arrays = draw_step(rng, paged, group, kv_heads, rows)
    return graph, arrays, partial(dims_of, arrays, tasks * lists, lists)


@in_some_order(1)
def test_rows_attend_to_all_positions_up_to_their_own(case, in_order, rng):
    graph, arrays, dims = drawn(case, rng)
    run = simulate(schedule_static(graph), [arrays], dims(in_order))
    check(run.outputs[0], arrays, *case[:2])


@in_some_order(2)
def test_the_cuda_bodies_agree(case, in_order, rng, kernels):
    graph, arrays, dims = drawn(case, rng)
    [outputs] = Emulator(graph, kernels=kernels).run([arrays], dims(in_order))
    check(outputs, arrays, *case[:2])


# .ci/run builds some with smaller heads.
@pytest.mark.parametrize("case", some_of(CASES[::-1], len(CASES)), ids=str)
def test_the_cuda_bodies_compile_without_spills(case):
    paged, group, *_ = case
    check_compiled(attention(1, paged=paged, group=group))


def test_in_order_a_row_has_the_same_bits_in_each_batch(rng, kernels):
    paged, long = CASES[0][0], [[1500], [1100]]
    _graph, arrays, _ = drawn((paged, 3, 1, 2, 1), rng, [*long, *RAGGED])
    emulator = Emulator(attention(1, paged=paged, group=3), kernels=kernels)
    results = []
    for num_rows, shares in ((len(arrays["request"]), 8), (3, 2)):
        rows = np.argsort(-arrays["position"])[:num_rows]
        batch = {n: arrays[n][rows] for n in ("qkv", "request", "position", "y")}
        dims = dims_of(arrays | batch, shares, 2, in_order=True)
        results += [emulator.run([arrays | batch], dims)[0]["y"][:3].view(np.int16)]
    np.testing.assert_array_equal(*results)


def test_a_row_without_positions_gets_zeros(rng):
    graph, arrays, dims = drawn(CASES[2], rng)
    arrays["position"][:2] = -1, 2**20  # of no request
    for run in (
        lambda: simulate(schedule_static(graph), [arrays], dims()).outputs[0],
        lambda: Emulator(graph).run([arrays], dims())[0],
    ):
        y = run()["y"]
        assert not y[:2].any() and y[2:].any(axis=1).all()
