"""Matrix multiplication in slices of k, on the backend of the world."""

from __future__ import annotations

import pytest

from etc_dist import Matmul
from etc_dist.ops import sliced_matmul
from etc_dist.ops.matmul_policy import SLICED, is_sliced
from etc_dist.ops.tuning import default_tuning
from etc_dist.schedule.plan import Choice

FEW_TILES = 128, 5120, 25600
WORKERS = 132


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (FEW_TILES, True),
        ((256, 5120, 25600), True),
        ((8, 5120, 25600), False),
        ((128, 5120, 3200), False),
        ((2048, 5120, 25600), False),
        ((4096, 4096, 4096), False),
    ],
)
def test_few_tiles_and_a_large_k_are_sliced(sizes, expected):
    assert is_sliced(*sizes, WORKERS, default_tuning()) is expected


@pytest.fixture
def always(monkeypatch):
    """Every call is served by slices."""
    monkeypatch.setattr(sliced_matmul, "is_sliced", lambda *sizes: True)


# Slices of unequal length, one of them empty, and tails of M, N and K.
@pytest.mark.mpi
@pytest.mark.parametrize("shape", range(len(SLICED)), ids=lambda n: str(SLICED[n]))
def test_slices_sum_small_integers_exactly(shape, make, problem, always, monkeypatch):
    chosen = [Choice("shape", shape, list)]
    monkeypatch.setattr(sliced_matmul, "explained", lambda *_: chosen[0])
    op = make(Matmul)
    for size in (70, 520, 456), (3, 8, 8), (300, 264, 136):
        p = problem(Matmul, size)
        op(p.x, p.w, p.out)
        op.synchronize()
        assert op.program.plan.graph.name == "sliced_matmul_graph"
        assert op.policy(*size) == str(SLICED[shape])
        p.check_exact(p.out)


@pytest.mark.mpi
def test_random_values_have_the_same_bits_in_every_run(
    make, problem, arrays, always, rng
):
    op = make(Matmul)
    p = problem(Matmul, (100, 296, 1160), "float16", "nk", rng)
    results = set()
    for _ in range(3):
        op(p.x, p.w, p.out)
        op.synchronize()
        results.add(arrays.get(p.out).tobytes())
    assert len(results) == 1
    assert p.error(p.out) < 2.7e-4


@pytest.mark.mpi
def test_rows_that_keep_their_bits_are_not_sliced(make, problem, always):
    op = make(Matmul, deterministic="batch")
    p = problem(Matmul, (8, 72, 136))
    op(p.x, p.w, p.out)
    op.synchronize()
    assert op.program.plan.graph.name == "matmul_graph"
    p.check_exact(p.out)
