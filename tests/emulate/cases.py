"""Inputs of emulated programs, and their expected outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from etc_dist.emulate import Emulator
from etc_dist.functions.push_rows import push_rows
from etc_dist.functions.weight_layouts import silu
from etc_dist.ir import DeviceFunction, GraphFunction, device_function
from etc_dist.ops.exchange_model import TILES
from etc_dist.ops.matmul_all_reduce import TILES_NAME
from etc_dist.ops.tile_model import Tiling, dims_of
from tests.graphs.calls import Task, calls, one_call
from tests.graphs.dense import dense
from tests.graphs.running_sums import inputs
from tests.graphs.running_sums import reference as reference_sums
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

SEEDS = [0, 1]
"""Orders of events; one more with --all."""
Example = tuple[list[dict[str, Any]], list[Answer], dict[str, int]]
"""Each rank's inputs, its expected result, and the dims."""


def check(
    program: Emulator,
    inputs: list[dict[str, Any]],
    answers: list[Answer],
    dims: dict[str, int],
    dtype: str = "bfloat16",
    seeds: Sequence[int] = SEEDS,
) -> None:
    """Run with several seeds: right on each rank, with the same bits. Some runs are
    followed by another one immediately."""
    first = None
    for seed in seeds:
        runs = 2 - seed % 2
        all_outputs = program.run(inputs, dims, seed=seed, runs=runs)
        ys = [outputs["y"] for outputs in all_outputs]
        for answer, y in zip(answers, ys, strict=True):
            assert answer.error(y) < TOLERANCE[dtype]
            answer.check(y, dtype)
        bits = [y.tobytes() for y in ys]
        assert bits == (first := first or bits), f"other bits with seed {seed}"


def named(weights: Any) -> dict[str, Any]:
    return dict(zip(("router", "gate_up", "down"), weights, strict=True))


def moe(
    tokens: int, experts: int, top_k: int, hidden: int, inner: int, dtype: str
) -> Example:
    rng = np.random.default_rng(tokens)
    weights = draw_experts(rng, experts, hidden, inner, dtype)
    x = draw(rng, (tokens, hidden), dtype)
    dims = {"tokens": tokens, "hidden": hidden, "inner": inner}
    return [{"x": x, **named(weights)}], [moe_reference(x, weights, top_k)], dims


def moe_of_two(parallel: str, tokens: int) -> Example:
    hidden, inner = 136, 64
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
    return inputs, [Answer(*pair) for pair in zip(*halves, strict=True)], dims


def mlp(ranks: int, rows: int, hidden: int, inner: int, *tilings: Tiling) -> Example:
    """tilings: of gate_up and of down, for mlp_tiles_graph."""
    rng = np.random.default_rng(3)
    shares = [draw_weights(rng, hidden, inner) for _ in range(ranks)]
    xs = [draw(rng, (rows, hidden), "bfloat16") for _ in range(ranks)]
    names = ("x", "gate", "up", "down")
    inputs = [
        dict(zip(names, (x, *s), strict=True)) for x, s in zip(xs, shares, strict=True)
    ]
    dims = {"rows": rows, "hidden": hidden, "inner": inner}
    for name, tiling in zip(("gate_up_", "down_"), tilings, strict=False):
        dims |= dims_of(tiling, name)
    return inputs, reference(xs, shares), dims


def matmul_of(x: Any, w: Any) -> Answer:
    """x @ w.T."""
    x, w = x.astype(np.float32), w.astype(np.float32)
    return Answer(x @ w.T, np.abs(x) @ np.abs(w).T)


