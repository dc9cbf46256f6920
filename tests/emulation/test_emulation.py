"""The kernels' own text, run thread by thread: layers and collectives against NumPy, at
shapes of every kind of tile and under either schedule, the same bits for other orders
of events; and what is broken in a kernel shows."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from etc_dist.layers.mlp import mlp_graph
from etc_dist.layers.mlp_few_rows import mlp_few_rows_graph
from etc_dist.layers.moe_few_tokens import moe_few_tokens_graph
from etc_dist.layers.moe_graph import moe_graph
from etc_dist.ops.all_gather_matmul import all_gather_matmul_graph
from etc_dist.ops.matmul_reduce_scatter import matmul_reduce_scatter_graph
from etc_dist.ops.product import W_LAYOUTS
from tests.emulation.emulation import KERNELS, Emulated
from tests.layers.reference import (
    TOLERANCE,
    Answer,
    draw,
    draw_experts,
    draw_weights,
    moe_reference,
    own_experts,
    reference,
)

SEEDS = range(3)
SCHEDULES = ["static", "dynamic"]


Given = tuple[list[dict[str, Any]], list[Answer], dict[str, int]]
"""Each rank's inputs, what it must return, and the dims."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where programs are compiled, by all of the processes that share the tests."""
    base = tmp_path_factory.getbasetemp()
    found = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "emulated"
    found.mkdir(exist_ok=True)
    return found


def check(
    program: Emulated,
    inputs: list[dict[str, Any]],
    answers: list[Answer],
    dims: dict[str, int],
    dtype: str = "bfloat16",
) -> None:
    """Run with several seeds: right on each rank, and alike."""
    first = None
    for seed in SEEDS:
        ys = [np.full(a.expected.shape, np.nan, inputs[0]["x"].dtype) for a in answers]
        arrays = [{**given, "y": y} for given, y in zip(inputs, ys, strict=True)]
        program.run(arrays, dims, seed)
        for answer, y in zip(answers, ys, strict=True):
            assert answer.error(y) < TOLERANCE[dtype]
            answer.check(y, dtype)
        bits = [y.tobytes() for y in ys]
        assert bits == (first := first or bits), f"other bits with seed {seed}"


def named(weights: Any) -> dict[str, Any]:
    return dict(zip(("router", "gate_up", "down"), weights, strict=True))


def moe(
    tokens: int, experts: int, top_k: int, hidden: int, inner: int, dtype: str
) -> Given:
    rng = np.random.default_rng(tokens)
    weights = draw_experts(rng, experts, hidden, inner, dtype)
    x = draw(rng, (tokens, hidden), dtype)
    dims = {"tokens": tokens, "hidden": hidden, "inner": inner}
    return [{"x": x, **named(weights)}], [moe_reference(x, weights, top_k)], dims


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "tokens, hidden, inner",
    [
        (1, 64, 64),  # tiles of one row
        (40, 136, 200),  # narrow tiles
        (300, 320, 264),  # short ones
        (300, 64, 72),  # and of half as many columns
        (680, 640, 200),  # long ones: of two turns
        (1100, 8, 8),  # more blocks of tokens than a warp has lanes,
        (9000, 8, 8),  # and than the tensor lane has threads
    ],
)
def test_mixture_of_experts(folder, schedule, tokens, hidden, inner):
    graph = moe_graph(1, experts=8, top_k=2)
    given = moe(tokens, 8, 2, hidden, inner, "bfloat16")
    check(Emulated(graph, folder, schedule), *given)


def test_logits_in_tiles(folder):
    graph = moe_graph(1, experts=8, top_k=1, dtype="float16", score_tasks=1)
    check(Emulated(graph, folder), *moe(150, 8, 1, 72, 24, "float16"), "float16")


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("tokens", [1, 3])
def test_mixture_of_experts_of_few_tokens(folder, schedule, tokens):
    graph = moe_few_tokens_graph(1, experts=16, top_k=3)
    check(Emulated(graph, folder, schedule), *moe(tokens, 16, 3, 200, 56, "bfloat16"))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("parallel", ["tensor", "expert"])
def test_mixture_of_experts_of_two_ranks(folder, schedule, parallel):
    hidden, inner, tokens = 136, 64, 35
    graph = moe_graph(2, experts=8, top_k=2, parallel=parallel)
    rng = np.random.default_rng(2)
    weights = draw_experts(rng, 8, hidden, inner)
    x = draw(rng, (2 * tokens, hidden), "bfloat16")
    answer = moe_reference(x, weights, 2)
    halves = [np.split(a, 2) for a in (answer.expected, answer.magnitude)]
    rows = [x, x] if parallel == "tensor" else np.split(x, 2)
    inputs = [
        {"x": np.ascontiguousarray(rows[r])}
        | named(own_experts(weights, parallel, r, 2))
        for r in range(2)
    ]
    dims = {"shard" if parallel == "tensor" else "tokens": tokens, "hidden": hidden}
    dims["inner"] = inner // 2 if parallel == "tensor" else inner
    answers = [Answer(*pair) for pair in zip(*halves, strict=True)]
    check(Emulated(graph, folder, schedule), inputs, answers, dims)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("graph", [mlp_graph, mlp_few_rows_graph])
