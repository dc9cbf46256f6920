"""GEMM + All-Reduce, also with residual and RMSNorm: its graph, and calls on ranks."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import etc_dist
from etc_dist import MatmulAllReduce, MatmulAllReduceNorm
from etc_dist.emulate import Emulator
from etc_dist.errors import ArgumentError
from etc_dist.functions.rms_norm import normalized
from etc_dist.functions.tile_shape import TileShape
from etc_dist.ir import GraphFunction
from etc_dist.ir.tensor import numpy_dtype
from etc_dist.ops.all_reduce_norm import EPS
from etc_dist.ops.exchange_model import (
    ONE_SHOT,
    TILES,
    TWO_SHOT,
    AllReduceSizes,
)
from etc_dist.ops.matmul_all_reduce import TILES_NAME, matmul_all_reduce_graph
from etc_dist.ops.tile_model import Tiling, dims_of
from etc_dist.ops.tuning import shipped_for
from etc_dist.runtime.cpu import simulate
from etc_dist.runtime.memory_plan import Capacity, plan_memory
from etc_dist.schedule import schedule_static
from etc_dist.verify.verify import verify
from tests.conftest import kept_proof
from tests.functions.compiled import check_compiled
from tests.ops.test_operation_errors import refusal
from tests.refusals import refused
from tests.verify.waits import Proved

exhaustive = pytest.mark.exhaustive
H200 = shipped_for("NVIDIA H200")
SHAPES = (TileShape(8, 64, swapped=True),)
# Three rows of tiles, the last column of which is divided along k.
DIMS = {"rows": 21, "vectors": 17, "k": 520, "piece": 10}
DIMS |= dims_of(Tiling(0, 64, 1, 2), TILES_NAME)
NEAR = {**DIMS, "early_strips": 0}
"""Of sums on one host without a norm."""
EARLY = {**NEAR, "vectors": 73, "early_strips": 1, "algorithm": TILES}
"""Ten columns of tiles, of which eight are a strip, and one is divided."""
ends = pytest.mark.parametrize("eps", [None, EPS])
KINDS = pytest.mark.parametrize(
    ("ranks", "near", "algorithm"),
    [
        (1, 1, ONE_SHOT),
        (2, 2, TILES),
        (3, 3, TILES),
        (3, 3, TWO_SHOT),
        pytest.param(4, 2, TWO_SHOT, marks=exhaustive),
    ],
)


def given(ranks: int, shape: tuple[int, int, int], dtype: str, rng: Any) -> Any:
    """Each rank's arrays, whose sums are exact; the total without a residual, that with
    one, and its norm."""
    m, n, k = shape
    element = numpy_dtype(dtype)

    def signs(*extents: int) -> Any:
        return rng.integers(-1, 2, extents).astype(element)

    xs, ws = [signs(m, k) for _ in range(ranks)], [signs(n, k) for _ in range(ranks)]
    pairs = zip(xs, ws, strict=True)
    product = sum(x.astype(np.float32) @ w.astype(np.float32).T for x, w in pairs)
    residual, gain = signs(m, n), rng.standard_normal(n).astype(element)
    total = product + residual.astype(np.float32)
    inputs = [
        {"x": x, "w": w, "residual": residual, "gain": gain}
        for x, w in zip(xs, ws, strict=True)
    ]
    return inputs, product, total, normalized(total, gain, EPS)


def check(outputs: Any, eps: float | None, product: Any, total: Any, norm: Any) -> None:
    y = outputs["y"].astype(np.float32)
    if eps is None:
        np.testing.assert_array_equal(y, product)
    else:
        np.testing.assert_array_equal(outputs["residual_out"].astype(np.float32), total)
        assert np.all(np.abs(y - norm) <= 2**-7 * np.abs(norm) + 1e-6)


def graph_and_inputs(ranks: int, near: int, eps: float | None, rng: Any) -> Any:
    options = {"eps": eps, "shapes": SHAPES, "local_size": near}
    graph = matmul_all_reduce_graph(ranks, **options)
    inputs, *references = given(ranks, (21, 136, 520), "bfloat16", rng)
    if eps is None:
        inputs = [{"x": arrays["x"], "w": arrays["w"]} for arrays in inputs]
    return graph, inputs, references


def early_inputs(ranks: int, rng: Any) -> Any:
    shape = EARLY["rows"], 8 * EARLY["vectors"], EARLY["k"]
    inputs, *references = given(ranks, shape, "bfloat16", rng)
    return [{"x": arrays["x"], "w": arrays["w"]} for arrays in inputs], references


def dims_for(graph: GraphFunction, algorithm: int) -> dict[str, int]:
    names = {dim.name for dim in graph.dims}
    dims = NEAR if "early_strips" in names else DIMS
    return {**dims, "algorithm": algorithm}


@ends
@KINDS
def test_sums_are_proved_and_right(ranks, near, algorithm, eps, rng):
    if algorithm == TILES and eps is not None:
        algorithm = ONE_SHOT
    graph, inputs, references = graph_and_inputs(ranks, near, eps, rng)
    plan, dims = schedule_static(graph), dims_for(graph, algorithm)
    kept_proof(plan, dims, 4)
    for outputs in simulate(plan, inputs, dims, epochs=2, seed=1).outputs:
        check(outputs, eps, *references)


@pytest.mark.parametrize("ranks", [2, 3])
def test_strips_that_are_sent_early_are_proved_and_right(ranks, rng):
    plan = schedule_static(matmul_all_reduce_graph(ranks, shapes=SHAPES))
    inputs, references = early_inputs(ranks, rng)
    kept_proof(plan, EARLY, 4)
    for outputs in simulate(plan, inputs, EARLY, epochs=2, seed=1).outputs:
        check(outputs, None, *references)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=exhaustive)])
def test_kernels_send_early_strips(ranks, rng):
    program = Emulator(matmul_all_reduce_graph(ranks, shapes=SHAPES), workers=2)
    inputs, references = early_inputs(ranks, rng)
    for outputs in program.run(inputs, EARLY, seed=1, runs=2):
        check(outputs, None, *references)


@pytest.mark.parametrize(
    ("ranks", "near", "algorithm", "eps"),
    [
        (2, 2, TILES, None),
        (2, 2, TWO_SHOT, None),
        pytest.param(3, 3, TILES, None, marks=exhaustive),
        pytest.param(3, 3, ONE_SHOT, EPS, marks=exhaustive),
        pytest.param(4, 2, TWO_SHOT, EPS, marks=exhaustive),
    ],
)
def test_kernels_give_the_reference(ranks, near, algorithm, eps, rng):
    graph, inputs, references = graph_and_inputs(ranks, near, eps, rng)
    program = Emulator(graph, workers=2, has_far=near < ranks)
    for outputs in program.run(inputs, dims_for(graph, algorithm), seed=1, runs=2):
        check(outputs, eps, *references)


@exhaustive
@ends
def test_kernels_compile_without_spills(eps):
    check_compiled(matmul_all_reduce_graph(8, eps=eps))


@pytest.mark.parametrize(
    ("algorithm", "eps", "name"),
    [
        (ONE_SHOT, EPS, "push_parts"),
        (TILES, None, f"{TILES_NAME}sum_on_ranks"),
        (TILES, None, "add_stored"),
        (TWO_SHOT, None, "scatter_parts"),
    ],
)
def test_rows_are_sent_after_they_are_computed(algorithm, eps, name):
    graph = matmul_all_reduce_graph(2, shapes=SHAPES, eps=eps)
    proved = Proved(graph, dims_for(graph, algorithm))
    assert f"{name}[" in proved.lacks("static", name, 0)


@pytest.mark.parametrize(
    ("name", "number"), [("send_tiles", 0), ("add_stored", 0), ("add_stored", 1)]
)
def test_early_strips_are_sent_and_added_after_they_are_computed(name, number):
    proved = Proved(matmul_all_reduce_graph(2, shapes=SHAPES), EARLY)
    assert f"{name}[" in proved.lacks("static", name, number)


def test_rows_by_one_exchange_are_refused_without_a_norm():
    plan = schedule_static(matmul_all_reduce_graph(2, shapes=SHAPES))
    dims = {**NEAR, "algorithm": ONE_SHOT}
    words = r"has no such exchange|algorithm = 1 or 3|got: algorithm = 0"
    refused(lambda: verify(plan, dims, 4), words, ArgumentError)


# NOTE: named in each file: files without the number of a run are not collected.
ONE_OR_TWO = pytest.mark.mpi(ranks=[1, 2])
ANY_RANKS = pytest.mark.mpi(ranks=[1, 2, 4])


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param(ONE_SHOT, marks=ONE_OR_TWO),
        pytest.param(TWO_SHOT, marks=ANY_RANKS),
    ],
)
def test_all_ranks_get_the_sum(algorithm, world, make, arrays, monkeypatch):
    one_shot = property(lambda sizes: sizes.one_shot)
    fastest = one_shot if algorithm == ONE_SHOT else algorithm
    monkeypatch.setattr(AllReduceSizes, "fastest", fastest)
    op, norm_op = make(MatmulAllReduce), make(MatmulAllReduceNorm)
    for shape in ((1, 8, 8), (5, 72, 24), (37, 136, 40)):
        rng = np.random.default_rng(3)
        inputs, *references = given(world.size, shape, "bfloat16", rng)
        x, w, residual, gain = map(arrays.put, inputs[world.rank].values())
        kn = arrays.put(inputs[world.rank]["w"].T.copy()).T
        for weights in (w, kn):
            out = op(x, weights)
            op.synchronize()
            check({"y": arrays.get(out)}, None, *references)
        out, total = norm_op(x, w, residual, gain, residual_out=residual)
        norm_op.synchronize()
        assert total is residual
        outputs = {"y": arrays.get(out), "residual_out": arrays.get(total)}
        check(outputs, EPS, *references)


@pytest.mark.mpi(ranks=[2])
def test_functions_share_operations(world, arrays):
    rng = np.random.default_rng(3)
    inputs, *references = given(world.size, (5, 72, 24), "float16", rng)
    x, w, residual, gain = map(arrays.put, inputs[world.rank].values())
    y = etc_dist.matmul_all_reduce(x, w)
    check({"y": arrays.get(y)}, None, *references)
    y, total = etc_dist.matmul_all_reduce_norm(x, w, residual, gain, EPS)
    outputs = {"y": arrays.get(y), "residual_out": arrays.get(total)}
    check(outputs, EPS, *references)


@pytest.mark.mpi(ranks=[2])
def test_show_has_the_tiles_the_exchange_and_the_memory(world, arrays, make):
    op = make(MatmulAllReduce)
    x, w = (arrays.put_as(np.zeros(shape), "bfloat16") for shape in ((5, 72), (24, 72)))
    op(x, w)
    text = op.show(rows=5, vectors=3, k=72)
    assert "algorithm = 3: one exchange of tiles of 240 bytes among 2 ranks" in text
    assert re.search(
        r"  one exchange of tiles: predicted .* us, 480 bytes of sym", text
    )
    # Those of the shares of six rows, of the sums, and of the own result.
    assert re.search(r"  two exchanges: predicted .* us, 768 bytes of symmetric", text)
    assert "early_strips = 0: of whole tiles, which are sent while" in text


WRONG = {
    "N is 12": (((4, 16), (12, 16)), r"wanted: [^$]*w \[8 \* vectors, .*\][^$]*w \[12"),
    "K differs": (((4, 16), (8, 24)), r"got: +w \[8, 24\]"),
    "x has one axis": (((16,), (8, 16)), r"got: +x \[16\]"),
}


@pytest.mark.mpi(ranks=[1, 2])
@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_fit_on_one_rank_is_refused_on_all(what, world, arrays, make):
    op = make(MatmulAllReduce)
    shapes, words = WRONG[what]
    if world.rank != world.size - 1:
        shapes = (4, 16), (8, 16)
    x, w = (arrays.put_as(np.zeros(shape), "bfloat16") for shape in shapes)
    with refusal(ArgumentError, words):
        op(x, w)


# what: the arrays that are replaced, by name, and the words of the error
WRONG_WITH_NORM = {
    "residual is float16": r"got: +residual \[4, 8\] float16",
    "residual has other rows": r"wanted: [^$]*got: +residual \[5, 8\] bfloat16",
    "gain has other columns": r"got: +gain \[16\] bfloat16",
    "out is a part of x": r"wanted: out apart from x\n",
    "out is residual": r"wanted: out apart from residual\n",
    "residual_out is out": r"wanted: [^$]*residual_out apart from out",
    "M of one rank differs": r"rank \d: MatmulAllReduceNorm\(first call, rows=5",
}


def wrong(what: str, operands: dict[str, Any], put: Any) -> dict[str, Any]:
    return {
        "residual is float16": {"residual": put(np.zeros((4, 8)), "float16")},
        "residual has other rows": {"residual": put(np.zeros((5, 8)), "bfloat16")},
        "gain has other columns": {"gain": put(np.zeros(16), "bfloat16")},
        "out is a part of x": {"out": operands["x"].reshape(8, 8)[:4]},
        "out is residual": {"out": operands["residual"]},
        "residual_out is out": dict.fromkeys(
            ("out", "residual_out"), put(np.zeros((4, 8)), "bfloat16")
        ),
        "M of one rank differs": {
            "x": put(np.zeros((5, 16)), "bfloat16"),
            "residual": put(np.zeros((5, 8)), "bfloat16"),
        },
    }[what]


@pytest.mark.mpi(ranks=[2])
@pytest.mark.parametrize("what", WRONG_WITH_NORM)
def test_what_does_not_fit_a_norm_is_refused_on_all(what, world, arrays, make, rng):
    op = make(MatmulAllReduceNorm)
    inputs, *references = given(world.size, (4, 8, 16), "bfloat16", rng)
    operands = {name: arrays.put(a) for name, a in inputs[world.rank].items()}
    changes = wrong(what, operands, arrays.put_as) if world.rank == 1 else {}
    with refusal(ArgumentError, WRONG_WITH_NORM[what]):
        op(**operands | changes)
    y, total = op(**operands)
    op.synchronize()
    outputs = {"y": arrays.get(y), "residual_out": arrays.get(total)}
    check(outputs, EPS, *references)


@pytest.mark.parametrize(
    ("ranks", "shape", "algorithm", "piece"),
    [
        (2, (80, 1280, 10368), TILES, 128),  # in parts of k
        (2, (438, 7296, 1216), TILES, 303),  # one wave: more than a warp loads at once
        (2, (736, 5952, 1280), TILES, 241),  # 1.7 waves: those of the last one
        (4, (16, 1024, 4096), TILES, 64),
        (4, (438, 7296, 1216), TWO_SHOT, 456),
    ],
)
def test_tiles_take_the_place_of_one_exchange(ranks, shape, algorithm, piece):
    choice = dims_chosen(near_operation(ranks), *shape)
    assert (choice["algorithm"], choice["piece"]) == (algorithm, piece)


def near_operation(ranks: int) -> MatmulAllReduce:
    """Without a program: only for its choices."""
    op = object.__new__(MatmulAllReduce)
    op.world, op.deterministic = SimpleNamespace(size=ranks, local_size=ranks), "run"
    return op


def dims_chosen(op: MatmulAllReduce, rows: int, columns: int, k: int) -> dict[str, int]:
    dims = {"rows": rows, "vectors": columns // 8, "k": k}
    return dims | {c.dim: c.value for c in op._choose(H200, "nk", dims, 132)}


def test_memory_for_some_rows_suffices_for_fewer():
    op, plan = near_operation(2), schedule_static(matmul_all_reduce_graph(2))
    capacity, sizes = Capacity(), (15104, 2496)
    for dims in op._capacity("nk", dims_chosen(op, 700, *sizes), 132):
        capacity = capacity.grown(plan_memory(plan, dims))
    for rows in range(1, 701, 37):
        memory = plan_memory(plan, dims_chosen(op, rows, *sizes))
        assert capacity.holds(memory)


@ends
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_memory_that_is_shown_is_that_of_the_program(ranks, eps):
    plan = schedule_static(matmul_all_reduce_graph(ranks, shapes=SHAPES, eps=eps))
    sizes = AllReduceSizes(5, 512, ranks, ranks, of_tiles=eps is None)
    for algorithm in sizes.algorithms:
        dims = {**dims_for(plan.graph, algorithm), "rows": 5, "vectors": 512}
        memory = plan_memory(plan, dims)
        assert sizes.symmetric_bytes(algorithm) == memory.symmetric_bytes


def test_strips_are_sent_early_where_epilogues_would_wait_for_the_links():
    large, small = (AllReduceSizes(rows, 2048, 2, 2) for rows in (1024, 16))
    assert large.early_share(500.0, 4.0) == 0.75  # all but the last wave
    assert 0.1 < large.early_share(50.0, 4.0) < 0.3  # what can be sent meanwhile
    assert large.early_share(500.0, 1.0) == small.early_share(500.0, 4.0) == 0
