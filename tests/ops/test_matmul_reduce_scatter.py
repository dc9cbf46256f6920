"""GEMM + Reduce-Scatter against NumPy, on whatever backend the world has."""

from __future__ import annotations

import pytest

import etc_dist
from etc_dist import MatmulReduceScatter

pytestmark = pytest.mark.mpi

# Rows a rank, N and K: less than a tile, whole tiles, and tails of all three.
SHAPES = [(1, 8, 8), (24, 256, 64), (256, 264, 8), (40, 520, 72), (264, 96, 40)]
# NOTE: partial sums are rounded to the dtype as they travel, and the sum once more:
# twice half a unit in the last place, in the root mean square.
TOLERANCE = {"bfloat16": 3e-3, "float16": 4e-4}


@pytest.mark.parametrize("w_layout", ["nk", "kn"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_random_values_come_close_to_fp32(
    dtype, w_layout, world, make, problem, rng
):
    op = make(MatmulReduceScatter, dtype=dtype, w_layout=w_layout)
    shape = (48 * world.size, 296, 136)
    p = problem(MatmulReduceScatter, shape, dtype, w_layout, rng)
    out = op(p.x, p.w, p.out)
    op.synchronize()
    assert out is p.out
    assert p.error(out) < TOLERANCE[dtype]


@pytest.mark.parametrize("w_layout", ["nk", "kn"])
@pytest.mark.parametrize("rows, n, k", SHAPES)
def test_small_integers_are_summed_exactly(
    rows, n, k, w_layout, world, make, problem
):
    op = make(MatmulReduceScatter, w_layout=w_layout)
    p = problem(MatmulReduceScatter, (rows * world.size, n, k), w_layout=w_layout)
    op(p.x, p.w, p.out)
    op.synchronize()
    p.check_exact(p.out)


def test_one_program_serves_every_shape(world, make, problem, monkeypatch):
    generated = []
    generate = etc_dist.compiler.generate

    def counted(*arguments, **options):
        generated.append(arguments)
        return generate(*arguments, **options)

    monkeypatch.setattr("etc_dist.compiler.generate", counted)
    op = make(MatmulReduceScatter)
    # Up and down again: the buffers grow, and stay right for what is smaller.
    for rows, n, k in [*SHAPES, *reversed(SHAPES)]:
        p = problem(MatmulReduceScatter, (rows * world.size, n, k))
        op(p.x, p.w, p.out)
        op.synchronize()
        p.check_exact(p.out)
    assert len(generated) == 1


def test_repeated_calls_give_the_same_bits(world, make, problem, arrays, rng):
    op = make(MatmulReduceScatter)
    p = problem(MatmulReduceScatter, (72 * world.size, 264, 200), rng=rng)
    first = arrays.get(op(p.x, p.w, p.out)).tobytes()
    for _ in range(5):
        again = arrays.poisoned(p.expected.shape, "bfloat16")
        op(p.x, p.w, again)
        op.synchronize()
        assert arrays.get(again).tobytes() == first


def test_an_output_is_made_where_none_is_given(world, make, problem):
    op = make(MatmulReduceScatter, dtype="float16")
    p = problem(MatmulReduceScatter, (16 * world.size, 24, 32), "float16")
    out = op(p.x, p.w)
    op.synchronize()
    assert type(out) is type(p.x)
    assert (out.shape, out.dtype) == ((16, 24), p.x.dtype)
    p.check_exact(out)


def test_calls_follow_each_other_without_synchronising(world, make, problem):
    op = make(MatmulReduceScatter)
    shapes = [(8, 264, 16), (40, 16, 24), (8, 264, 16)] * 3
    calls = [problem(MatmulReduceScatter, (r * world.size, n, k)) for r, n, k in shapes]
    for p in calls:
        op(p.x, p.w, p.out)
    op.synchronize()
    for p in calls:
        p.check_exact(p.out)


def test_two_operations_take_turns(world, make, problem):
    ops = [make(MatmulReduceScatter, w_layout=layout) for layout in ("nk", "kn")]
    for _ in range(3):
        for op in ops:
            p = problem(MatmulReduceScatter, (8 * world.size, 16, 24), w_layout=op.w_layout)
            op(p.x, p.w, p.out)
            op.synchronize()
            p.check_exact(p.out)


@pytest.mark.parametrize("w_layout", ["nk", "kn"])
def test_the_function_keeps_one_operation(w_layout, world, problem, monkeypatch):
    shapes = [(8 * world.size, 16, 24), (16 * world.size, 8, 40)]
    for number, shape in enumerate(shapes):
        p = problem(MatmulReduceScatter, shape, w_layout=w_layout)
        if number:
            monkeypatch.setattr("etc_dist.compiler.generate", None)
        out = etc_dist.matmul_reduce_scatter(p.x, p.w, w_layout=w_layout, out=p.out)
        world.barrier()
        assert out is p.out
        p.check_exact(out)
