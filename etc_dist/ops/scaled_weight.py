"""Float8 weights with scales, as an operation gets them, and making them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from etc_dist.errors import ArgumentError, expect_choice
from etc_dist.functions.scaled_weights import (
    BLOCK,
    E4M3,
    MOST_E4M3,
    PER_BLOCK,
    PER_MATRIX,
    PER_ROW,
    SCALE_DTYPES,
    Scaling,
    scales_name,
)
from etc_dist.ir.tensor import numpy_dtype
from etc_dist.runtime.arrays import Array, described, inspect, library_of

PER = (PER_BLOCK, PER_ROW, PER_MATRIX)
FLOAT8 = "float8"
ACTIVATIONS = ("16-bit", FLOAT8)
"""How an operation multiplies x: as it is, or quantized, by scaled weights only."""


class ScaledWeight(NamedTuple):
    """A weight [N, K] of float8: each element is its code times its scale.

    codes: [N, K] float8_e4m3fn, contiguous; uint8 where a library has no float8.
    scales: float32 or bfloat16, contiguous. [ceil(N / 128), ceil(K / 128)], one for
    each block of 128 x 128, as `weight_scale_inv` of Hugging Face; [N] or [N, 1], one
    for each row; or one element, for all.

    Weights of experts are codes [E, N, K], with the scales of each expert: [E,
    ceil(N / 128), ceil(K / 128)], [E, N] or [E, N, 1], or [E], [E, 1] or [E, 1, 1].

    `matmul`, the fused collectives and `MLP` take it in place of a weight, and `MoE` in
    place of those of experts.
    """

    codes: Any
    scales: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the weight."""
        return tuple(self.codes.shape)


def check_activations(value: Any) -> None:
    """Raise TypeError or ArgumentError for a value that `activations` does not have."""
    expect_choice(value, ACTIVATIONS, "activations")


def arrays_of(values: Sequence[Any]) -> tuple[Any, ...]:
    """`values`, with codes and scales in place of each ScaledWeight."""
    pairs = (v if isinstance(v, ScaledWeight) else (v,) for v in values)
    return tuple(chain.from_iterable(pairs))


def inspect_scaled(name: str, weight: ScaledWeight) -> dict[str, Array]:
    """Codes and scales, by name."""
    codes = inspect(name, weight.codes).of_dtype(E4M3)
    scales = inspect(scales_name(name), weight.scales)
    return {name: codes, scales.name: scales}