def matmul_all_reduce(rows: int, k: int, tiling: Tiling) -> Example:
    """Of two ranks, by tiles that are stored on both."""
    n, rng = 136, np.random.default_rng(k)
    inputs = [
        {"x": draw(rng, (rows, k), "bfloat16"), "w": draw(rng, (n, k), "bfloat16")}
        for _ in range(2)
    ]
    partial_answers = [matmul_of(**arrays) for arrays in inputs]
    total = sum(a.expected for a in partial_answers)
    answer = Answer(total, sum(a.magnitude for a in partial_answers))
    dims = {"rows": rows, "vectors": n // 8, "k": k, "algorithm": TILES, "piece": 10}
    dims["early_strips"] = 0
    return inputs, [answer] * 2, dims | dims_of(tiling, TILES_NAME)


def matmul_reduce_scatter(
    rows: int,
    w_layout: str = "nk",
    columns: int = 128,
    split: int = 0,
    parts: int = 1,
    n: int = 264,
    shape: int = 0,
) -> Example:
    k = 136
    of_w = (n, k) if w_layout == "nk" else (k, n)
    rng = np.random.default_rng(4)
    inputs = [
        {"x": draw(rng, (2, rows, k), "bfloat16"), "w": draw(rng, of_w, "bfloat16")}
        for _ in range(2)
    ]
    partial_answers = [
        matmul_of(i["x"], i["w"] if w_layout == "nk" else i["w"].T) for i in inputs
    ]
    total = sum(a.expected for a in partial_answers)
    magnitude = sum(a.magnitude for a in partial_answers)
    answers = [Answer(total[r], magnitude[r]) for r in range(2)]
    tiling = Tiling(shape, columns, split, parts)
    return inputs, answers, {"rows": rows, "n": n, "k": k, **dims_of(tiling)}


def float_partials(rows: int) -> Example:
    inputs, answers, dims = matmul_reduce_scatter(rows)
    del dims["split_tile_columns"], dims["parts"]
    return inputs, answers, dims


def all_gather_matmul(split: int, parts: int) -> Example:
    rows, n, k = 200, 136, 136
    rng = np.random.default_rng(5)
    xs = [draw(rng, (rows, k), "bfloat16") for _ in range(2)]
    inputs = [{"x": x, "w": draw(rng, (n, k), "bfloat16")} for x in xs]
    answers = [matmul_of(np.stack(xs), i["w"]) for i in inputs]
    tiles = dims_of(Tiling(0, 128, split, parts))
    return inputs, answers, {"rows": rows, "n": n, "k": k, **tiles}


def _on(lane: str) -> Callable[[Callable[..., None]], DeviceFunction]:
    source = Path(__file__).with_name("copy_numbers.cuh")
    return device_function(source=source, reads=1, writes=1, lane=lane)


def copy_on(lane: str) -> DeviceFunction:
    @_on(lane)
    def copy_numbers(source: Any, to: Any) -> None:
        to[...] = source

    return copy_numbers


@_on("tensor")
def turn_numbers(source: Any, to: Any) -> None:
    to[...] = source[:, ::-1]


PART = 8
"""Numbers that a task copies."""


def set_first_on(lane: str) -> DeviceFunction:
    @_on(lane)
    def set_first(source: Any, to: Any) -> None:
        to[0] = source[0]

    return set_first


def set_some(world_size: int, *, lane: str) -> GraphFunction:
    """y is x where sizes is 1, else unchanged."""
    reads, writes = ["x n/1 int32"], ["y n[span(i, sizes.load(i))] int32"]
    sizes = "input sizes [n] int32"
    function = set_first_on(lane)
    return one_call(world_size, function, reads, writes, dims="n", parts=sizes)


def some_numbers() -> tuple[dict[str, Any], Any]:
    """Arrays for set_some, and the expected y."""
    sizes, x = (np.arange(40, dtype=np.int32) % k for k in (2, 7))
    y = np.full(40, -1, np.int32)
    return {"sizes": sizes, "x": x, "y": y}, np.where(sizes, x, -1)


def sums(kind: str) -> Example:
    """For running_sums."""
    arrays = inputs(11)
    sums = reference_sums(arrays, kind)
    return [arrays], [Answer(sums, np.abs(sums))], {"n": 11}


def sums_of_ranks(world_size: int) -> Example:
    """For sums_over_ranks."""
    xs = [inputs(5, rank)["x"] for rank in range(world_size)]
    whole = np.cumsum(np.concatenate(xs), axis=0)
    answers = [Answer(y, np.abs(y)) for y in np.split(whole, world_size)]
    return [{"x": x} for x in xs], answers, {"n": 5}


def counted_late(world_size: int) -> GraphFunction:
    """y [n] is x, copied by tasks that wait for `count` notifications, which tasks of
    this run have written, and for other tasks."""
    parts = f"""
        let parts = n // {PART}
        local count [parts] int32
        local half [n] bfloat16
        local spare [notifiers] int32
        events counted [1] expects parts
        events halved [parts] expects 1
        events notified [i: parts] expects count.load(i)
    """
    copy, part, by_part = (
        copy_on("transfer"),
        f"[tile(i, {PART})]",
        {"grid": "i: parts"},
    )
    tasks = [
        Task(
            copy,
            ["given parts/1 int32"],
            ["count[tile(i, 1)]"],
            notifies=["counted[0]"],
        ),
        Task(
            copy_on("tensor"),
            [f"x n{part} bfloat16"],
            [f"half{part}"],
            name="halve",
            notifies=["halved[i]"],
            **by_part,
        ),
        Task(
            copy,
            ["target notifiers[tile(j, 1)] int32"],
            ["spare[tile(j, 1)]"],
            name="notify",
            grid="j: notifiers",
            waits=["counted[0]"],
            notifies=["notified[target.load(j)]"],
        ),
        Task(
            copy,
            [f"half{part}"],
            [f"y n{part} bfloat16"],
            name="end",
            waits=["counted[0]", "halved[i]", "notified[i]"],
            **by_part,
        ),
    ]
    return calls(world_size, tasks=tasks, dims="n notifiers", parts=parts)


def matmul_and_scratch(world_size: int) -> GraphFunction:
    """y = x @ w.T by tiles, and unrelated tasks that use the staging memory of the
    epilogue as scratch. They corrupt a tile that was not stored before."""
    operands = ["x rows/128 k bfloat16", "w n/128 k bfloat16"]
    turn = ["x[span(i, 1), :]"], ["turned rows[span(i, 1)] k bfloat16"]
    tasks = [
        Task(dense, operands, ["y rows/128 n/128 bfloat16"]),
        Task(turn_numbers, *turn, grid="i: rows"),
    ]
    kinds = {"turned": "local"}
    return calls(world_size, tasks=tasks, dims="rows n k", kinds=kinds)


def matmul_of_one(world_size: int, *, is_counted: bool = False) -> GraphFunction:
    """y = x @ w[number].T by way of copies. A task begins with its weights once the
    number is known, before its rows of x are copied. is_counted: the number of row
    tiles is known with it."""
    row_tiles = "up_to(ceildiv(rows, 128), number.load(1))"
    parts = """
        local number [2] int32
        local half [rows, k] bfloat16
        events known [1] expects 1
        events copied [ceildiv(rows, 128)] expects 1
    """
    multiply = Task(
        dense,
        ["half[tile(i, 128), :]", "w 3[number.load(0)] n[tile(j, 128)] k bfloat16"],
        ["y rows/128@i n/128@j bfloat16"],
        grid=f"i: {row_tiles if is_counted else 'ceildiv(rows, 128)'}, "
        "j: ceildiv(n, 128)",
        waits=["known[0]", "copied[i]"],
        streams_after=1,
    )
    tasks = [
        Task(push_rows(), ["given 2 int32"], ["number[:]"], notifies=["known[0]"]),
        Task(
            push_rows(),
            ["x rows/128 k bfloat16"],
            ["half[tile(i, 128), :]"],
            name="copy",
            notifies=["copied[i]"],
        ),
        multiply,
    ]
    return calls(world_size, tasks=tasks, dims="rows n k", parts=parts)


def one_of_three(number: int = 2) -> Example:
    rng, (rows, n, k) = np.random.default_rng(11), (140, 264, 136)
    x, w = draw(rng, (rows, k), "bfloat16"), draw(rng, (3, n, k), "bfloat16")
    arrays = {"given": np.array([number, 2], np.int32), "x": x, "w": w}
    return [arrays], [matmul_of(x, w[number])], {"rows": rows, "n": n, "k": k}


def matmul(rows: int, n: int, k: int) -> Example:
    rng = np.random.default_rng(8)
    x, w = draw(rng, (rows, k), "bfloat16"), draw(rng, (n, k), "bfloat16")
    return [{"x": x, "w": w}], [matmul_of(x, w)], {"rows": rows, "n": n, "k": k}


def tiles(m: int, n: int, k: int) -> Example:
    """For `product` on tiles of one shape."""
    inputs, answers, _ = matmul(m, n, k)
    return inputs, answers, {"m": m, "n": n, "k": k, "shape": 0}


def gated(m: int, n: int, k: int, dtype: str = "bfloat16") -> Example:
    """For a gated `product` on tiles of one shape."""
    rng = np.random.default_rng(9)
    x, gate, up = (draw(rng, (r, k), dtype, k**-0.25) for r in (m, n, n))
    active, linear = silu(matmul_of(x, gate).expected), matmul_of(x, up)
    answer = Answer(active * linear.expected, np.abs(active) * linear.magnitude)
    inputs = {"x": x, "gate": gate, "up": up}
    return [inputs], [answer], {"m": m, "n": n, "k": k, "shape": 0}


def four_matmuls(rows: int, n: int, k: int) -> Example:
    """For the graph three_matmuls."""
    [inputs], [once], dims = matmul(rows, n, k)
    inputs["w_kn"] = np.ascontiguousarray(inputs["w"].T)
    stacked = [np.stack([a] * 4) for a in (once.expected, once.magnitude)]
    return [inputs], [Answer(*stacked)], dims


def numbers() -> Example:
    """For counted_late."""
    rng, n, notifiers = np.random.default_rng(7), 24 * PART, 40
    x = draw(rng, (n,), "bfloat16")
    target = rng.integers(0, n // PART, notifiers).astype(np.int32)
    counts = np.bincount(target, minlength=n // PART).astype(np.int32)
    wide = x.astype(np.float32)
    inputs = {"x": x, "given": counts, "target": target}
    return [inputs], [Answer(wide, np.abs(wide))], {"n": n, "notifiers": notifiers}


def rows_of_two() -> Example:
    """For a ring of two."""
    rng = np.random.default_rng(7)
    xs = [draw(rng, (96, 8), "float32") for _ in range(2)]
    count = np.ones(4, np.int32)
    answers = [Answer(x, np.abs(x)) for x in reversed(xs)]
    return [{"x": x, "count": count} for x in xs], answers, {"rows": 96}
