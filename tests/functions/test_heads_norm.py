"""RMSNorm over the heads of all ranks: both bodies against fp64."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.functions.heads_norm import norm_of_ranks, push_squares
from etc_dist.ir import GraphFunction
from tests.functions.both import both_on_ranks
from tests.functions.compiled import check_compiled
from tests.functions.test_rms_norm import EPS, expected
from tests.graphs.calls import Task, calls
from tests.layers.reference import draw

ROWS, COLUMNS = 2, (264, 2120)


def norms(world_size: int, *, dtype: str) -> GraphFunction:
    """qk [rows, columns], which is updated: the norms of two parts of each row."""
    parts = f"""
        state qk [rows, {sum(COLUMNS)}] {dtype}
        input gains [{sum(COLUMNS)}] {dtype}
        symmetric squares [2, rows, ranks] float32
        cross-rank events arrived [1] expects rows * ranks
    """
    of_row = [f"span(0, {COLUMNS[0]})", f"span({COLUMNS[0]}, {COLUMNS[1]})"]
    peers = [f"(rank + {n}) % ranks" for n in range(world_size)]
    push = Task(
        push_squares(dtype, world_size),
        [f"qk[span(r, 1), {part}]" for part in of_row],
        [f"squares.on({peer})[:, span(r, 1), rank]" for peer in peers],
        grid="r: rows",
        notifies=[f"arrived.on({peer})[0]" for peer in peers],
    )
    norms = [
        Task(
            norm_of_ranks(dtype, EPS),
            [f"qk[span(r, 1), {part}]", f"squares[{norm_idx}, span(r, 1), :]",
             f"gains[{part}]"],
            [f"qk[span(r, 1), {part}]"],
            name=f"norm_{norm_idx}",
            grid="r: rows",
            waits=["arrived[0]"],
        )
        for norm_idx, part in enumerate(of_row)
    ]  # fmt: skip
    return calls(world_size, tasks=[push, *norms], dims="rows", parts=parts)


@pytest.mark.parametrize(("ranks", "dtype"), [(2, "float16"), (3, "bfloat16")])
def test_rows_of_all_ranks_have_one_norm(ranks, dtype, rng):
    arrays = [
        {
            "qk": draw(rng, (ROWS, sum(COLUMNS)), dtype),
            "gains": draw(rng, (sum(COLUMNS),), dtype),
        }
        for _ in range(ranks)
    ]
    graph, dims = norms(ranks, dtype=dtype), {"rows": ROWS}
    references = []
    for part in (slice(COLUMNS[0]), slice(COLUMNS[0], None)):
        whole = (
            np.concatenate([rank_arrays[n][..., part] for rank_arrays in arrays], -1)
            for n in ("qk", "gains")
        )
        references.append(np.split(expected(*whole), ranks, axis=1))
    for results in both_on_ranks(graph, arrays, dims):
        for rank_arrays, q, k in zip(results, *references, strict=True):
            of = np.concatenate([q, k], axis=1)
            error = np.abs(rank_arrays["qk"].astype(np.float64) - of)
            assert np.all(error <= 2**-8 * np.abs(of) + 1e-6)


def test_the_cuda_bodies_compile_without_spills():
    check_compiled(norms(8, dtype="bfloat16"))
