"""Fused collectives and the MLP on float8 weights with scales against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from etc_dist import (
    MLP,
    AllGatherMatmul,
    MatmulAllReduce,
    MatmulAllReduceNorm,
    MatmulReduceScatter,
)
from etc_dist.functions.scaled_weights import PER_BLOCK, PER_ROW, Scaling
from etc_dist.functions.weight_layouts import silu
from etc_dist.ir.tensor import numpy_dtype
from tests.graphs.scaled import draw_scaled

pytestmark = pytest.mark.mpi
exhaustive = pytest.mark.exhaustive

TOLERANCE = {"bfloat16": 4e-3, "float16": 5e-4}
"""Roundings of a rank's sums, and of the result."""
SCALINGS = [Scaling(PER_BLOCK, "float32"), Scaling(PER_ROW, "bfloat16")]
N, K = 264, 272


def gathered(array: Any) -> Any:
    from mpi4py import MPI

    return np.stack(MPI.COMM_WORLD.allgather(array))


def error(result: Any, expected: Any) -> float:
    return float(np.linalg.norm(result - expected) / np.linalg.norm(expected))


@pytest.fixture
def rank_rng(rng, world):
    """This rank's random numbers."""
    return rng.spawn(world.size)[world.rank]


COLLECTIVES: list[tuple[Any, dict[str, str]]] = [
    (AllGatherMatmul, {}),
    (MatmulReduceScatter, {}),
    (MatmulReduceScatter, {"partials": "float32"}),
    (MatmulAllReduce, {"deterministic": "batch"}),
]


# Without --all, each pair of a collective, a kind of scales and a number of rows.
@pytest.mark.parametrize(
    ("kind", "options", "scaling", "rows"),
    [
        pytest.param(*collective, scaling, rows, marks=exhaustive if is_odd else [])
        for kind_idx, collective in enumerate(COLLECTIVES)
        for scaling_idx, scaling in enumerate(SCALINGS)
        for rows_idx, rows in enumerate((4, 600))
        for is_odd in [(kind_idx + scaling_idx + rows_idx) % 2 == 1]
    ],
    ids=str,
)
def test_each_collective_multiplies_by_the_scaled_weights(
    kind, options, scaling, rows, make, world, arrays, rank_rng
):
    dtype, is_gather = "bfloat16", kind is AllGatherMatmul
    count = rows // world.size if is_gather else rows
    x = rank_rng.standard_normal((count, K)).astype(numpy_dtype(dtype))
    codes, scales, w = draw_scaled(rank_rng, N, K, scaling)
    op = make(kind, **options)
    y = arrays.get(op(arrays.put(x), arrays.put_scaled(codes, scales)))
    op.synchronize()
    if is_gather:
        expected = np.concatenate(gathered(x)).astype(np.float64) @ w.T
    else:
        expected = gathered(x.astype(np.float64) @ w.T).sum(0)
    if kind is MatmulReduceScatter:
        share = rows // world.size
        expected = expected[world.rank * share :][:share]
    assert error(y, expected) < TOLERANCE[dtype]


def test_the_norm_follows_the_sum_of_scaled_products(make, world, arrays, rank_rng):
    dtype, rows = numpy_dtype("bfloat16"), 6
    x = rank_rng.standard_normal((rows, K)).astype(dtype)
    codes, scales, w = draw_scaled(rank_rng, N, K, SCALINGS[0])
    residual, gain = np.ones((rows, N), dtype), np.ones(N, dtype)
    op = make(MatmulAllReduceNorm)
    operands = arrays.put(x), arrays.put_scaled(codes, scales)
    out, total = op(*operands, arrays.put(residual), arrays.put(gain))
    op.synchronize()
    expected = 1 + gathered(x.astype(np.float64) @ w.T).sum(0)
    assert error(arrays.get(total), expected) < TOLERANCE["bfloat16"]
    norm = expected / np.sqrt((expected**2).mean(1, keepdims=True))
    assert error(arrays.get(out), norm) < TOLERANCE["bfloat16"]


@pytest.mark.parametrize(
    ("scaling", "dtype"),
    [
        pytest.param(
            scaling, dtype, marks=[] if scaling_idx == dtype_idx else exhaustive
        )
        for scaling_idx, scaling in enumerate(SCALINGS)
        for dtype_idx, dtype in enumerate(TOLERANCE)
    ],
    ids=str,
)
def test_an_mlp_multiplies_by_the_scaled_weights(
    scaling, dtype, world, arrays, rank_rng
):
    hidden, inner = 272, 144
    shapes = (inner, hidden), (inner, hidden), (hidden, inner)
    # Without weights so large that activations overflow in float16.
    drawn = [draw_scaled(rank_rng, *shape, scaling, 2**-12) for shape in shapes]
    gate, up, down = (w for *_, w in drawn)
    weights = [arrays.put_scaled(codes, scales) for codes, scales, _ in drawn]
    with MLP(*weights, world=world) as mlp:
        for rows in (3, 300):
            x = rank_rng.standard_normal((rows, hidden)).astype(numpy_dtype(dtype))
            y = arrays.get(mlp(arrays.put(x)))
            mlp.synchronize()
            all_x = np.concatenate(gathered(x)).astype(np.float64)
            active = (silu(all_x @ gate.T) * (all_x @ up.T)).astype(x.dtype)
            total = gathered(active.astype(np.float64) @ down.T).sum(0)
            expected = total[world.rank * rows :][:rows]
            assert error(y, expected) < TOLERANCE[dtype]
