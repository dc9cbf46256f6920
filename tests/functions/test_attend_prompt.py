"""Attention of blocks of rows: both bodies against a plain reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from etc_dist.emulate import Emulator
from etc_dist.functions.append_kv import PagedCache
from etc_dist.functions.attend_prompt import heads_of_block, rows_of_block
from etc_dist.runtime.cpu import simulate
from etc_dist.schedule import schedule_static
from tests.conftest import some_of
from tests.functions.compiled import check_compiled
from tests.functions.test_attend import OF_HUNYUAN, check
from tests.graphs.paged import EPS, attention, dims_of, draw_step

OF_GEMMA = PagedCache(64, 32, norm_eps=EPS, has_span=True, tables=2, gain_offset=1)
OF_GEMMA = replace(OF_GEMMA, score_cap=0.5)
CASES = [  # cache, group, KV heads
    (OF_GEMMA, 5, 2),
    (PagedCache(128, 64, "float16", EPS, has_bias=True), 16, 1),
    (PagedCache(64, 128, "bfloat16", has_bias=True, has_sinks=True), 7, 1),
    (PagedCache(128, 16, "bfloat16"), 4, 2),
    (PagedCache(64, 16, "float16"), 1, 2),
    (OF_HUNYUAN, 8, 1),
    (PagedCache(64, 64, "bfloat16", has_span=True, has_sinks=True), 12, 1),
]
ROWS = [[200], [5, 6], range(0, 23), range(130, 195), range(195, 211)]
"""Positions of the rows of each request: the last three ones are in blocks."""
SOME_CASES = pytest.mark.parametrize("case", some_of(CASES, 3), ids=str)


def drawn(case, rng):
    """A graph, inputs and dims."""
    paged, group, kv_heads = case
    arrays = draw_step(rng, paged, group, kv_heads, ROWS, in_order=True)
    dims = dims_of(arrays, 4, 2, blocks=20)
    return attention(1, paged=paged, group=group), arrays, dims


@SOME_CASES
def test_rows_attend_to_all_positions_up_to_their_own(case, rng):
    graph, arrays, dims = drawn(case, rng)
    run = simulate(schedule_static(graph), [arrays], dims)
    check(run.outputs[0], arrays, *case[:2])


@SOME_CASES
def test_the_cuda_bodies_agree(case, rng, kernels):
    graph, arrays, dims = drawn(case, rng)
    [outputs] = Emulator(graph, kernels=kernels).run([arrays], dims)
    check(outputs, arrays, *case[:2])


@pytest.mark.parametrize("group", [1, 4, 5, 8, 9, 12, 16])
def test_the_heads_of_a_group_are_divided_equally(group):
    heads, num_tiles = heads_of_block(group), -(-group // 8)
    assert heads <= 8 and heads * num_tiles < group + num_tiles
    assert 120 <= heads * rows_of_block(group) <= 128


def test_nans_of_a_request_stay_in_its_rows(rng):
    """Also those of values that follow the row's own."""
    graph, arrays, dims = drawn((PagedCache(64, 16), 2, 1), rng)
    width = arrays["qkv"].shape[1]
    last = np.flatnonzero(arrays["request"] == 3)[-1]
    arrays["qkv"][last, width - 64 :] = np.nan
    is_other = arrays["request"] != 3
    for run in (
        lambda: simulate(schedule_static(graph), [arrays], dims).outputs[0],
        lambda: Emulator(graph).run([arrays], dims)[0],
    ):
        is_finite = np.isfinite(run()["y"].astype(np.float32)).all(axis=1)
        assert is_finite[is_other].all() and not is_finite[last]


@pytest.mark.parametrize("case", CASES[1:3], ids=str)
def test_the_cuda_bodies_compile_without_spills(case):
    paged, group, _ = case
    check_compiled(attention(1, paged=paged, group=group))
