"""Float8 weights with scales, and matmuls by them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from etc_dist.functions.quantize_rows import quantized
from etc_dist.functions.scaled_weights import E4M3, PER_BLOCK, Scaling
from etc_dist.functions.tile_shape import TileShape
from etc_dist.functions.weight_layouts import silu
from etc_dist.ir import GraphFunction
from etc_dist.ir.tensor import numpy_dtype
from etc_dist.ops.tile_model import Tiling, dims_of
from tests.emulate.cases import Example
from tests.layers.reference import Answer, Host, draw, moe_reference, reference

BLOCK = 128
TURNS, NARROW_TURNS = (TileShape(r, 64, swapped=True) for r in (64, 8))
HALVES, TALL = (TileShape(r, 128, swapped=True) for r in (16, 128))
KINDS = (NARROW_TURNS, TURNS, HALVES, TALL)
"""The warpgroups multiply alternate blocks of k, or each all blocks of a stage, of
which tall tiles have one. Tiles of up to 16 rows multiply without wgmma."""


def expanded(scales: Host, n: int, k: int) -> Host:
    """The scale of each element of a weight, in fp64."""
    wide = scales.astype(np.float64)
    if len(scales) in (1, n) and scales.shape[1] == 1:
        return np.broadcast_to(wide, (n, k))
    return wide.repeat(BLOCK, 0).repeat(BLOCK, 1)[:n, :k]


def draw_scaled(
    rng: Any, n: int, k: int, scaling: Scaling, deviation: float = 2**-6
) -> tuple[Host, Host, Host]:
    """Codes of numbers of all sizes, scales of both signs, and the weight in fp64.
    deviation: of the scales."""
    bits = rng.integers(0, 0x7F, (n, k)) | rng.integers(0, 2, (n, k)) << 7
    codes = bits.astype(np.uint8).view(numpy_dtype(E4M3))
    shape = {"row": (n, 1), "matrix": (1, 1)}.get(scaling.per)
    if scaling.per == PER_BLOCK:
        shape = -(-n // BLOCK), -(-k // BLOCK)
    assert shape is not None
    scales = draw(rng, shape, scaling.dtype, deviation)
    return codes, scales, codes.astype(np.float64) * expanded(scales, n, k)


def draw_scaled_experts(
    rng: Any, experts: int, n: int, k: int, scaling: Scaling
) -> tuple[Host, Host, Host]:
    """The same of each expert, with small scales."""
    drawn = [draw_scaled(rng, n, k, scaling, 2**-12) for _ in range(experts)]
    codes, scales, w = (np.stack(arrays) for arrays in zip(*drawn, strict=True))
    return codes, scales, w


def answer_of(x: Host, w: Host) -> Answer:
    """x @ w.T in fp64."""
    x = x.astype(np.float64)
    return Answer(x @ w.T, np.abs(x) @ np.abs(w).T)


def dequantized_rows(x: Host) -> Host:
    """What the codes of the rows of x are of, in fp64."""
    codes, scales = quantized(x)
    wide = scales.astype(np.float64).repeat(BLOCK, 1)[:, : x.shape[1]]
    exact: Host = codes.astype(np.float64) * wide
    return exact


Sizes = tuple[int, int, int]


def _products(
    sizes: Sizes, scaling: Scaling, names: Sequence[str], dtype: str
) -> tuple[dict[str, Any], list[Answer]]:
    """x and weights of m, n and k, and x times each weight."""
    (m, n, k), rng = sizes, np.random.default_rng(sizes)
    x, answers = draw(rng, (m, k), dtype, k**-0.5), []
    exact = dequantized_rows(x) if scaling.quantizes else x
    inputs: dict[str, Any] = {"x": x}
    for name in names:
        codes, scales, w = draw_scaled(rng, n, k, scaling)
        inputs |= {name: codes, f"{name}_scales": scales}
        answers.append(answer_of(exact, w))
    return inputs, answers


def _dims(sizes: Sizes, tiling: Tiling) -> dict[str, int]:
    return {**dict(zip("mnk", sizes, strict=True)), **dims_of(tiling)}


def multiplied(
    sizes: Sizes, scaling: Scaling, tiling: Tiling, dtype: str = "bfloat16"
) -> Example:
    """For matmul_graph."""
    inputs, answers = _products(sizes, scaling, ["w"], dtype)
    return [inputs], answers, _dims(sizes, tiling)


def gated(
    sizes: Sizes, scaling: Scaling, tiling: Tiling, dtype: str = "bfloat16"
) -> Example:
    """For gated_parts."""
    inputs, (left, right) = _products(sizes, scaling, ["gate", "up"], dtype)
    active = silu(left.expected)
    # The slope of silu is at most 1.1.
    magnitude = np.abs(active) * right.magnitude
    magnitude += 1.1 * left.magnitude * np.abs(right.expected)
    answer = Answer(active * right.expected, magnitude)
    return [inputs], [answer], _dims(sizes, tiling)


def tilings(number: int, columns: int, parts: int) -> Iterator[Tiling]:
    """Whole tiles, and ones whose last column is divided into parts of k."""
    for split in (0, 1):
        yield Tiling(number, columns, split, parts if split else 1)


def blocks_by_hand(rows: int) -> tuple[dict[str, Host], Host, tuple[int, int, int]]:
    """x of ones, codes of ones, and scales that are powers of two, 0 and NaN, of blocks
    in which tiles begin; y of fp64 from x; and sizes."""
    n, k = 392, 528
    scales = np.exp2(np.arange(4 * 5).reshape(4, 5) % 9 - 4).astype(np.float32)
    scales[1, 1], scales[2, 3], scales[3, 4] = 0, np.nan, -2
    of_blocks = np.repeat(scales, [128, 128, 128, 8], 0) * [128, 128, 128, 128, 16]
    arrays = {
        "x": np.ones((rows, k), numpy_dtype("bfloat16")),
        "w": np.ones((n, k), numpy_dtype(E4M3)),
        "w_scales": scales,
    }
    return arrays, of_blocks, (rows, n, k)


def cancelling_codes(
    rng: Any, m: int, n: int, scaling: Scaling
) -> tuple[Host, Host, Host]:
    """x, codes and scales whose products cancel: what is left of a sum is the rounding
    in its order."""
    codes, scales, _ = draw_scaled(rng, n, 256, scaling)
    x = rng.standard_normal((m, 256)).astype(numpy_dtype("bfloat16"))
    twice = (np.concatenate(pair, 1) for pair in ((x, x), (codes, -codes)))
    return *twice, np.concatenate([scales, scales], 1)


def quantized_mlp(x: Host, gate: Host, up: Host, down: Host) -> Answer:
    """The MLP with float8 activations, by weights in fp64."""
    rows = dequantized_rows(x)
    gate_rows = answer_of(rows, gate).expected
    active = (silu(gate_rows) * answer_of(rows, up).expected).astype(x.dtype)
    return answer_of(dequantized_rows(active), down)


def products_of_ranks(
    graph: GraphFunction, kind: str, dims: Mapping[str, int], scaling: Scaling
) -> tuple[list[dict[str, Any]], list[Answer]]:
    """Each rank's x and weight for a collective of this graph, and y. kind: "gather" of
    x, "scatter" of the sum over ranks, or "sum"."""
    rng, ranks = np.random.default_rng(dims["k"]), graph.world_size
    env = graph.environment(dims, 0)
    x_shape, y_shape, w_shape = (
        tuple(int(extent.evaluate(env)) for extent in graph.tensor(name).shape)
        for name in ("x", "y", "w")
    )
    inputs, weights, exact = [], [], []
    for _ in range(ranks):
        x = draw(rng, x_shape, "bfloat16", 0.1)
        codes, scales, w = draw_scaled(rng, *w_shape, scaling)
        inputs.append({"x": x, "w": codes, "w_scales": scales})
        weights.append(w)
        exact.append(dequantized_rows(x.reshape(-1, x_shape[-1])))
    if kind == "gather":
        answers = [answer_of(np.concatenate(exact), w) for w in weights]
    else:
        terms = [answer_of(*pair) for pair in zip(exact, weights, strict=True)]
        sums = sum(a.expected for a in terms), sum(a.magnitude for a in terms)
        parts = [np.split(s, ranks if kind == "scatter" else 1) for s in sums]
        answers = [
            Answer(*(part[rank % len(part)] for part in parts)) for rank in range(ranks)
        ]
    return inputs, [
        Answer(a.expected.reshape(y_shape), a.magnitude.reshape(y_shape))
        for a in answers
    ]


def quantized_mlps(
    xs: Sequence[Host], shares: Sequence[tuple[Host, Host, Host]]
) -> list[Answer]:
    """Those of several ranks: the sum over their shares of the weights."""
    terms = [quantized_mlp(np.concatenate(xs), *share) for share in shares]
    sums = sum(a.expected for a in terms), sum(a.magnitude for a in terms)
    parts = (np.split(s, len(xs)) for s in sums)
    return [Answer(*pair) for pair in zip(*parts, strict=True)]


def mlp(
    ranks: int, rows: int, hidden: int, inner: int, scaling: Scaling, *tilings: Tiling
) -> Example:
    """For mlp_tiles_graph. tilings: of gate_up and of down."""
    rng, shares, inputs = np.random.default_rng(3), [], []
    for _ in range(ranks):
        arrays: dict[str, Any] = {"x": draw(rng, (rows, hidden), "bfloat16", 0.5)}
        share = []
        for name in ("gate", "up", "down"):
            shape = (hidden, inner) if name == "down" else (inner, hidden)
            codes, scales, w = draw_scaled(rng, *shape, scaling, 2**-12)
            arrays |= {name: codes, f"{name}_scales": scales}
            share.append(w)
        inputs.append(arrays)
        shares.append((share[0], share[1], share[2]))
    dims = {"rows": rows, "hidden": hidden, "inner": inner}
    for name, tiling in zip(("gate_up_", "down_"), tilings, strict=True):
        dims |= dims_of(tiling, name)
    xs = [arrays["x"] for arrays in inputs]
    if scaling.quantizes:
        return inputs, quantized_mlps(xs, shares), dims
    return inputs, reference(xs, shares), dims


def moe(
    tokens: int,
    sizes: tuple[int, int, int],
    scaling: Scaling,
    dtype: str = "bfloat16",
    shared: int = 0,
) -> Example:
    """For a mixture on one rank. sizes: experts, hidden and inner. shared: the inner
    size of a shared expert with a gate."""
    experts, hidden, inner = sizes
    rng = np.random.default_rng([tokens, *sizes])
    x = draw(rng, (tokens, hidden), dtype)
    arrays = {"x": x, "router": draw(rng, (experts, hidden), dtype, hidden**-0.5)}
    dims = {"tokens": tokens, "hidden": hidden, "inner": inner}
    weights: dict[str, Host] = {}
    of_experts = {"": (experts, inner)} | ({"shared_": (1, shared)} if shared else {})
    for prefix, (count, width) in of_experts.items():
        shapes = {"gate_up": (2 * width, hidden), "down": (hidden, width)}
        for name, shape in shapes.items():
            drawn = draw_scaled_experts(rng, count, *shape, scaling)
            name = prefix + name
            arrays[name], arrays[f"{name}_scales"], weights[name] = drawn
    of_shared = []
    if shared:
        dims["shared_inner"] = shared
        arrays["shared_gate"] = draw(rng, (1, hidden), dtype, hidden**-0.5)
        names = "shared_gate_up", "shared_down"
        of_shared = [*(weights[name][0] for name in names), arrays["shared_gate"][0]]
    wide = arrays["router"], weights["gate_up"], weights["down"]
    return [arrays], [moe_reference(x, wide, 2, shared=of_shared)], dims
