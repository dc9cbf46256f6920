"""All-reduce, residual and RMSNorm: its graph in every backend, and calls on ranks."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import etc_dist
from etc_dist import AllReduceNorm
from etc_dist.emulate import Emulator
from etc_dist.errors import ArgumentError, RaceError, ScheduleError
from etc_dist.functions.rms_norm import normalized
from etc_dist.ir.tensor import numpy_dtype
from etc_dist.ops.all_reduce_norm import EPS, all_reduce_norm_graph
from etc_dist.ops.exchange_model import FLAGGED, ONE_SHOT, TWO_SHOT, AllReduceSizes
from etc_dist.runtime.cpu import simulate
from etc_dist.schedule import SCHEDULES, schedule_static
from etc_dist.verify.verify import verify
from tests.conftest import kept_proof
from tests.functions.compiled import check_compiled
from tests.ops.test_all_reduce import (
    FLAGGED_IN_PLACE,
    FLAGGED_KINDS,
    KINDS,
    dims_of,
    example,
    exhaustive,
)
from tests.ops.test_operation_errors import refusal
from tests.refusals import refused
from tests.verify.waits import Proved
from tests.world.jobs import run_on_hosts


def rows_of(
    ranks: int, near: int, shape: tuple[int, int], dtype: str, rng: Any
) -> tuple[list[dict[str, Any]], Any, Any]:
    """Each rank's inputs, and both results."""
    graph = all_reduce_norm_graph(ranks, local_size=near)
    (rows, columns), element = shape, numpy_dtype(dtype)
    examples, _ = example(graph, rows * columns // 8, dtype, rng)
    inputs = [{"x": arrays["x"].reshape(shape)} for arrays in examples]
    residual = rng.standard_normal(shape).astype(element)
    gain = rng.standard_normal(columns).astype(element)
    total = np.zeros(shape, np.float32)
    for first in range(0, ranks, near):
        host = np.zeros(shape, np.float32)
        for arrays in inputs[first : first + near]:
            host += arrays["x"].astype(np.float32)
        total += host
    total = (total + residual.astype(np.float32)).astype(element)
    for arrays in inputs:
        arrays |= {"residual": residual, "gain": gain}
    return inputs, total, normalized(total, gain, EPS)


def check(results: Any, total: Any, norm: Any, dtype: str) -> None:
    """The sums have the same bits, the norms nearly; alike on all ranks."""
    for outputs in results:
        np.testing.assert_array_equal(outputs["residual_out"], total)
        error = np.abs(outputs["y"].astype(np.float32) - norm)
        ulp = 2**-10 if dtype == "float16" else 2**-7
        assert np.all(error <= ulp * np.abs(norm) + 1e-6)
        assert outputs["y"].tobytes() == results[0]["y"].tobytes()


@KINDS
@pytest.mark.parametrize(
    "schedule", ["static", pytest.param("dynamic", marks=exhaustive)]
)
def test_norms_are_proved_and_right(ranks, local_size, algorithm, schedule, rng):
    graph = all_reduce_norm_graph(ranks, local_size=local_size)
    if schedule == "dynamic" and 1 < local_size < ranks:
        words = "the grid of call add_near, which waits, depends on the rank"
        refused(lambda: SCHEDULES[schedule](graph), words, ScheduleError)
        return
    plan = SCHEDULES[schedule](graph)
    dims = dims_of(4, 7, algorithm, 2)  # shares of two rows, the last ones smaller
    assert kept_proof(plan, dims, 4).by_events
    inputs, *references = rows_of(ranks, local_size, (4, 56), "bfloat16", rng)
    results = simulate(plan, inputs, dims, epochs=2, seed=1).outputs
    check(results, *references, "bfloat16")


@KINDS
@pytest.mark.parametrize("in_place", [False, True])
def test_kernels_give_the_same_bits(ranks, local_size, algorithm, in_place, rng):
    dtype = "float16" if ranks == 3 else "bfloat16"
    graph = all_reduce_norm_graph(ranks, local_size=local_size, dtype=dtype)
    inputs, *references = rows_of(ranks, local_size, (3, 2400), dtype, rng)
    program = Emulator(graph, workers=2, has_far=local_size < ranks)
    runs, dims = 1 if in_place else 2, dims_of(3, 300, algorithm, 280)
    results = program.run(inputs, dims, seed=2, runs=runs, in_place=in_place)
    check(results, *references, dtype)


@exhaustive  # others are programs of the library
@pytest.mark.parametrize("ranks", [1, 8])
def test_kernels_compile_without_spills(ranks):
    check_compiled(all_reduce_norm_graph(ranks, has_flags=ranks > 1))


@FLAGGED_KINDS
def test_norms_by_flagged_words_are_proved_and_right(ranks, rng):
    graph = all_reduce_norm_graph(ranks, has_flags=True)
    plan, dims = schedule_static(graph), dims_of(6, 7, FLAGGED, 2, flag_tasks=8)
    assert not kept_proof(plan, dims, 4).by_events
    words = (
        "push_flagged[r=0] on rank 0 reads and add_flagged_norm[r=0] on rank 0 writes"
    )
    refused(lambda: verify(plan, dims, 3), f"{words} x[0:1, 0:56]", RaceError)
    inputs, *references = rows_of(ranks, ranks, (6, 56), "bfloat16", rng)
    results = simulate(plan, inputs, dims, epochs=3, seed=1).outputs
    check(results, *references, "bfloat16")


# Of the long rows a thread has vectors that it loads again.
@FLAGGED_IN_PLACE
def test_kernels_of_flagged_words_give_the_same_bits(ranks, in_place, rng, kernels):
    dtype = "float16" if ranks == 3 else "bfloat16"
    graph = all_reduce_norm_graph(ranks, dtype=dtype, has_flags=True)
    program = Emulator(graph, workers=2, kernels=kernels)
    runs, dims = 1 if in_place else 3, dims_of(3, 1100, FLAGGED, 2, flag_tasks=4)
    for seed in range(2):  # other values, in the memory of the runs before
        inputs, *references = rows_of(ranks, ranks, (3, 8800), dtype, rng)
        results = program.run(inputs, dims, seed=seed, runs=runs, in_place=in_place)
        check(results, *references, dtype)


@pytest.mark.parametrize(
    ("algorithm", "name"),
    [(ONE_SHOT, "add_ranks_norm"), (TWO_SHOT, "add_share"), (TWO_SHOT, "copy_norm")],
)
def test_no_wait_is_needless(algorithm, name):
    proved = Proved(all_reduce_norm_graph(3), dims_of(4, 7, algorithm, 2))
    assert f"{name}[" in proved.lacks("static", name, 0)


# NOTE: named in each file: files without the number of a run are not collected.
ONE_OR_TWO = pytest.mark.mpi(ranks=[1, 2])
ANY_RANKS = pytest.mark.mpi(ranks=[1, 2, 4])


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param(ONE_SHOT, marks=ONE_OR_TWO),
        pytest.param(TWO_SHOT, marks=ANY_RANKS),
        pytest.param(FLAGGED, marks=ONE_OR_TWO),
    ],
)
def test_all_ranks_get_the_norm(algorithm, world, make, arrays, monkeypatch):
    monkeypatch.setattr(AllReduceSizes, "fastest", algorithm)
    op = make(AllReduceNorm)
    least = world.size if algorithm == TWO_SHOT else 1
    for shape in ((least, 8), (5, 24), (140, 8), (4, 2400)):
        rng = np.random.default_rng(7)
        every, *references = rows_of(world.size, world.size, shape, "bfloat16", rng)
        x, residual, gain = (arrays.put(a) for a in every[world.rank].values())
        for outs in ((), (x, residual)):
            out, total = op(x, residual, gain, *outs)
            op.synchronize()
            results = {"y": arrays.get(out), "residual_out": arrays.get(total)}
            check(
                [results], references[0].astype(np.float32), references[1], "bfloat16"
            )
        assert (out is x) and (total is residual)