def scaling_of(codes: Array, scales: Array) -> Scaling:
    """How a weight is scaled, or those of experts. ArgumentError for codes and scales
    that do not fit."""
    is_fitting = len(codes.shape) in (2, 3) and scales.dtype in SCALE_DTYPES
    if codes.dtype != E4M3 or not is_fitting:
        raise _misfit(codes, scales)
    *stack, n, k = codes.shape
    shapes: dict[str, list[tuple[int, ...]]] = {
        PER_MATRIX: [(), (1,), (1, 1)],
        PER_BLOCK: [(-(-n // BLOCK), -(-k // BLOCK))],
        PER_ROW: [(n,), (n, 1)],
    }
    for per, accepted in shapes.items():
        if scales.shape in [(*stack, *shape) for shape in accepted]:
            return Scaling(per, scales.dtype)
    raise _misfit(codes, scales)


def scalings_of(
    weights: Sequence[tuple[Array, Array | None]], *, has_blocks: bool = False
) -> set[Scaling | None]:
    """How weights are scaled that an operation multiplies by together; None for those
    without scales. The one scale of a weight of one block is that of the block if
    another one has scales of blocks, or with `has_blocks`."""
    scalings = [
        None if scales is None else scaling_of(codes, scales)
        for codes, scales in weights
    ]
    has_blocks |= any(s is not None and s.per == PER_BLOCK for s in scalings)
    return {
        replace(scaling, per=PER_BLOCK)
        if has_blocks and scaling is not None and _is_one_block(*weight)
        else scaling
        for scaling, weight in zip(scalings, weights, strict=True)
    }


def _is_one_block(codes: Array, scales: Array | None) -> bool:
    """Whether a weight, or that of each expert, is a block with a scale [1, 1]."""
    one_each = (*codes.shape[:-2], 1, 1)
    is_one = scales is not None and scales.shape == one_each
    return is_one and max(codes.shape[-2:]) <= BLOCK


def _misfit(codes: Array, scales: Array) -> ArgumentError:
    name = codes.name
    return ArgumentError(
        f"the scales of {name} do not fit its codes",
        where=f"the ScaledWeight {name}",
        wanted=f"codes [n, k] of {E4M3}, and scales of {' or '.join(SCALE_DTYPES)}: "
        f"[ceil(n / {BLOCK}), ceil(k / {BLOCK})], [n], [n, 1], or of one element; "
        "of experts both with their number before",
        got=described(codes, scales),
        fix=f"give blocks of {BLOCK} x {BLOCK}, rows, or the matrix one scale each; "
        "etc_dist.quantize(w) makes both of a weight",
    )


def quantize(w: Any, *, per: str = PER_BLOCK) -> ScaledWeight:
    """Codes and scales of a weight: the largest element of each block, row or matrix
    gets the largest code, 448.

    w [N, K], or those of experts [E, N, K], each quantized alone: bfloat16, float16 or
    float32, of NumPy, CuPy or torch. per: "block" (of 128 x 128), "row" or "matrix".
    Returns arrays of the same library on the same device: codes of the shape of w,
    float8_e4m3fn (CuPy: uint8), rounded to nearest, and scales in float32, of one for
    each. The largest relative error of an element is 1/16, unless its code is below
    2**-6. Computed on the CPU, with a copy of a matrix in float32.

    Raises ArgumentError for other arrays, and for elements that are not finite."""
    expect_choice(per, PER, "per")
    array = inspect("w", w)
    dtypes = (*SCALE_DTYPES, "float16")
    has_axes = len(array.shape) in (2, 3) and 0 not in array.shape
    if not has_axes or array.dtype not in dtypes:
        wanted = f"w [N, K] or [E, N, K] of {', '.join(dtypes)}"
        raise _cannot_quantize(wanted, described(array))
    owner = array.owner
    matrices = owner if len(array.shape) == 3 else [owner]
    pairs = [_quantized(_on_host(matrix), per) for matrix in matrices]
    codes, scales = (
        np.stack(arrays) if len(array.shape) == 3 else arrays[0]
        for arrays in zip(*pairs, strict=True)
    )
    return ScaledWeight(_like(owner, codes), _like(owner, scales))


def _quantized(wide: Any, per: str) -> tuple[Any, Any]:
    """Codes and scales of a matrix in fp32, which is overwritten."""
    if not np.isfinite(wide).all():
        raise _cannot_quantize("finite elements", "infinity or NaN in w")
    n, k = wide.shape
    rows, columns = {
        PER_BLOCK: (BLOCK, BLOCK),
        PER_ROW: (1, k),
        PER_MATRIX: (n, k),
    }[per]
    starts = np.arange(0, n, rows), np.arange(0, k, columns)
    most = np.maximum.reduceat(np.abs(wide), starts[0], axis=0)
    most = np.maximum.reduceat(most, starts[1], axis=1)
    scales = most / np.float32(MOST_E4M3)
    scales[scales == 0] = 1
    for i, row in enumerate(starts[0]):
        for j, column in enumerate(starts[1]):
            wide[row : row + rows, column : column + columns] /= scales[i, j]
    np.clip(wide, -MOST_E4M3, MOST_E4M3, out=wide)
    return wide.astype(numpy_dtype(E4M3)), scales


def _cannot_quantize(wanted: str, got: str) -> ArgumentError:
    return ArgumentError(
        "a weight cannot be quantized",
        where="quantize(w)",
        wanted=wanted,
        got=got,
        fix="give a weight of numbers, not yet quantized",
    )


def _on_host(w: Any) -> Any:
    """A contiguous copy in fp32, in NumPy."""
    library = library_of(type(w))
    if library == "torch":
        w = w.detach().float().cpu().numpy()
    elif library == "cupy":
        w = w.get()
    return np.array(w, np.float32, order="C")


def _like(owner: Any, array: Any) -> Any:
    """`array` in the library and on the device of `owner`."""
    library = library_of(type(owner))
    if not library:
        return array
    bits = array.view(np.uint8) if array.itemsize == 1 else array
    if library == "cupy":
        import cupy

        with cupy.cuda.Device(owner.device.id):
            return cupy.asarray(bits)
    torch = sys.modules["torch"]
    tensor = torch.from_numpy(bits).to(owner.device)
    return tensor.view(torch.float8_e4m3fn) if array.itemsize == 1 else tensor