def test_dense_mlp_of_two_ranks(folder, schedule, graph):
    hidden, inner, rows = 192, 136, 40
    rng = np.random.default_rng(3)
    shares = [draw_weights(rng, hidden, inner) for _ in range(2)]
    xs = [draw(rng, (rows, hidden), "bfloat16") for _ in range(2)]
    names = ("x", "gate", "up", "down")
    inputs = [
        dict(zip(names, (x, *s), strict=True)) for x, s in zip(xs, shares, strict=True)
    ]
    dims = {"rows": rows, "hidden": hidden, "inner": inner}
    check(Emulated(graph(2), folder, schedule), inputs, reference(xs, shares), dims)


def matmul_reduce_scatter(w_layout: str = "nk") -> Given:
    rows, n, k = 200, 264, 136
    shape = (n, k) if w_layout == "nk" else (k, n)
    rng = np.random.default_rng(4)
    inputs = [
        {"x": draw(rng, (2, rows, k), "bfloat16"), "w": draw(rng, shape, "bfloat16")}
        for _ in range(2)
    ]
    each = [[i["x"].astype(np.float32), i["w"].astype(np.float32)] for i in inputs]
    each = [[x, w.T if w_layout == "nk" else w] for x, w in each]
    total = sum(x @ w for x, w in each)
    magnitude = sum(np.abs(x) @ np.abs(w) for x, w in each)
    answers = [Answer(total[r], magnitude[r]) for r in range(2)]
    return inputs, answers, {"rows": rows, "n": n, "k": k}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("w_layout", W_LAYOUTS)
def test_matmul_and_reduce_scatter(folder, schedule, w_layout):
    graph = matmul_reduce_scatter_graph(2, w_layout=w_layout)
    check(Emulated(graph, folder, schedule), *matmul_reduce_scatter(w_layout))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_all_gather_and_matmul(folder, schedule):
    rows, n, k = 200, 264, 136
    rng = np.random.default_rng(5)
    xs = [draw(rng, (rows, k), "bfloat16") for _ in range(2)]
    inputs = [{"x": x, "w": draw(rng, (n, k), "bfloat16")} for x in xs]
    whole = np.concatenate(xs).astype(np.float32)
    answers = [
        Answer(whole @ w.T, np.abs(whole) @ np.abs(w).T)
        for w in (i["w"].astype(np.float32) for i in inputs)
    ]
    dims = {"rows": rows, "n": n, "k": k}
    graph = all_gather_matmul_graph(2)
    check(Emulated(graph, folder, schedule), inputs, answers, dims)


CASES = {
    "moe": (moe_graph(1, experts=8, top_k=2), moe, (300, 8, 2, 320, 264, "bfloat16")),
    "many": (moe_graph(1, experts=8, top_k=2), moe, (9000, 8, 2, 8, 8, "bfloat16")),
    "sum": (matmul_reduce_scatter_graph(2), matmul_reduce_scatter, ()),
}
BROKEN = [  # by one statement less, or by another one
    ("moe", "tasks/tile_ring", "if (!lost) lost = !wait_mbarrier(run, full(s), ", ""),
    ("moe", "tasks/tile_ring", "        ptx::wgmma_wait<1>();", ""),
    (
        "moe",
        "tasks/tile_ring",
        "  multiply(s, k);",
        "if (k != 2 || threadIdx.x / 32 != 1) multiply(s, k);",
    ),
    ("moe", "tasks/tile_ring", "return wait_mbarrier(run, free(ring ", "return true;"),
    ("moe", "tasks/grouped_matmul", "      ptx::named_barrier<128>(2 + wg);", ""),
    ("moe", "tasks/choose_experts", "    task.sync();", ""),
    ("moe", "worker/mailbox", "ptx::mbarrier_arrive_cluster(taken(), 0);", ""),
    ("many", "tasks/list_rows", "if (w < warp) row += of_warp;", ""),
    ("many", "tasks/list_rows", "task.sync();  // before", "//"),
    ("moe", "tasks/list_rows", "task.sync();  // before", "if (warp) task.sync(); //"),
    ("sum", "tasks/tile_ring", "          ptx::commit_stores();", ""),
    ("sum", "tasks/tile_ring", "        ptx::wait_stores_read<1>();", ""),
    ("sum", "tasks/tile_ring", "        ptx::wait_stores_read<0>();", ""),
    ("sum", "tasks/tile_ring", "      ptx::wait_stores<0>();", ""),
]


# Sums of what is not there may be of any size.
@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
@pytest.mark.parametrize(("case", "file", "line", "instead"), BROKEN)
def test_what_is_broken_shows(folder, tmp_path, case, file, line, instead):
    kernels = tmp_path / "kernels"
    shutil.copytree(KERNELS, kernels)
    path = kernels / f"{file}.cuh"
    before, found, after = path.read_text().partition(line)
    assert found, f"{file} has no {line}"
    rest = after if ";" in line else after.partition(";")[2]
    path.write_text(before + instead + rest)
    graph, make, arguments = CASES[case]
    broken = Emulated(graph, folder, kernels=kernels)
    with pytest.raises(AssertionError):
        check(broken, *make(*arguments))
