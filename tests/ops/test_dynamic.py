"""Operations under a dynamic schedule: the bits of the static one, on real ranks."""

from __future__ import annotations

import pytest

from etc_dist import AllGatherMatmul, MatmulReduceScatter

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.parametrize("kind", [MatmulReduceScatter, AllGatherMatmul]),
]


@pytest.mark.parametrize("w_layout", ["nk", "kn"])
def test_results_are_the_same_bits(kind, w_layout, world, make, problem, arrays, rng):
    p = problem(kind, (72 * world.size, 264, 200), w_layout=w_layout, rng=rng)
    bits = set()
    for schedule in ("static", "dynamic", "dynamic"):
        op = make(kind, schedule=schedule)
        for _ in range(3):
            out = arrays.poisoned(p.expected.shape, "bfloat16")
            op(p.x, p.w, out)
            op.synchronize()
            bits.add(arrays.get(out).tobytes())
        assert op.program.plan.schedule == schedule
    assert len(bits) == 1
    assert p.error(out) < 3e-3


def test_one_program_serves_every_shape(kind, world, make, problem):
    op = make(kind, schedule="dynamic")
    shapes = [(1, 8, 8), (24, 256, 64), (264, 520, 40), (40, 16, 72)]
    for rows, n, k in [*shapes, *reversed(shapes)]:
        p = problem(kind, (rows * world.size, n, k))
        op(p.x, p.w, p.out)
        op.synchronize()
        p.check_exact(p.out)


def test_calls_follow_each_other_without_synchronising(kind, world, make, problem):
    op = make(kind, schedule="dynamic")
    shapes = [(8, 264, 16), (40, 16, 24), (300, 264, 16)] * 3
    calls = [problem(kind, (rows * world.size, n, k)) for rows, n, k in shapes]
    for p in calls:
        op(p.x, p.w, p.out)
    op.synchronize()
    for p in calls:
        p.check_exact(p.out)


def test_auto_is_static_without_loads(kind, make, problem, world):
    op, p = make(kind, schedule="auto"), problem(kind, (world.size, 8, 8))
    op(p.x, p.w, p.out)
    assert op.program.plan.schedule == "static"