WRONG = {
    "residual is float16": r"got: +residual \[4, 16\] float16",
    "residual has other rows": r"wanted: [^$]*got: +residual \[5, 16\] bfloat16",
    "gain has other columns": r"gain \[24\] bfloat16",
    "out is residual": r"wanted: out apart from residual\n",
    "residual_out is out": r"residual_out apart from out",
}


def wrong(what: str, p: dict[str, Any], put: Any) -> tuple[list[Any], dict[str, Any]]:
    x, residual, gain = p.values()
    return {
        "residual is float16": ([x, put(np.zeros((4, 16)), "float16"), gain], {}),
        "residual has other rows": ([x, put(np.zeros((5, 16)), "bfloat16"), gain], {}),
        "gain has other columns": ([x, residual, put(np.zeros(24), "bfloat16")], {}),
        "out is residual": ([x, residual, gain], {"out": residual}),
        "residual_out is out": ([x, residual, gain], {"out": x, "residual_out": x}),
    }[what]


@pytest.mark.mpi(ranks=[1, 2])
@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_fit_on_one_rank_is_refused_on_all(what, world, arrays, make):
    op, rng = make(AllReduceNorm), np.random.default_rng(7)
    every, total, _ = rows_of(world.size, world.size, (4, 16), "bfloat16", rng)
    operands = {name: arrays.put(a) for name, a in every[world.rank].items()}
    call: tuple[list[Any], dict[str, Any]] = ([*operands.values()], {})
    if world.rank == world.size - 1:
        call = wrong(what, operands, arrays.put_as)
    with refusal(ArgumentError, WRONG[what]):
        op(*call[0], **call[1])
    _, sums = op(*operands.values())
    np.testing.assert_array_equal(arrays.get(sums), total.astype(np.float32))


