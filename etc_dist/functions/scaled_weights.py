"""Weights of float8_e4m3fn with scales; CUDA half in
`kernels/functions/scaled_weights.cuh`.

A block is 128 elements of k. y is the sum over blocks, in the order of k, of the scale
times x @ w.T of the block, both in fp32. Codes are widened exactly, and not rounded to
the elements of x after they are scaled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from etc_dist.functions.weight_layouts import weight_columns, weight_shape
from etc_dist.ir import Expr, Graph, Operand, Region, Tensor, ceildiv, span
from etc_dist.ir.tensor import Tile

E4M3, MOST_E4M3 = "float8_e4m3fn", 448
BLOCK = 128
"""Elements of k that share a scale, and rows of w where scales are per block."""
PER_BLOCK, PER_ROW, PER_MATRIX = "block", "row", "matrix"
SCALE_DTYPES = ("float32", "bfloat16")
Place = tuple[Expr | int, ...]
_ROW_BITS = {PER_BLOCK: 7, PER_ROW: 0, PER_MATRIX: 31}


@dataclass(frozen=True)
class Scaling:
    """How weights [n, k] are scaled. per: "block", scales [ceil(n / 128), ceil(k /
    128)]; "row", scales [n, 1]; "matrix", a scale [1, 1]. dtype: of the scales.
    quantizes: x is multiplied as float8, too, with scales [m, ceil(k / 128)] in fp32;
    only with blocks of weights."""

    per: str
    dtype: str
    quantizes: bool = False

    @property
    def w_layout(self) -> str:
        """The name as a layout of weights."""
        quantizes = ", float8 activations" * self.quantizes
        return f"{E4M3} per {self.per}, {self.dtype}{quantizes}"

    def shape(self, n: Any, k: Any) -> tuple[Any, Any]:
        """The shape of the scales."""
        if self.per == PER_BLOCK:
            return ceildiv(n, BLOCK), ceildiv(k, BLOCK)
        return (n, 1) if self.per == PER_ROW else (1, 1)

    def region(self, scales: Tensor, k_span: Any, place: Place = ()) -> Region:
        """The scales of all rows, for all of k, or for a part from a block's first
        element on. place: of the weight in a stack."""
        if self.per == PER_BLOCK and isinstance(k_span, Tile):
            size = ceildiv(k_span.size, BLOCK)
            return scales[(*place, slice(None), span(k_span.start // BLOCK, size))]
        return scales[(*place, slice(None), slice(None))]

    def x_region(
        self, scales: Tensor, rows: Any, k_span: Any, place: Place = ()
    ) -> Region:
        """The scales of some rows of x, for all of k or a part, as `region`."""
        if not isinstance(k_span, Tile):
            return scales[(*place, rows, slice(None))]
        size = ceildiv(k_span.size, BLOCK)
        return scales[(*place, rows, span(k_span.start // BLOCK, size))]

    @property
    def operand(self) -> Operand:
        """The region of the scales of a task."""
        return Operand((None, None), self.dtype, leading=True, by_element=True)

    def operand_of(self, experts: int) -> Operand:
        """Those of all experts."""
        return Operand((experts, None, None), self.dtype, by_element=True)

    @property
    def constants(self) -> dict[str, int]:
        """What the CUDA half reads: rows of w share scales in groups of 1 <<
        kScaleShift."""
        return {
            "kScaleBits": 32 if self.dtype == "float32" else 16,
            "kScaleShift": _ROW_BITS[self.per],
            "kScaleHasBlocks": int(self.per == PER_BLOCK),
            **({"kQuantizes": 1} if self.quantizes else {}),
        }

    def multiply(
        self, x: Any, codes: Any, scales: Any, first_row: int, x_scales: Any = None
    ) -> Any:
        """x @ w.T in fp32. codes: from row `first_row` of the weights on. x_scales: if
        x has codes."""
        rows = np.arange(first_row, first_row + len(codes)) >> _ROW_BITS[self.per]
        wide, scales = codes.astype(np.float32), scales[rows].astype(np.float32)
        sums = np.zeros((len(x), len(codes)), np.float32)
        for start in range(0, x.shape[1], BLOCK):
            of_k = slice(start, start + BLOCK)
            block = start // BLOCK if self.per == PER_BLOCK else 0
            scale = scales[:, block]
            if x_scales is not None:
                scale = x_scales[:, block, None] * scale
            sums += x[:, of_k].astype(np.float32) @ wide[:, of_k].T * scale
        return sums


SCALINGS = {
    scaling.w_layout: scaling
    for per in (PER_BLOCK, PER_ROW, PER_MATRIX)
    for scaling in (Scaling(per, dtype) for dtype in SCALE_DTYPES)
}
"""By the name of the layout."""
FLOAT8_SCALINGS = {
    scaling.w_layout: scaling
    for scaling in (Scaling(PER_BLOCK, dtype, quantizes=True) for dtype in SCALE_DTYPES)
}
"""Those with float8 activations, by the name of the layout."""
ALL_SCALINGS = {**SCALINGS, **FLOAT8_SCALINGS}


BLOCKS = Scaling(PER_BLOCK, "float32")
"""That of decoders."""


def multiply_rows(
    scaling: Scaling | None, x: Any, w: Any, scales: Any, expert: int, first_row: int
) -> Any:
    """x [m, k] @ w[expert].T in fp32. scaling: if w has codes, with scales of all of
    the experts; then w begins with row `first_row` of the weights."""
    if scaling is None:
        return x.astype(np.float32) @ w[expert].astype(np.float32).T
    return scaling.multiply(x, w[expert], scales[expert], first_row)


class ScaledTensor(NamedTuple):
    """The tensors of a weight, or of a stack of weights: codes [..., n, k], and their
    scales. Or of activations: codes [..., m, k], and scales [..., m, ceil(k / 128)]."""

    codes: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[Any, ...]:
        """That of the codes."""
        return self.codes.shape


def scales_name(name: str) -> str:
    """The name of the scales of a weight."""
    return f"{name}_scales"


def weight_input(
    g: Graph,
    name: str,
    w_layout: str,
    n: Any,
    k: Any,
    dtype: str,
    stack: Place = (),
) -> Tensor | ScaledTensor:
    """A weight of `dtype`, an input of `g`, in a layout. If it is scaled, its scales
    are the input {name}_scales. stack: the axes before those of a weight."""
    scaling = ALL_SCALINGS.get(w_layout)
    if scaling is None:
        return g.input(name, (*stack, *weight_shape(w_layout, n, k)), dtype)
    scales = g.input(scales_name(name), (*stack, *scaling.shape(n, k)), scaling.dtype)
    return ScaledTensor(g.input(name, (*stack, n, k), E4M3), scales)


def row_regions(
    w: Tensor | ScaledTensor, place: Place, rows: Sequence[Any]
) -> list[Region]:
    """The regions of spans of rows of a weight in a stack, such as gate and up that
    share one; then those of the scales of each, if it has any."""
    codes = w.codes if isinstance(w, ScaledTensor) else w
    regions = [codes[(*place, of_rows, slice(None))] for of_rows in rows]
    if isinstance(w, ScaledTensor):
        regions += [w.scales[(*place, slice(None), slice(None))]] * len(rows)
    return regions


def weight_regions(
    w_layout: str,
    weights: Sequence[Tensor | ScaledTensor],
    columns: Any,
    k_span: Any = slice(None),
    place: Place = (),
) -> list[Region]:
    """The regions of weights for some columns of y; of all k, or a part. Then those of
    the scales, if they have any. place: of the weights in stacks."""
    scaling = ALL_SCALINGS.get(w_layout)
    codes = [w.codes if isinstance(w, ScaledTensor) else w for w in weights]
    regions = [weight_columns(w_layout, w, columns, k_span, place) for w in codes]
    if scaling is not None:
        scaled = [w for w in weights if isinstance(w, ScaledTensor)]
        regions += [scaling.region(w.scales, k_span, place) for w in scaled]
    return regions
