"""All-reduce: its graph in every backend, its choice, and calls on ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import etc_dist
from etc_dist import AllReduce
from etc_dist.emulate import Emulator
from etc_dist.errors import ArgumentError, RaceError
from etc_dist.ir.tensor import numpy_dtype
from etc_dist.ops import exchange_model
from etc_dist.ops.all_reduce import all_reduce_graph
from etc_dist.ops.all_reduce_norm import all_reduce_norm_graph
from etc_dist.ops.exchange_model import (
    ALGORITHMS,
    FLAGGED,
    ONE_SHOT,
    TILES,
    TWO_SHOT,
    AllReduceSizes,
    choose_algorithm,
    largest_sizes,
)
from etc_dist.runtime.cpu import simulate
from etc_dist.runtime.memory_plan import Capacity, plan_memory
from etc_dist.schedule import SCHEDULES, schedule_static
from etc_dist.verify.verify import verify
from tests.conftest import first_always, kept_proof
from tests.functions.compiled import check_compiled
from tests.ops.test_operation_errors import refusal
from tests.refusals import refused
from tests.verify.waits import Proved
from tests.world.jobs import run_job

exhaustive = pytest.mark.exhaustive
KINDS = pytest.mark.parametrize(
    ("ranks", "local_size", "algorithm"),
    first_always(
        [
            (1, 1, ONE_SHOT),
            (3, 3, ONE_SHOT),
            (3, 3, TWO_SHOT),
            (4, 2, TWO_SHOT),
            (2, 2, ONE_SHOT),
            (8, 8, ONE_SHOT),
            (8, 8, TWO_SHOT),
            (2, 1, TWO_SHOT),
        ],
        4,
    ),
)


WRITTEN_OVER = (
    "push_flagged[i=0] on rank 0 reads and add_flagged[i=0] on rank 0 writes x[0:48] "
    "on rank 0; no event orders them"
)
FLAGGED_KINDS = pytest.mark.parametrize(
    "ranks", [2, 3, pytest.param(8, marks=exhaustive)]
)
FLAGGED_IN_PLACE = pytest.mark.parametrize(
    ("ranks", "in_place"),
    first_always(
        [(2, False), (3, True), (2, True), (3, False), (8, False), (8, True)], 2
    ),
)


def example(graph: Any, vectors: int, dtype: str, rng: Any) -> tuple[Any, Any]:
    """Each rank's input, of other magnitudes, and the sum in fp32 by host, in order."""
    world, near, element = graph.world_size, graph.local_size, numpy_dtype(dtype)
    shape = (world, 8 * vectors)
    xs = (rng.standard_normal(shape) * 2.0 ** rng.integers(-8, 8, shape)).astype(
        element
    )
    hosts = []
    for first in range(0, world, near):
        hosts.append(np.zeros(8 * vectors, np.float32))
        for x in xs[first : first + near]:
            hosts[-1] += x.astype(np.float32)
    total = np.zeros(8 * vectors, np.float32)
    for host in hosts:
        total += host
    return [{"x": x} for x in xs], total.astype(element)


def dims_of(
    rows: int, vectors: int, algorithm: int, piece: int, **sizes: int
) -> dict[str, int]:
    dims = {"rows": rows, "vectors": vectors, "algorithm": algorithm, "piece": piece}
    return {**dims, **sizes}


@KINDS
@pytest.mark.parametrize(
    "schedule", ["static", pytest.param("dynamic", marks=exhaustive)]
)
def test_sums_are_proved_and_in_rank_order(ranks, local_size, algorithm, schedule, rng):
    graph = all_reduce_graph(ranks, local_size=local_size)
    plan, dims = SCHEDULES[schedule](graph), dims_of(3, 7, algorithm, 2)
    assert kept_proof(plan, dims, 4).by_events
    inputs, total = example(graph, 21, "bfloat16", rng)
    for outputs in simulate(plan, inputs, dims, epochs=2, seed=1).outputs:
        np.testing.assert_array_equal(outputs["y"], total)


