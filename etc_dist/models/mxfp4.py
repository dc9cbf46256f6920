"""Weights in MXFP4, which are widened as they are read.

A block is 32 numbers e2m1, two in a byte, the first one in the low bits, with a common
scale e8m0, a power of two (OCP Microscaling Formats, version 1.0). bfloat16 holds each
of their products exactly, except for those of the largest scales, which are refused as
numbers that are not finite."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from etc_dist.models.safetensors_file import DTYPES, listed, release, weights_error

METHOD = "mxfp4"
KEYS = {"quant_method", "modules_to_not_convert"}
BLOCKS, SCALES = "_blocks", "_scales"
BLOCK_BYTES = 16
_POSITIVE = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
CODES = np.concatenate([_POSITIVE, -_POSITIVE])
"""The numbers e2m1."""
PAIRS = np.stack([np.tile(CODES, 16), np.repeat(CODES, 16)], axis=1)
"""Those of a byte, [256, 2]."""
POWERS = np.array([*(2.0 ** (n - 127) for n in range(255)), np.nan], np.float32)
"""The scales e8m0."""


def is_known(quantization: Mapping[str, Any]) -> bool:
    """Whether this is a quantization_config of weights in MXFP4."""
    return quantization.get("quant_method") == METHOD and quantization.keys() <= KEYS


class Widened:
    """A stack of matrices [experts, columns, rows] of blocks along the columns. Each is
    widened to fp32 as the iteration comes to it, so that one is in memory."""

    ndim, dtype = 3, np.dtype(np.float32)

    def __init__(self, blocks: Any, scales: Any) -> None:
        """blocks [experts, rows, n, 16] and scales [experts, rows, n], uint8."""
        self._blocks, self._scales = blocks, scales

    def __iter__(self) -> Iterator[Any]:
        for blocks, scales in zip(self._blocks, self._scales, strict=True):
            yield widen(blocks, scales).T
            release(blocks)


def widen(blocks: Any, scales: Any) -> Any:
    """blocks [rows, n, 16] and scales [rows, n], uint8 -> fp32 [rows, 32 n]."""
    with np.errstate(over="ignore"):
        numbers = PAIRS[blocks].reshape(*scales.shape, 2 * BLOCK_BYTES)
        numbers *= POWERS[scales][..., None]
    return numbers.reshape(len(scales), -1)


def widened(
    tensors: Sequence[tuple[str, Any]], path: Path
) -> Iterator[tuple[str, Any]]:
    """The tensors, with `Widened` in place of blocks and scales, without the ends of
    their names. ArgumentError for some that do not fit each other, and for other
    tensors of bytes. They are in `path`."""
    bytes_of = {name: array for name, array in tensors if array.dtype == np.uint8}
    for name, array in tensors:
        stem = name.removesuffix(BLOCKS)
        scales = bytes_of.get(stem + SCALES)
        if name not in bytes_of:
            yield name, array
        elif name != stem and scales is not None:
            if array.shape != (*scales.shape, BLOCK_BYTES) or scales.ndim != 3:
                wanted = f"{BLOCK_BYTES} bytes of {name} for each scale"
                got = f"{list(array.shape)} for scales {list(scales.shape)}"
                raise weights_error(path, wanted, got)
            yield stem, Widened(array, scales)
        elif name.removesuffix(SCALES) + BLOCKS not in bytes_of:
            wanted = f"{DTYPES}, or *{BLOCKS} with *{SCALES} in MXFP4"
            raise weights_error(path, wanted, listed([f"{name}: U8"]))
