"""The dense MLP by plain NumPy: weights and rows of all ranks, and what they give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from etc_dist.ir.tensor import numpy_dtype

Host = np.ndarray[Any, Any]
Weights = tuple[Host, Host, Host]
"""One rank's share: gate, up [inner, hidden] and down [hidden, inner]."""
# NOTE: the reference rounds the activations as the layer does. Partial sums and the
# result are rounded once each: an error of one rounding times the root of two.
TOLERANCE = {"bfloat16": 3e-3, "float16": 3.75e-4}
"""Of the relative error of many numbers."""
ROUNDING = {"bfloat16": 2**-7, "float16": 2**-10}
"""Of each number alone: two roundings, and activations that round the other way."""


@dataclass(frozen=True)
class Answer:
    """What a rank must get, in fp32, and the same sums of absolute values."""

    expected: Host
    magnitude: Host

    def error(self, y: Host) -> float:
        """The relative error of `y`, in the Frobenius norm."""
        off = y.astype(np.float32) - self.expected
        return float(np.linalg.norm(off) / np.linalg.norm(self.expected))

    def check(self, y: Host, dtype: str = "bfloat16") -> None:
        """Refuse a number of `y` that is further off than rounding explains."""
        off = np.abs(y.astype(np.float32) - self.expected)
        allowed = ROUNDING[dtype] * self.magnitude + 1e-6
        assert np.all(off <= allowed), f"off by {np.nanmax(off / allowed)} roundings"


def draw(
    rng: np.random.Generator, shape: tuple[int, int], dtype: str, scale: float = 1.0
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
    """What each rank must get of all ranks' rows and weights."""
    rows = np.concatenate(xs).astype(np.float32)
    total, magnitude = np.zeros_like(rows), np.zeros_like(rows)
    for share in shares:
        gate, up, down = (weight.astype(np.float32) for weight in share)
        left = rows @ gate.T
        rounded = (left / (1 + np.exp(-left)) * (rows @ up.T)).astype(xs[0].dtype)
        active = rounded.astype(np.float32)
        total += active @ down.T
        magnitude += np.abs(active) @ np.abs(down).T
    ranks = (np.split(sums, len(shares)) for sums in (total, magnitude))
    return [Answer(*sums) for sums in zip(*ranks, strict=True)]
