"""What emulated programs are run on, and what must come out."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.emulation.emulation import Emulated
from tests.layers.reference import (
    TOLERANCE,
    Answer,
    draw,
    draw_experts,
    moe_reference,
)

SEEDS = range(3)
Given = tuple[list[dict[str, Any]], list[Answer], dict[str, int]]
"""Each rank's inputs, what it must return, and the dims."""


def check(
    program: Emulated,
    inputs: list[dict[str, Any]],
    answers: list[Answer],
    dims: dict[str, int],
    dtype: str = "bfloat16",
    broken: int = 0,
) -> None:
    """Run with several seeds: right on each rank, and alike. Some runs are followed by
    another one at once."""
    first = None
    for seed in SEEDS:
        ys = [np.full(a.expected.shape, np.nan, inputs[0]["x"].dtype) for a in answers]
        arrays = [{**given, "y": y} for given, y in zip(inputs, ys, strict=True)]
        runs = 2 if seed == 0 or len(inputs) > 1 else 1
        program.run(arrays, dims, seed, runs=runs, broken=broken)
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


def matmul_reduce_scatter(rows: int, w_layout: str = "nk") -> Given:
    n, k = 264, 136
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
