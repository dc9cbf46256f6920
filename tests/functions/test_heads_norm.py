"""RMSNorm over the heads of all ranks: both bodies against fp64."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.functions.heads_norm import norm_of_ranks, push_squares
from etc_dist.ir import Graph, graph_function, span
from tests.functions.both import both_on_ranks
from tests.functions.compiled import check_compiled
from tests.functions.test_rms_norm import EPS, expected
from tests.layers.reference import draw

ROWS, COLUMNS = 2, (264, 2120)


@graph_function
def norms(g: Graph, *, dtype: str) -> None:
    """qk [rows, columns], which is updated: the norms of two parts of each row."""
    rows, (q_columns, k_columns) = g.dims("rows"), COLUMNS
    qk = g.state("qk", (rows, sum(COLUMNS)), dtype)
    gains = g.input("gains", (sum(COLUMNS),), dtype)
    squares = g.symmetric("squares", (2, rows, g.world_size), "float32")
    arrived = g.events("arrived", (1,), expects=rows * g.world_size, cross_rank=True)
    ranks = range(g.world_size)
    peers = [(g.rank + n) % g.world_size for n in ranks]
    parts = span(0, q_columns), span(q_columns, k_columns)
    (r,) = grid = g.grid(r=rows)
    own = span(r, 1)
    g.call(
        push_squares(dtype, g.world_size),
        grid,
        reads=[qk[own, part] for part in parts],
        writes=[squares.on(peer)[:, own, g.rank] for peer in peers],
        notifies=[arrived.on(peer)[0] for peer in peers],
    )
    for number, part in enumerate(parts):
        g.call(
            norm_of_ranks(dtype, EPS),
            grid,
            name=f"norm_{number}",
            reads=[qk[own, part], squares[number, own, :], gains[part]],
            writes=[qk[own, part]],
            waits=[arrived[0]],
        )


@pytest.mark.parametrize(("ranks", "dtype"), [(2, "float16"), (3, "bfloat16")])
def test_rows_of_all_ranks_have_one_norm(ranks, dtype, rng):
    given = [
        {
            "qk": draw(rng, (ROWS, sum(COLUMNS)), dtype),
            "gains": draw(rng, (sum(COLUMNS),), dtype),
        }
        for _ in range(ranks)
    ]
    graph, dims = norms(ranks, dtype=dtype), {"rows": ROWS}
    wanted = []
    for part in (slice(COLUMNS[0]), slice(COLUMNS[0], None)):
        whole = (
            np.concatenate([one[n][..., part] for one in given], -1)
            for n in ("qk", "gains")
        )
        wanted.append(np.split(expected(*whole), ranks, axis=1))
    for found in both_on_ranks(graph, given, dims):
        for one, q, k in zip(found, *wanted, strict=True):
            of = np.concatenate([q, k], axis=1)
            error = np.abs(one["qk"].astype(np.float64) - of)
            assert np.all(error <= 2**-8 * np.abs(of) + 1e-6)


def test_the_cuda_bodies_compile_without_spills():
    check_compiled(norms(8, dtype="bfloat16"))