@FLAGGED_KINDS
def test_sums_by_flagged_words_are_proved_and_in_rank_order(ranks, rng):
    graph = all_reduce_graph(ranks, has_flags=True)
    plan, dims = schedule_static(graph), dims_of(3, 7, FLAGGED, 6, flag_tasks=4)
    # A worker sends the piece that it writes over: with others there is a race.
    assert not kept_proof(plan, dims, 4).by_events
    refused(lambda: verify(plan, dims, 3), WRITTEN_OVER, RaceError)
    inputs, total = example(graph, 21, "bfloat16", rng)
    for outputs in simulate(plan, inputs, dims, epochs=3, seed=1).outputs:
        np.testing.assert_array_equal(outputs["y"], total)


@pytest.mark.parametrize("algorithm", [ONE_SHOT, TWO_SHOT, FLAGGED])
@pytest.mark.parametrize("vectors", [1, 5])
def test_runs_without_flagged_words_may_be_between(algorithm, vectors):
    """Each rank waits for all others also at the smallest sizes."""
    plan = schedule_static(all_reduce_graph(4, has_flags=True))
    tasks = 4 if algorithm == FLAGGED else 0
    kept_proof(plan, dims_of(1, vectors, algorithm, 2, flag_tasks=tasks), 4)


@FLAGGED_IN_PLACE
def test_kernels_of_flagged_words_give_the_same_bits(ranks, in_place, rng, kernels):
    dtype = "float16" if ranks == 3 else "bfloat16"
    graph = all_reduce_graph(ranks, dtype=dtype, has_flags=True)
    program = Emulator(graph, workers=2, kernels=kernels)
    runs, dims = 1 if in_place else 3, dims_of(3, 300, FLAGGED, 270, flag_tasks=4)
    for seed in range(2):  # other values, in the memory of the runs before
        inputs, total = example(graph, 3 * 300, dtype, rng)
        for outputs in program.run(
            inputs, dims, seed=seed, runs=runs, in_place=in_place
        ):
            np.testing.assert_array_equal(outputs["y"], total)


# With a thread that has several vectors, and a last piece that is not full.
@KINDS
@pytest.mark.parametrize("in_place", [False, True])
def test_kernels_give_the_same_bits(
    ranks, local_size, algorithm, in_place, rng, kernels
):
    dtype = "float16" if ranks == 3 else "bfloat16"
    graph = all_reduce_graph(ranks, local_size=local_size, dtype=dtype)
    inputs, total = example(graph, 3 * 300, dtype, rng)
    options = {"kernels": kernels, "has_far": local_size < ranks}
    program = Emulator(graph, workers=2, **options)
    runs, dims = 1 if in_place else 2, dims_of(3, 300, algorithm, 280)
    for outputs in program.run(inputs, dims, seed=2, runs=runs, in_place=in_place):
        np.testing.assert_array_equal(outputs["y"], total)


@exhaustive  # others are programs of the library
@pytest.mark.parametrize("ranks", [1, 2, 5, 8])
def test_kernels_compile_without_spills(ranks):
    check_compiled(all_reduce_graph(ranks, has_flags=ranks > 1))


@pytest.mark.parametrize(
    ("algorithm", "name", "words"),
    [
        (ONE_SHOT, "add_slots", "add_slots[i=0] on rank 0 reads slots"),
        (TWO_SHOT, "add_share", "add_share[i=0] on rank 0 reads parts"),
        (TWO_SHOT, "copy_share", "copy_share[i=0, p=0] on rank 0 reads gathered"),
    ],
)
def test_no_wait_is_needless(algorithm, name, words):
    proved = Proved(all_reduce_graph(3), dims_of(3, 7, algorithm, 2))
    assert words in proved.lacks("static", name, 0)


# -------------------------------------------------------------------------- the choice