@pytest.mark.mpi(ranks=[1, 2])
@pytest.mark.parametrize("eps", [0.0, float("nan"), -1.0, 1e-40, 10**39, 10**400])
def test_an_eps_that_is_not_positive_in_fp32_is_refused(eps, world, arrays):
    x = arrays.put_as(np.zeros((4, 16)), "bfloat16")
    gain = arrays.put_as(np.zeros(16), "bfloat16")
    text = re.escape(f"eps = {eps}")
    with refusal(
        ArgumentError, rf"wanted: eps: a positive number of fp32\n *got: +{text}"
    ):
        etc_dist.all_reduce_norm(x, x, gain, eps)


@exhaustive
def test_norms_over_two_hosts():
    source = """
import numpy as np, etc_dist
from mpi4py import MPI
from etc_dist.ir.tensor import numpy_dtype

world, bf16 = etc_dist.start(), numpy_dtype("bfloat16")
x = np.random.default_rng(world.rank).integers(-9, 9, (5, 64))
sums = sum(MPI.COMM_WORLD.allgather(x)) + 1
one = np.ones((5, 64), bf16)
for turn in range(3):
    y, total = etc_dist.all_reduce_norm(x.astype(bf16), one, one[0])
    assert (total.astype(int) == sums).all()
print("right on", world.hosts.count, "hosts", flush=True)
world.close()
"""
    code, output = run_on_hosts(source)
    assert code == 0, output
    assert output.count("right on 2 hosts") == 4


def test_runs_of_two_exchanges_between_flagged_words_need_a_share_of_each_rank():
    """Else a rank would wait for some others only, and write over what they read."""
    graph, counts = all_reduce_norm_graph(4, has_flags=True), (4, 5, 9)
    for rows in counts:
        dims = dims_of(rows, 2, TWO_SHOT, 2, flag_tasks=0)
        kept_proof(schedule_static(graph), dims, 4)
        assert TWO_SHOT in AllReduceSizes(rows, 2, 4, 4, True).algorithms
    few = dims_of(2, 2, TWO_SHOT, 2, flag_tasks=0)
    words = "rank 3 waits for no task of rank 2 in this run"
    refused(lambda: verify(schedule_static(graph), few, 4), words, RaceError)
    assert TWO_SHOT not in AllReduceSizes(3, 2, 4, 4, True).algorithms
