"""Weights in float8 with scales: which a decoder reads, and widening others.

A matrix `*.weight` of float8_e4m3fn has `*.weight_scale_inv`, a scale for each block of
128 x 128: an element is its code times the scale of its block, rounded to fp32, then to
the dtype of the model. This is the layout of `quant_method` "fp8" in Hugging Face
folders, with `weight_block_size` [128, 128]."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from etc_dist.functions.scaled_weights import BLOCK, E4M3, SCALE_DTYPES
from etc_dist.ir.tensor import numpy_dtype
from etc_dist.models.safetensors_file import listed, release, weights_error

METHOD = "fp8"
ACCEPTED: dict[str, tuple[Any, ...]] = {
    "activation_scheme": ("dynamic", None),
    "fmt": ("e4m3", E4M3, None),
    "quant_method": (METHOD,),
    "weight_block_size": ([BLOCK, BLOCK],),
}
"""The values of fields of quantization_config; those that may be left out with None."""
UNCONVERTED = "modules_to_not_convert"
"""The field with names of matrices that are not of float8, or of what has them."""
WANTED = (
    f"quant_method {METHOD!r}, activation_scheme 'dynamic', fmt 'e4m3' and "
    f"weight_block_size {[BLOCK, BLOCK]}"
)
SCALES = "_scale_inv"
LAYER = "model.layers.{}.{}"
NUMBER = re.compile(r"[0-9]+")


def is_known(quantization: Mapping[str, Any]) -> bool:
    """Whether this is a quantization_config of weights that are read."""
    names = quantization.get(UNCONVERTED)
    is_list_of_names = isinstance(names, list) and all(
        isinstance(n, str) for n in names
    )
    return (
        quantization.keys() <= {*ACCEPTED, UNCONVERTED}
        and (names is None or is_list_of_names)
        and all(quantization.get(name) in values for name, values in ACCEPTED.items())
    )


def are_converted(quantization: Mapping[str, Any], matrices: Iterable[str]) -> bool:
    """Whether all of these matrices of all layers are of float8. matrices: their names
    in a layer, with 0 for the number of any expert.

    A name in modules_to_not_convert, up to a final pattern, stands for all that contain
    its parts, with any numbers: `mlp.gate` not for `mlp.gate_proj`, but one layer for
    all. What is of float8 there and not here is widened."""
    unconverted_names = [
        NUMBER.sub("0", name.rstrip("*."))
        for name in quantization.get(UNCONVERTED) or ()
    ]
    names = [f".{LAYER.format(0, name)}." for name in matrices]
    return not any(f".{part}." in name for part in unconverted_names for name in names)


def widen(codes: Any, scales: Any) -> Any:
    """codes [rows, columns], float8, and scales of blocks -> fp32 [rows, columns]."""
    numbers = np.arange(256).astype(np.uint8).view(numpy_dtype(E4M3))
    wide = numbers.astype(np.float32)[codes.view(np.uint8)]
    for block_idx, row in enumerate(range(0, len(wide), BLOCK)):
        of_row = scales[block_idx].astype(np.float32).repeat(BLOCK)
        wide[row : row + BLOCK] *= of_row[: wide.shape[1]]
    return wide


def widened(
    tensors: Sequence[tuple[str, Any]], path: Path, is_kept: Callable[[str], bool]
) -> Iterator[tuple[str, Any]]:
    """The tensors, those of float8 in fp32, without their scales; those that are kept,
    by name, as codes, followed by their scales in fp32. Each is read and widened as
    the iteration comes to it, so that one is in memory. ArgumentError for float8
    without scales or with some that do not fit, and for scales of no such tensor. They
    are in `path`."""
    codes = {name for name, array in tensors if array.dtype == numpy_dtype(E4M3)}
    scales = {name: array for name, array in tensors if name.endswith(SCALES)}
    for name, array in tensors:
        if name in scales:
            if name.removesuffix(SCALES) not in codes:
                wanted = f"{name.removesuffix(SCALES)} of {E4M3}"
                raise weights_error(path, wanted, f"{name} alone")
        elif name not in codes:
            yield name, array
        else:
            block_scales: Any = scales.get(name + SCALES)
            _check(name, array, block_scales, path)
            if is_kept(name):
                yield name, array
                yield name + SCALES, block_scales.astype(np.float32)
            else:
                with np.errstate(invalid="ignore", over="ignore"):
                    wide = widen(array, block_scales)
                yield name, wide
        release(array)


def _check(name: str, codes: Any, scales: Any, path: Path) -> None:
    dtypes = " or ".join(SCALE_DTYPES)
    wanted = f"a matrix, with {name}{SCALES} of {dtypes}"
    if scales is None:
        raise weights_error(path, wanted, listed([f"{name}: {E4M3} without scales"]))
    blocks = [-(-extent // BLOCK) for extent in codes.shape]
    is_typed = scales.dtype.name in SCALE_DTYPES
    if codes.ndim != 2 or list(scales.shape) != blocks or not is_typed:
        wanted += f" for each block of {BLOCK} x {BLOCK}"
        got = f"{name} {list(codes.shape)}, scales {list(scales.shape)} {scales.dtype}"
        raise weights_error(path, wanted, got)
