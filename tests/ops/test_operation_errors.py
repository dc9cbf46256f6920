"""Calls that do not fit: refused on every rank; the next call works."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import etc_dist
from etc_dist import AllGatherMatmul, Matmul, MatmulReduceScatter
from etc_dist.errors import (
    ArgumentError,
    ScheduleError,
    SymmetricMemoryError,
    WaitTimeoutError,
    WorldError,
)
from etc_dist.ops.operation import Operation
from tests.ops.arrays import ones
from tests.ops.rank_errors import of_rank_zero

pytestmark = pytest.mark.mpi(ranks=[1])

FUNCTIONS = {
    MatmulReduceScatter: etc_dist.matmul_reduce_scatter,
    AllGatherMatmul: etc_dist.all_gather_matmul,
    Matmul: etc_dist.matmul,
}

Call = tuple[Any, Any, Any]


@pytest.fixture(scope="module", params=FUNCTIONS, ids=lambda kind: kind.__name__)
def kind(request) -> type[Operation]:
    return request.param


@pytest.fixture(scope="module")
def op(kind, world) -> Iterator[Operation]:
    """One operation for all tests, since each leaves it usable."""
    with kind(world=world) as op:
        yield op


@pytest.fixture
def good(kind, problem, world) -> Callable[[], Any]:
    """Makes arrays that fit: x [8 a rank, 24], w [16, 24]."""
    return lambda: problem(kind, (8 * world.size, 16, 24))


@contextmanager
def refusal(error: type[Exception], words: str) -> Iterator[None]:
    """The block must raise `error`, in four parts and with these words."""
    with pytest.raises(error) as caught:
        yield
    text = str(caught.value)
    assert re.search(words, text) or re.search(words, of_rank_zero(text))
    parts = ("what", "where", "wanted", "got", "fix")
    assert [part for part in parts if not getattr(caught.value, part)] == []


@pytest.fixture
def expect_refusal(op, good, monkeypatch) -> Callable[..., None]:
    """Makes a call that must raise on this rank and launch nothing; then a good one."""

    def expect_refusal(
        call: Call, words: str, error: type[Exception] = ArgumentError
    ) -> None:
        works(op, good())
        launched: list[object] = []
        with monkeypatch.context() as patch:
            patch.setattr(op.program._executor, "launch", launched.append)
            with refusal(error, words):
                op(*call)
        assert launched == []
        works(op, good())

    return expect_refusal


def works(op: Operation, p: Any) -> None:
    op(p.x, p.w, p.out)
    op.synchronize()
    p.check_exact(p.out)


def wrong(what: str, p: Any, put: Callable[..., Any]) -> Call:
    """The arrays of `p` with one thing wrong."""
    (rows, k), (n, _) = p.x.shape, p.w.shape
    shape = p.out.shape

    def zeros(*extents: int, dtype: str = "bfloat16") -> Any:
        return put(np.zeros(extents), dtype)

    memory = zeros(rows * k + shape[0] * n)
    with_w = zeros(n * k + shape[0] * n)
    return {
        "K differs": (p.x, zeros(n, k + 8), None),
        "x has one axis": (p.x[0], p.w, None),
        "w has one axis": (p.x, p.w[0], None),
        "w has three axes": (p.x, p.w[None], None),
        "x is float16": (zeros(rows, k, dtype="float16"), p.w, None),
        "w is float16": (p.x, zeros(n, k, dtype="float16"), None),
        "out is float16": (p.x, p.w, zeros(*shape, dtype="float16")),
        "x is float32": (zeros(rows, k, dtype="float32"), p.w, None),
        "x is not contiguous": (zeros(rows, 2 * k)[:, ::2], p.w, None),
        "w has other strides": (p.x, zeros(k, 2 * n).T[::2], None),
        "x is transposed": (zeros(k, rows).T, p.w, None),
        "out has another row": (p.x, p.w, zeros(shape[0] + 1, n)),
        "out has one axis": (p.x, p.w, zeros(shape[0] * n)),
        "out is not contiguous": (p.x, p.w, zeros(n, shape[0]).T),
        "w is empty": (p.x, zeros(0, k), None),
        "out overlaps x": (
            memory[: rows * k].reshape(rows, k),
            p.w,
            memory[rows * k - 8 : -8].reshape(shape),
        ),
        "out overlaps w": (
            p.x,
            with_w[: n * k].reshape(n, k),
            with_w[n * k - 8 : -8].reshape(shape),
        ),
    }[what]


# ------------------------------------------------------------------ one bad argument


WORDS = {
    "K differs": r"wanted: w \[.*16, .*24\] [^$]*got: +w \[16, 32\]",
    "x has one axis": r"wanted: x \[[^$]*got: +x \[24\] bfloat16 on",
    "w has one axis": r"got: .*; w \[24\] bfloat16 on",
    "w has three axes": r"got: .*; w \[1, 16, 24\] bfloat16 on",
    "x is float16": r"got: +w .* bfloat16 on",
    "w is float16": r"got: +w \[16, 24\] float16 on",
    "out is float16": r"got: +out .* float16 on",
    "x is float32": r"wanted: x of bfloat16 or float16\n.* float32 on",
    "x is not contiguous": r"wanted: x \[.*24\] [^$]*got: +x \[\d+, 24\] .*, not cont",
    "w has other strides": r"wanted: w .* contiguous or transposed[^$]*, not contig",
    "x is transposed": r"wanted: x .*, contiguous, [^$]*got: +x .*, transposed",
    "out has another row": r"wanted: out \[.*, .*16\] .*\n.*got: +out \[\d+, 16\]",
    "out has one axis": r"got: +out \[\d+\] bfloat16",
    "out is not contiguous": r"got: +out .*, transposed",
    "w is empty": r"wanted: w without an axis of length 0",
    "out overlaps x": r"wanted: out apart from x\n",
    "out overlaps w": r"wanted: out apart from w\n",
}


@pytest.mark.parametrize("what", WORDS)
def test_what_does_not_fit_is_refused(what, expect_refusal, good, arrays):
    expect_refusal(wrong(what, good(), arrays.put_as), WORDS[what])


@pytest.mark.mpi(ranks=[2])
@pytest.mark.parametrize("bad_rank", [0, 1])
@pytest.mark.parametrize("what", ["K differs", "w is float16", "out has another row"])
def test_what_does_not_fit_on_one_rank_is_refused_on_all(
    what, bad_rank, expect_refusal, op, good, arrays, world
):
    p = good()
    works(op, p)  # the good ranks' call is one that the operation remembers
    call = (p.x, p.w, p.out)
    if world.rank == bad_rank:
        call = wrong(what, p, arrays.put_as)
    expect_refusal(call, rf"where: +rank {bad_rank}: ")


@pytest.mark.mpi(ranks=[2])
def test_a_rank_with_other_shapes_than_its_peers_is_named(
    expect_refusal, arrays, world
):
    rows = 16 if world.rank == 1 else 8
    x = arrays.put_as(np.zeros((rows * world.size, 24)), "bfloat16")
    w = arrays.put_as(np.zeros((16, 24)), "bfloat16")
    expect_refusal(
        (x, w, None), r"rank 1: \w+\((rows|m)=\d+, n=16, k=24(, shape=\d+.*)?\)"
    )


@pytest.mark.mpi(ranks=[2])
def test_first_calls_of_several_programs_are_refused(kind, make, arrays, world):
    rows = 256 if world.rank == 1 else 8
    x = arrays.put_as(np.zeros((rows * world.size, 24)), "bfloat16")
    w = arrays.put_as(np.zeros((16, 24)), "bfloat16")
    with refusal(ArgumentError, r"rank 1: \w+\(first call, (rows|m)=\d+, k=24, n=16,"):
        make(kind)(x, w)


@pytest.mark.mpi(ranks=[2])
def test_ranks_that_call_different_operations_are_refused(make, arrays, world):
    ops = [make(kind) for kind in FUNCTIONS]
    x = arrays.put_as(np.zeros((8 * world.size, 24)), "bfloat16")
    w = arrays.put_as(np.zeros((16, 24)), "bfloat16")
    with refusal(ArgumentError, r"rank 0: MatmulReduceScatter\(first call"):
        ops[min(world.rank, 1)](x, w)
    for op in ops:
        out = op(x, w)
        op.synchronize()
        assert not arrays.get(out).any()


@pytest.mark.mpi(ranks=[2])
def test_rows_that_the_ranks_cannot_share_are_refused(make, arrays, world):
    op = make(MatmulReduceScatter)
    m = 8 * world.size + 1
    x, w = (arrays.put_as(np.zeros((rows, 8)), "bfloat16") for rows in (m, 8))
    with refusal(ArgumentError, rf"x \[{world.size} \* rows, k\][^$]*x \[{m}, 8\]"):
        op(x, w)


# name: x, words of the error
TYPES = {"list": ([[0.0] * 24], "x expects a NumPy"), "str": ("x", "got str")}


@pytest.mark.parametrize("what", TYPES)
def test_an_object_that_is_not_an_array_is_a_type_error(what, expect_refusal, good):
    x, words = TYPES[what]
    p = good()
    expect_refusal((x, p.w, p.out), words, TypeError)


@pytest.mark.mpi(ranks=[2])
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_a_type_error_of_one_rank_is_raised_on_all(bad_rank, kind, good, world):
    p = good()
    x = "x" if world.rank == bad_rank else p.x
    for call in (kind(world=world), FUNCTIONS[kind]):
        for _ in range(2):  # a first call as well as a repeated one
            with refusal(TypeError, rf"where: +rank {bad_rank}: [^$]*got: .*got str"):
                call(x, p.w)
            call(p.x, p.w, out=p.out)
        p.check_exact(p.out)


# name: the arrays of the first call on rank 1
FIRST_CALLS = {
    "dtype": lambda p, put: (p.x, put(np.zeros(p.w.shape), "float16")),
    "all dtypes": lambda p, put: [
        put(np.zeros(a.shape), "float16") for a in (p.x, p.w)
    ],
    "layout": lambda p, put: (p.x, put(np.zeros(p.w.shape[::-1]), "bfloat16").T),
}


@pytest.mark.mpi(ranks=[2])
@pytest.mark.parametrize("what", FIRST_CALLS)
def test_ranks_with_other_first_calls_are_refused_before_compiling(
    what, kind, make, good, arrays, world, compiled
):
    op, p = make(kind), good()
    x, w = FIRST_CALLS[what](p, arrays.put_as) if world.rank == 1 else (p.x, p.w)
    with refusal(ArgumentError, "rank 1: "):
        op(x, w)
    assert compiled == []
    works(op, p)
    with refusal(ArgumentError, "rank 1: "):
        op(x, w)
    works(op, p)


@pytest.mark.gpu
def test_arrays_in_host_memory_are_refused_on_gpus(expect_refusal, good):
    p = good()
    expect_refusal(
        (p.x.get(), p.w, p.out), r"wanted: x .* on cuda:\d[^$]*got: +x .* on cpu"
    )


@pytest.mark.gpu(devices=2)
@pytest.mark.mpi(ranks=[2])
def test_arrays_of_another_gpu_are_refused(expect_refusal, good):
    import cupy

    p = good()
    device = (p.x.device.id + 1) % cupy.cuda.runtime.getDeviceCount()
    with cupy.cuda.Device(device):
        w = cupy.asarray(p.w)
    # The ranks' errors differ: one has that of rank 0, which has the first GPU.
    expect_refusal(
        (p.x, w, p.out), rf"wanted: w [^$]*got: [^$]*w .* on cuda:[1{device}]"
    )


# --------------------------------------------------------------------- the operation


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"schedule": "eager"}, ScheduleError, r"wanted: 'static'.*\n.*'eager'"),
        ({"trace": "yes"}, TypeError, "trace expects a bool or None, got str"),
        ({"world": 3}, TypeError, "world expects a World or None, got int"),
    ],
    ids=["schedule", "trace type", "world type"],
)
def test_an_unknown_option_is_refused(options, error, words, kind, world):
    with refusal(error, words):
        kind(**{"world": world, **options})


def test_a_closed_operation_is_named_in_the_error(kind, make, good):
    op, p = make(kind), good()
    works(op, p)
    op.close()
    op.close()
    for use in (lambda: op(p.x, p.w, p.out), op.synchronize):
        with refusal(WorldError, "the program is closed"):
            use()


@pytest.mark.mpi(ranks=[2])
@pytest.mark.parametrize("kind", [MatmulReduceScatter, AllGatherMatmul])
def test_exhausted_symmetric_memory_leaves_the_operation_usable(
    kind, make, good, problem, world, monkeypatch
):
    op = make(kind)
    works(op, good())
    take = world._backend.allocate
    larger = problem(kind, (512 * world.size, 264, 16))
    with monkeypatch.context() as patch:
        patch.setattr(world._backend, "allocate", lambda nbytes: take(nbytes << 32))
        with refusal(SymmetricMemoryError, "cannot hold this allocation"):
            op(larger.x, larger.w, larger.out)
    works(op, good())
    works(op, larger)


@pytest.mark.mpi(ranks=[2])
def test_interrupt_between_agreement_and_launch_breaks_the_world(
    cpu_world, monkeypatch
):
    def interrupt(launch: Any, stream: Any) -> None:
        raise KeyboardInterrupt

    op = MatmulReduceScatter(world=cpu_world)
    op(*ones(cpu_world))
    if cpu_world.rank == 0:
        monkeypatch.setattr(op.program._executor, "launch", interrupt)
    # A peer raises in its own agreement, or while it waits in the run.
    kinds = KeyboardInterrupt if cpu_world.rank == 0 else (WorldError, WaitTimeoutError)
    with pytest.raises(kinds) as caught:
        op(*ones(cpu_world))
    text = "left the world: a call there was interrupted"
    assert cpu_world.rank == 0 or text in str(caught.value)
    with pytest.raises(WorldError, match="cannot be used"):
        op(*ones(cpu_world))


@pytest.mark.mpi(ranks=[2])
def test_interrupt_in_a_run_is_on_all_ranks_and_the_next_call_is_right(
    cpu_world, monkeypatch
):
    op = MatmulReduceScatter(world=cpu_world)
    op(*ones(cpu_world))
    executor = op.program._executor

    def interrupt(team: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if cpu_world.rank == 0:
            patch.setattr(executor, "_drive", interrupt)
        with pytest.raises(KeyboardInterrupt if cpu_world.rank == 0 else WorldError):
            op(*ones(cpu_world))
    assert (op(*ones(cpu_world)) == 8 * cpu_world.size).all()


@pytest.mark.mpi(ranks=[2])
def test_interrupt_after_all_ranks_have_finished_is_of_one_rank_alone(
    cpu_world, monkeypatch
):
    op = MatmulReduceScatter(world=cpu_world)
    op(*ones(cpu_world))
    executor = op.program._executor
    drive = executor._drive

    def interrupt(team: Any) -> None:
        drive(team)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if cpu_world.rank == 0:
            patch.setattr(executor, "_drive", interrupt)
            with pytest.raises(KeyboardInterrupt):
                op(*ones(cpu_world))
        else:
            assert (op(*ones(cpu_world)) == 8 * cpu_world.size).all()
    assert (op(*ones(cpu_world)) == 8 * cpu_world.size).all()


@pytest.mark.mpi(ranks=[2])
def test_interrupt_of_all_ranks_at_once_ends_them_soon(cpu_world):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    op = MatmulReduceScatter(world=cpu_world)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises((KeyboardInterrupt, WorldError, WaitTimeoutError)):
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            while True:
                op(*ones(cpu_world))
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_threads_that_call_at_once_get_right_results_or_an_error(cpu_world):
    op = MatmulReduceScatter(world=cpu_world)
    x, w = ones(cpu_world)
    wrong = []

    def call(value: int) -> None:
        for _ in range(20):
            try:
                y = op(x, w * ml_dtypes.bfloat16(value))
            except WorldError as error:
                assert "two threads use one world" in str(error)
            else:
                if not (y == 8 * value * cpu_world.size).all():
                    wrong.append(value)

    if cpu_world.size == 1:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(call, (1, 2)))
    assert wrong == []
