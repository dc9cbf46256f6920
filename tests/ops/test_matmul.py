"""Matrix multiplication against NumPy, on the backend of the world."""

from __future__ import annotations

import pytest

from etc_dist import Matmul
from etc_dist.errors import ArgumentError, WorldError
from etc_dist.ops.tuning import tuning_of
from tests.conftest import first_always, some_of

pytestmark = pytest.mark.mpi(ranks=[1])

TOLERANCE = {"bfloat16": 2.1e-3, "float16": 2.7e-4}
"""One rounding, of the result; the sums are in fp32."""


@pytest.mark.parametrize("w_layout", ["nk", "kn"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("m", [5, 100, 300])
def test_random_values_come_close_to_fp32(m, dtype, w_layout, make, problem, rng):
    op = make(Matmul)
    p = problem(Matmul, (m, 296, 136), dtype, w_layout, rng)
    op(p.x, p.w, p.out)
    op.synchronize()
    assert p.error(p.out) < TOLERANCE[dtype]


SIZES = first_always([(70, 520, 200), (3, 8, 8), (300, 1304, 584)], 2)


# All tiles of the program, at sizes with several of them and tails of M, N and K, whole
# and with k of the last column divided.
@pytest.mark.parametrize("first", some_of(range(4), 4))
@pytest.mark.parametrize("w_layout", ["nk", "kn"])
@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_all_tiles_sum_small_integers_exactly(
    first, w_layout, m, n, k, make_each_tile, problem
):
    """Each fourth of them, at as many numbers of rows."""
    op, num_tiles = make_each_tile(w_layout, m, k)
    for number in range(first, num_tiles, 4):
        p = problem(Matmul, (m + number, n, k), w_layout=w_layout)
        op(p.x, p.w, p.out)
        op.synchronize()
        p.check_exact(p.out)


@pytest.mark.parametrize(("option", "parts"), [("run", [1, 2]), ("batch", [1])])
def test_the_first_call_allocates_memory_for_the_parts_of_others(
    option, parts, make, problem
):
    p, op = problem(Matmul, (8, 8, 8)), make(Matmul, deterministic=option)
    op(p.x, p.w, p.out)
    hints = op.program._capacity_hint({"m": 8, "n": 8, "k": 8, "parts": 1})
    assert [sizes["parts"] for sizes in hints] == parts


def test_show_gives_the_chosen_tiles_and_the_next_ones(make, problem, world):
    op = make(Matmul)
    with pytest.raises(WorldError, match="no program yet"):
        op.show(m=64, n=264, k=136)
    for sizes in ({"m": 64}, {"m": 0, "n": 264, "k": 136}, {"m": 8.5, "n": 8, "k": 8}):
        with pytest.raises(ArgumentError, match=r"the dims m, k, n, of at least 1\n"):
            op.show(**sizes)
    p = problem(Matmul, (64, 264, 136))
    op(p.x, p.w, p.out)
    shape = op.policy(64, 264, 136)
    text = op.show(m=64, n=264, k=136)
    assert f"tiles of {shape}: " in text and text.count("  next: ") == 3
    assert text == op.program.show(m=64, n=264, k=136)
    output = op.program.plan.show(132, m=64, n=5120, k=12800)
    assert output.endswith(
        "shape = 6: tiles of 64 x 40, swapped: 37.8 us predicted for "
        "64 x 5120 x 12800, bound by the memory's rate\n"
        "  128 tiles on 132 workers, 8 down first; stages of 64 KB and 256 of k\n"
        "  next: 32 x 80, swapped: 38.5 us\n"
        "  next: 64 x 48, swapped: 39.4 us\n"
        "  next: 64 x 128, swapped, split-K in 3 parts for 40 tile columns: 40.5 us\n"
        f"  tuning: {tuning_of(world).show()}\n"
        "column_groups = 5\nsplit_tile_columns = 0\nparts = 1\n"
    )
    dims = {"shape": 2, "column_groups": 2, "split_tile_columns": 0, "parts": 1}
    sizes = op.program.plan.show(132, m=64, n=5120, k=25600, **dims)
    assert "tiles of" not in sizes and "1280 units" in sizes
    p = problem(Matmul, (64, 264, 136), w_layout="kn")
    op(p.x, p.w, p.out)
    output = op.show(m=64, n=264, k=136)
    assert text != output == op.program.show(m=64, n=264, k=136)


@pytest.mark.parametrize("sizes", [(0, 8, 8), (8, 0, 8), (8, 8, 0)])
def test_tiles_are_chosen_for_sizes_from_one_on(sizes, make, problem):
    op = make(Matmul)
    with pytest.raises(ArgumentError, match="an integer from 1 on"):
        op.policy(*sizes)