# Flat, also by flagged words; and rows that are not divided.
@pytest.mark.parametrize(
    ("vectors", "has_flags"), [(1, False), (1, True), (512, False), (512, True)]
)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_times_are_equal_where_the_choice_changes(ranks, vectors, has_flags):
    counts = range(1, 2**17, 61) if vectors == 1 else range(1, 1024)
    all_sizes = [AllReduceSizes(n, vectors, ranks, ranks, has_flags) for n in counts]
    names = [size.fastest for size in all_sizes]
    expected = [FLAGGED] * has_flags + [ONE_SHOT] + [TWO_SHOT] * (ranks > 2)
    assert list(dict.fromkeys(names)) == expected
    for size, before, after in zip(all_sizes[1:], names, names[1:], strict=False):
        if before != after:
            us_before, us_after = map(size.predicted_us, (before, after))
            assert abs(us_before - us_after) < 0.1 * us_before


@pytest.mark.parametrize(("ranks", "local"), [(1, 1), (4, 4), (8, 8), (4, 2)])
def test_memory_for_a_size_suffices_for_all_smaller_ones(ranks, local):
    has_flags = 1 < ranks == local
    flat = schedule_static(
        all_reduce_graph(ranks, local_size=local, has_flags=has_flags)
    )
    rows = schedule_static(
        all_reduce_norm_graph(ranks, local_size=local, has_flags=has_flags)
    )
    for plan, vectors, most, step in ((flat, 1, 70_000, 997), (rows, 512, 400, 7)):

        def dims_at(count: int, algorithm: int, piece: int, vectors: int = vectors):
            sizes = (1, count) if vectors == 1 else (count, vectors)
            tasks = 132 * -(-sizes[0] // 132) * (algorithm == FLAGGED)
            flags = {"flag_tasks": tasks} if has_flags else {}
            return dims_of(*sizes, algorithm, piece, **flags)

        sizes = most, vectors, ranks, local
        capacity, largest = Capacity(), AllReduceSizes(*sizes, has_flags)
        for algorithm, n in largest_sizes(largest):
            dims = dims_at(n, algorithm, exchange_model.LEAST_PIECE)
            capacity = capacity.grown(plan_memory(plan, dims))
        for n in range(1, most + 1, step):
            choices = choose_algorithm(replace(largest, count=n), 132)
            dims = dims_at(n, *(choice.value for choice in choices))
            assert capacity.holds(plan_memory(plan, dims))


# --------------------------------------------------------------------------- on ranks


ONE_OR_TWO = pytest.mark.mpi(ranks=[1, 2])
ANY_RANKS = pytest.mark.mpi(ranks=[1, 2, 4])
"""Of two exchanges, ranks have shares, of which four ranks have more than two."""


def own_x(world: Any, arrays: Any, shape: tuple[int, int], dtype: str) -> Any:
    every = np.random.default_rng(7).standard_normal((world.size, *shape))
    every = every.astype(numpy_dtype(dtype))
    total = np.zeros(shape, np.float32)
    for x in every:
        total += x.astype(np.float32)
    return arrays.put(every[world.rank].copy()), total.astype(every.dtype)


@pytest.mark.parametrize(
    ("algorithm", "dtype"),
    [
        pytest.param(ONE_SHOT, "bfloat16", marks=ONE_OR_TWO),
        pytest.param(TWO_SHOT, "float16", marks=ANY_RANKS),
        pytest.param(FLAGGED, "bfloat16", marks=ANY_RANKS),
        pytest.param(ONE_SHOT, "float16", marks=[exhaustive, ANY_RANKS]),
        pytest.param(TWO_SHOT, "bfloat16", marks=[exhaustive, ANY_RANKS]),
        pytest.param(FLAGGED, "float16", marks=[exhaustive, ANY_RANKS]),
    ],
)
def test_all_ranks_get_the_sum(algorithm, dtype, world, make, arrays, monkeypatch):
    monkeypatch.setattr(AllReduceSizes, "fastest", algorithm)
    op = make(AllReduce)
    for shape in ((1, 8), (5, 24), (3, 6000)):
        x, total = own_x(world, arrays, shape, dtype)
        out = op(x)
        op.synchronize()
        np.testing.assert_array_equal(arrays.get(out), total.astype(np.float32))
        assert op(x, x) is x
        op.synchronize()
        np.testing.assert_array_equal(arrays.get(x), total.astype(np.float32))


@pytest.mark.mpi(ranks=[2, 4])
def test_show_has_the_choice_the_prediction_and_the_memory(world, arrays, make):
    op = make(AllReduce)
    x, _ = own_x(world, arrays, (5, 24), "bfloat16")
    op(x)
    text = op.show(rows=5, vectors=3)
    name = "one exchange of flagged words"
    assert f"algorithm = 2: {name} of 240 bytes among {world.size} ranks" in text
    for name in ALGORITHMS[:TILES]:
        assert f"  {name}: predicted " in text
    assert f" us, {world.size * 240} bytes of symmetric memory" in text
    assert f" us, {world.size * 960} bytes of symmetric memory" in text


# what: out, x and the words of the error
def wrong(what: str, put: Any) -> tuple[Any, Any]:
    memory = put(np.zeros(4 * 16 + 8), "bfloat16")
    x = put(np.zeros((4, 16)), "bfloat16")
    return {
        "out overlaps a part of x": (
            memory[:64].reshape(4, 16),
            memory[8:].reshape(4, 16),
        ),
        "out has another shape": (x, put(np.zeros((4, 24)), "bfloat16")),
        "out is float16": (x, put(np.zeros((4, 16)), "float16")),
        "x is float32": (put(np.zeros((4, 16)), "float32"), None),
        "x has one axis": (x[0], None),
        "H is 12": (put(np.zeros((4, 12)), "bfloat16"), None),
        "x is transposed": (put(np.zeros((16, 4)), "bfloat16").T, None),
    }[what]


WORDS = {
    "out overlaps a part of x": r"wanted: out apart from x, or the same array\n",
    "out has another shape": r"got: +out \[4, 24\] bfloat16",
    "out is float16": r"got: +out \[4, 16\] float16",
    "x is float32": r"wanted: x of bfloat16 or float16\n",
    "x has one axis": r"wanted: x \[rows, 8 \* vectors\]\n *got: +x \[16\]",
    "H is 12": r"wanted: x \[rows, 8 \* vectors\]\n *got: +x \[4, 12\]",
    "x is transposed": r"(got: +x .*, transposed)|(wanted: x \[rows, 8 \* vectors\])",
}


@pytest.mark.mpi(ranks=[1, 2])
@pytest.mark.parametrize("what", WORDS)
def test_what_does_not_fit_on_one_rank_is_refused_on_all(what, world, arrays, make):
    op = make(AllReduce)
    x, total = own_x(world, arrays, (4, 16), "bfloat16")
    operands = wrong(what, arrays.put_as) if world.rank == world.size - 1 else (x, None)
    with refusal(ArgumentError, WORDS[what]):
        op(*operands)
    np.testing.assert_array_equal(arrays.get(op(x)), total.astype(np.float32))


@pytest.mark.mpi(ranks=[1, 2])
def test_other_reductions_are_refused_by_name(world, arrays):
    x, _ = own_x(world, arrays, (4, 16), "bfloat16")
    with refusal(ArgumentError, r"wanted: 'sum'\n *got: +reduction = 'max'"):
        AllReduce(reduction="max", world=world)
    with refusal(ArgumentError, r"reduction = 'avg'"):
        etc_dist.all_reduce(x, reduction="avg")


@pytest.mark.mpi(ranks=[2])
def test_ranks_with_other_shapes_are_named(world, arrays, make):
    op = make(AllReduce)
    x, _ = own_x(world, arrays, (4 + world.rank, 16), "bfloat16")
    with refusal(ArgumentError, r"rank 1: AllReduce\(first call, rows=5, vectors=2"):
        op(x)


@exhaustive  # as of any program: tests/world/test_lost.py
def test_a_rank_that_is_killed_in_a_run_is_named():
    source = """
import ml_dtypes, numpy as np
from etc_dist import AllReduce

world = start(CPU)
x = np.ones((8, 8), np.float32).astype(ml_dtypes.bfloat16)
op = AllReduce(world=world)
op(x)
if world.rank == 1:
    op.program._executor._drive = lambda _: os.kill(os.getpid(), 9)
refused(lambda: op(x))
os._exit(0)
"""
    _, output = run_job(source, ranks=3)
    assert output.count("WaitTimeoutError:") == 2
    assert output.count("rank 1: its process has ended") == 2
