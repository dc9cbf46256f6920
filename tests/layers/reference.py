"""The layers in plain NumPy: weights, rows and results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from etc_dist.functions.activation import SWIGLU, Activation
from etc_dist.functions.router import Router, as_router
from etc_dist.ir.tensor import numpy_dtype

Host = np.ndarray[Any, Any]
Weights = tuple[Host, Host, Host]
"""One rank's share: gate, up [inner, hidden] and down [hidden, inner]; or router
[experts, hidden], gate_up [experts, 2 inner, hidden], down [experts, hidden, inner]."""
# NOTE: the reference rounds the activations as the layer does. Partial sums and the
# result are rounded once each: an error of one rounding times the root of two.
TOLERANCE = {"bfloat16": 3e-3, "float16": 3.75e-4}
"""Of the relative error of many numbers."""
ROUNDING = {"bfloat16": 2**-6, "float16": 2**-9}
"""Of each number alone: the roundings of each product of an expert, of a rank's sum
and of the result, and activations that round the other way."""


@dataclass(frozen=True)
class Answer:
    """The expected result of a rank in fp32, and the same sums of absolute values."""

    expected: Host
    magnitude: Host

    def error(self, y: Host) -> float:
        """The relative error of `y`, in the Frobenius norm."""
        off = y.astype(np.float32) - self.expected
        return float(np.linalg.norm(off) / np.linalg.norm(self.expected))

    def check(self, y: Host, dtype: str = "bfloat16") -> None:
        """Assert that the error of each number of `y` is explained by rounding."""
        off = np.abs(y.astype(np.float32) - self.expected)
        allowed = ROUNDING[dtype] * self.magnitude + 1e-6
        assert np.all(off <= allowed), f"off by {np.nanmax(off / allowed)} roundings"


def draw(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: str, scale: float = 1.0
) -> Host:
    """Normal numbers of deviation `scale`."""
    return (rng.standard_normal(shape) * scale).astype(numpy_dtype(dtype))


def draw_weights(
    rng: np.random.Generator, hidden: int, inner: int, dtype: str = "bfloat16"
) -> Weights:
    """Weights that keep a deviation of about one."""
    wide = (inner, hidden)
    gate, up = (draw(rng, wide, dtype, hidden**-0.5) for _ in range(2))
    return gate, up, draw(rng, (hidden, inner), dtype, inner**-0.5)


def reference(xs: Sequence[Host], shares: Sequence[Weights]) -> list[Answer]:
    """The expected result of each rank, from all ranks' rows and weights."""
    rows = np.concatenate(xs).astype(np.float32)
    total, magnitude = np.zeros_like(rows), np.zeros_like(rows)
    for share in shares:
        gate, up, down = (weight.astype(np.float32) for weight in share)
        gate_rows = rows @ gate.T
        rounded = (gate_rows / (1 + np.exp(-gate_rows)) * (rows @ up.T)).astype(
            xs[0].dtype
        )
        active = rounded.astype(np.float32)
        total += active @ down.T
        magnitude += np.abs(active) @ np.abs(down).T
    ranks = (np.split(sums, len(shares)) for sums in (total, magnitude))
    return [Answer(*sums) for sums in zip(*ranks, strict=True)]


# ------------------------------------------------------------- the mixture of experts


def draw_experts(
    rng: np.random.Generator,
    experts: int,
    hidden: int,
    inner: int,
    dtype: str = "bfloat16",
) -> Weights:
    """Weights that keep a deviation of about one, and logits that differ clearly."""
    router = draw(rng, (experts, hidden), dtype, hidden**-0.5)
    gate_up = draw(rng, (experts, 2 * inner, hidden), dtype, hidden**-0.5)
    return router, gate_up, draw(rng, (experts, hidden, inner), dtype, inner**-0.5)


def own_experts(weights: Weights, parallel: str, rank: int, world: int) -> Weights:
    """A rank's share: some experts, or some of the inner width of all."""
    router, gate_up, down = weights
    if parallel == "expert":
        share = (
            np.ascontiguousarray(np.split(w, world)[rank]) for w in (gate_up, down)
        )
        return router, *share
    halves = np.split(gate_up, 2, axis=1)
    shares = [np.split(half, world, axis=1)[rank] for half in halves]
    narrow = np.ascontiguousarray(np.split(down, world, axis=2)[rank])
    return router, np.concatenate(shares, axis=1), narrow


