"""Both fused collectives against NumPy, on the backend of the world: results, one
program, its calls and outputs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

import etc_dist
from etc_dist import AllGatherMatmul, MatmulReduceScatter
from etc_dist.errors import WorldError
from tests.conftest import first_always

FUNCTIONS = {
    MatmulReduceScatter: etc_dist.matmul_reduce_scatter,
    AllGatherMatmul: etc_dist.all_gather_matmul,
}
pytestmark = [pytest.mark.mpi, pytest.mark.parametrize("kind", FUNCTIONS)]
schedules = pytest.mark.parametrize("schedule", ["static", "dynamic"])
# NOTE: partial sums are rounded before sending, and their sum once more: an error of
# one rounding times the root of two. The sums of a gather are in fp32.
TOLERANCE = {MatmulReduceScatter: 3e-3, AllGatherMatmul: 2.1e-3}


@pytest.mark.mpi(ranks=[1, 2])
@pytest.mark.parametrize(
    ("dtype", "factor", "w_layout"),
    first_always(
        [
            ("bfloat16", 1, "nk"),
            ("float16", 8, "kn"),
            ("bfloat16", 1, "kn"),
            ("float16", 8, "nk"),
        ],
        2,
    ),
)
def test_random_values_come_close_to_fp32(
    kind, dtype, factor, w_layout, world, make, problem, rng
):
    op = make(kind)
    p = problem(kind, (48 * world.size, 296, 136), dtype, w_layout, rng)
    op(p.x, p.w, p.out)
    op.synchronize()
    assert p.error(p.out) < TOLERANCE[kind] / factor


# Less than a tile, whole tiles, and tails of rows a rank, N and K. One has rows that
# are longer than what one push takes.
SHAPES = [(1, 8, 8), (24, 256, 64), (256, 264, 8), (3, 16, 16392)]
SHAPES += [(40, 520, 72), (264, 96, 40), (800, 16, 24)]


@pytest.mark.parametrize(
    ("schedule", "w_layout"),
    first_always(
        [("static", "nk"), ("dynamic", "kn"), ("static", "kn"), ("dynamic", "nk")], 2
    ),
)
def test_one_program_serves_every_shape(
    kind, schedule, w_layout, world, make, problem, compiled
):
    op = make(kind, schedule=schedule)
    # Up and down again: buffers grow, and stay valid for smaller shapes.
    for rows, n, k in [*SHAPES, *SHAPES[2::-1]]:
        p = problem(kind, (rows * world.size, n, k), w_layout=w_layout)
        op(p.x, p.w, p.out)
        op.synchronize()
        p.check_exact(p.out)
    assert len(compiled) == 2  # one for whole blocks of rows, one for fewer


@schedules
def test_calls_follow_each_other_without_synchronising(
    kind, schedule, world, make, problem
):
    op = make(kind, schedule=schedule)
    shapes = [(8, 264, 16), (40, 16, 24), (300, 16, 16)] * 2
    calls = [problem(kind, (rows * world.size, n, k)) for rows, n, k in shapes]
    for p in calls:
        op(p.x, p.w, p.out)
    op.synchronize()
    for p in calls:
        p.check_exact(p.out)


@pytest.mark.parametrize("w_layout", first_always([("nk",), ("kn",)], 1))
def test_both_schedules_and_repeats_give_the_same_bits(
    kind, w_layout, world, make, problem, arrays, rng
):
    p = problem(kind, (72 * world.size, 264, 200), w_layout=w_layout, rng=rng)
    bits = set()
    for schedule in ("static", "dynamic"):
        op = make(kind, schedule=schedule)
        for _ in range(3):
            out = arrays.poisoned(p.expected.shape, "bfloat16")
            op(p.x, p.w, out)
            op.synchronize()
            bits.add(arrays.get(out).tobytes())
        assert op.program.plan.schedule == schedule
    assert len(bits) == 1
    assert p.error(out) < 3e-3


def test_a_call_reads_what_its_arrays_hold_then(kind, world, make, problem):
    op = make(kind)
    shape = (8 * world.size, 16, 24)
    p, source = problem(kind, shape), problem(kind, shape)
    for factor in (1, 2):
        p.x[...] = factor * source.x
        p.expected = factor * source.expected
        op(p.x, p.w, p.out)
        op.synchronize()
        p.check_exact(p.out)


def test_an_output_is_given_back_or_made(kind, world, make, problem):
    op = make(kind)
    p = problem(kind, (16 * world.size, 24, 32), "float16")
    assert op(p.x, p.w, p.out) is p.out
    y = op(p.x, p.w)
    op.synchronize()
    assert (type(y), y.dtype) == (type(p.x), p.x.dtype)
    assert y.shape == p.expected.shape
    p.check_exact(p.out)
    p.check_exact(y)


def test_two_operations_take_turns(kind, world, make, problem):
    ops = [make(kind) for _ in range(2)]
    for op in ops * 3:
        p = problem(kind, (8 * world.size, 16, 24))
        op(p.x, p.w, p.out)
        op.synchronize()
        p.check_exact(p.out)


def test_a_new_shape_may_come_from_a_new_thread(kind, world, make, problem):
    op = make(kind)
    for rows, run in ((16, lambda call: call()), (8, in_thread)):
        p = problem(kind, (rows * world.size, 16, 24))
        run(lambda p=p: op(p.x, p.w, p.out))
        op.synchronize()
        p.check_exact(p.out)


def in_thread(call):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_function_keeps_one_operation(
    kind, dtype, world, problem, compiled, monkeypatch
):
    function = FUNCTIONS[kind]
    monkeypatch.setattr(world, "kept", {})
    for rows, n, k in [(8, 16, 24), (16, 8, 40), (8, 16, 24)]:
        p = problem(kind, (rows * world.size, n, k), dtype)
        assert function(p.x, p.w, out=p.out) is p.out
        p.check_exact(p.out)
        p.check_exact(function(p.x, p.w))
    assert len(compiled) == 1
    (operation,) = (thing for thing in world.kept.values() if isinstance(thing, kind))
    operation.close()


def test_one_operation_takes_every_dtype_and_layout(
    kind, world, make, problem, compiled
):
    with make(kind) as op:
        for _ in range(2):
            for dtype in ("bfloat16", "float16"):
                for layout in ("nk", "kn"):
                    p = problem(kind, (8 * world.size, 16, 24), dtype, layout)
                    op(p.x, p.w, p.out)
                    op.synchronize()
                    p.check_exact(p.out)
        assert len(compiled) == 4
    with pytest.raises(WorldError, match="the program is closed"):
        op.synchronize()
