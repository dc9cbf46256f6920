"""Heads of queries and keys, normalized and rotated; CUDA half in
`kernels/functions/rotary.cuh`.

The rotary embedding rotates elements i and i + head_dim / 2 of a head by an angle that
depends on the position and on i. A table [positions, head_dim] in fp32 has the cosines
of a position's angles, then their sines; scaled variants differ in the table alone.

Source: Su et al., "RoFormer", 2021."""

from __future__ import annotations

from typing import Any

import numpy as np

from etc_dist.functions.rms_norm import normalized

HEAD_DIMS = (64, 128, 256)


def rotary_table(positions: int, frequencies: Any) -> Any:
    """Cosines and sines of position * frequencies, of head_dim / 2 frequencies."""
    angles = np.outer(np.arange(positions), np.asarray(frequencies, np.float64))
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    return table.astype(np.float32)


def frequencies(head_dim: int, base: float) -> Any:
    """base ** (-2 i / head_dim), for i below head_dim / 2."""
    return float(base) ** (-2 * np.arange(head_dim // 2) / head_dim)


def rotated(
    heads: Any,
    cos_sin: Any,
    gain: Any = None,
    eps: float = 0.0,
    offset: int = 0,
    is_after: bool = False,
) -> Any:
    """Heads [..., head_dim] with rows of the table [..., head_dim], in fp32; with a
    `gain`, to which `offset` is added, of the RMSNorm of each head. is_after: instead,
    the rotated heads are normalized."""
    heads = heads.astype(np.float32)
    if gain is not None and not is_after:
        heads = normalized(heads, gain, eps, offset)
    low, high = np.split(heads, 2, axis=-1)
    cos, sin = np.split(cos_sin, 2, axis=-1)
    parts = low * cos - high * sin, high * cos + low * sin
    heads = np.concatenate(parts, axis=-1)
    if gain is not None and is_after:
        heads = normalized(heads, gain, eps, offset)
    return heads