def aim(x: Host, weights: Weights, ids: Host) -> None:
    """Make the tokens x choose the experts ids [tokens, top_k], in that order: the
    first columns of x become the logits."""
    router = weights[0]
    num_experts = len(router)
    router[...] = 0
    router[:, :num_experts] = np.eye(num_experts)
    x[:, :num_experts] = -1
    falling = 1 - np.arange(ids.shape[1]) / 16
    np.put_along_axis(x, ids, np.broadcast_to(falling, ids.shape).astype(x.dtype), 1)


def activate(gate: Host, up: Host, activation: Activation) -> Host:
    """In fp64."""
    limit = activation.limit or np.inf
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    if activation.function == "gelu_tanh":
        inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
        return gate * (1 + np.tanh(inner)) / 2 * up
    return gate / (1 + np.exp(-activation.alpha * gate)) * (up + activation.shift)


def moe_reference(
    x: Host,
    weights: Weights,
    top_k: int | Router,
    normalize: bool | None = None,
    biases: Sequence[Host] = (),
    shared: Sequence[Host] = (),
    activation: Activation = SWIGLU,
    expert_biases: Sequence[Host] = (),
) -> Answer:
    """The expected result: choices of logits in fp64, then expert by expert. shared:
    gate_up, down and perhaps the gate of an expert of all tokens."""
    router, gate_up, down = (weight.astype(np.float32) for weight in weights)
    rows = x.astype(np.float32)
    logits = rows.astype(np.float64) @ router.astype(np.float64).T
    ids, shares = as_router(top_k, normalize).choose(logits, *biases)
    total, magnitude = np.zeros_like(rows), np.zeros_like(rows)
    for token_idx, row in enumerate(rows):
        chosen_experts = [
            (w, gate_up[e], down[e])
            for e, w in zip(ids[token_idx], shares[token_idx], strict=True)
        ]
        if shared:
            own_gate_up, own_down, *gates = (a.astype(np.float32) for a in shared)
            logit = float(gates[0] @ row) if gates else np.inf
            chosen_experts.append((1 / (1 + np.exp(-logit)), own_gate_up, own_down))
        biases_of = [*ids[token_idx], -1][: len(chosen_experts)]
        for expert, (share, up_weight, down_weight) in zip(
            biases_of, chosen_experts, strict=True
        ):
            weight = np.float32(share)
            sums, bias = up_weight @ row, np.zeros(len(down_weight))
            if expert_biases and expert >= 0:
                up_bias, bias = (b[expert].astype(np.float32) for b in expert_biases)
                sums = sums + up_bias
            active = activate(*np.split(sums.astype(np.float64), 2), activation)
            active = active.astype(x.dtype).astype(np.float32)
            total[token_idx] += weight * (down_weight @ active + bias)
            magnitude[token_idx] += weight * np.abs(bias)
            magnitude[token_idx] += weight * (np.abs(down_weight) @ np.abs(active))
    return Answer(total, magnitude)


def zipf(rng: np.random.Generator, tokens: int, experts: int, top_k: int) -> Any:
    """Choices in which the first experts have the most tokens."""
    odds = 1 / np.arange(1, experts + 1)
    odds /= odds.sum()
    return np.array(
        [rng.choice(experts, top_k, replace=False, p=odds) for _ in range(tokens)]
    )


ROUTINGS: dict[str, Callable[[np.random.Generator, int], Any]] = {
    "first experts get most": lambda rng, n: zipf(rng, n, 8, 3),
    "all get all": lambda rng, n: np.tile(np.arange(8), (n, 1)),
    "one expert gets all": lambda rng, n: np.full((n, 1), 5),
    "two experts get all": lambda rng, n: np.tile([6, 1], (n, 1)),
    "one expert gets none": lambda rng, n: 1 + zipf(rng, n, 7, 2),
    "all experts get the same": lambda rng, n: np.arange(2 * n).reshape(n, 2) % 8,
}
"""Choices of tokens among 8 experts: ids [tokens, top_k]."""
