"""Random numbers that depend on a key and a counter alone: Philox4x32-10 of Salmon et
al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). CUDA half in
`kernels/common/philox.cuh`."""

from __future__ import annotations

from typing import Any

import numpy as np

MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], np.uint64)
WEYL = np.array([0x9E3779B9, 0xBB67AE85], np.uint32)
ROUNDS = 10


def philox(counter: Any, key: Any) -> Any:
    """counter [..., 4] and key [..., 2] -> random bits [..., 4], all uint32."""
    x, y, z, w = np.moveaxis(np.asarray(counter, np.uint32), -1, 0)
    key = np.asarray(key, np.uint32)
    for _ in range(ROUNDS):
        (high0, low0), (high1, low1) = (
            ((product >> np.uint64(32)).astype(np.uint32), product.astype(np.uint32))
            for product in (
                x.astype(np.uint64) * MULTIPLIERS[0],
                z.astype(np.uint64) * MULTIPLIERS[1],
            )
        )
        x, y, z, w = high1 ^ y ^ key[..., 0], low1, high0 ^ w ^ key[..., 1], low0
        key = key + WEYL
    return np.stack([x, y, z, w], axis=-1)


def gumbel(bits: Any) -> Any:
    """Numbers of the standard Gumbel distribution, from 32 random bits each."""
    # NOTE: exact where they are large, that is, where the uniform number is small.
    uniform = (bits.astype(np.float32) + np.float32(0.5)) * np.float32(2**-32)
    uniform = np.minimum(uniform, np.float32(1 - 2**-24))
    return -np.log(-np.log1p(-uniform))
