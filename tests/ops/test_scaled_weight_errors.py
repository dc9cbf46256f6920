"""Float8 weights that do not fit: refused before a launch."""

from __future__ import annotations

import numpy as np
import pytest

import etc_dist
from etc_dist import (
    MLP,
    AllGatherMatmul,
    Matmul,
    MatmulAllReduce,
    MatmulAllReduceNorm,
    MatmulReduceScatter,
    MoE,
    ScaledWeight,
)
from etc_dist.errors import ArgumentError
from etc_dist.functions.scaled_weights import E4M3
from etc_dist.ir.tensor import numpy_dtype
from tests.refusals import refused

pytestmark = pytest.mark.mpi(ranks=[1])

N, K = 264, 144


def ones(shape, dtype):
    return np.ones(shape, numpy_dtype(dtype))


CODES = ones((N, K), E4M3)
FIT = "the scales of w do not fit its codes|codes [n, k] of float8_e4m3fn, and scales"
TABLE = [
    (CODES, f"or a ScaledWeight|got: w [{N}, {K}] float8_e4m3fn on cpu, without"),
    (ScaledWeight(CODES, ones((5, 3), "float32")), f"{FIT}|w_scales [5, 3] float32"),
    (ScaledWeight(CODES, ones((3, 2), "float16")), f"{FIT}|w_scales [3, 2] float16"),
    (ScaledWeight(CODES, ones((3, 2), "uint8")), f"{FIT}|w_scales [3, 2] uint8"),
    (ScaledWeight(CODES, ones((K,), "float32")), f"{FIT}|w_scales [{K}] float32"),
    (
        ScaledWeight(ones((N, K), "bfloat16"), ones((N,), "float32")),
        f"{FIT}|got: w [{N}, {K}] bfloat16 on cpu; w_scales",
    ),
    (
        ScaledWeight(ones((K, N), E4M3).T, ones((N,), "float32")),
        f"w [n = {N}, k = {K}] float8_e4m3fn, contiguous|transposed",
    ),
    (
        ScaledWeight(CODES, ones((3, 4), "float32")[:, ::2]),
        "w_scales [3, 2] float32, contiguous|not contiguous",
    ),
    (ScaledWeight(ones((N, 8), E4M3), ones((), "float32")), f"k = {K}] float8_e4m3fn"),
]


@pytest.mark.parametrize(("w", "words"), TABLE)
def test_weights_that_do_not_fit_are_refused(w, words, cpu_world):
    with Matmul(world=cpu_world) as op:
        refused(lambda: op(ones((5, K), "bfloat16"), w), words, ArgumentError)


NOT_BLOCKS = "weights with scales of blocks of 128 x 128, for float8 activations"


@pytest.mark.parametrize(
    ("w", "words"),
    [
        (ones((N, K), "bfloat16"), f"got: x [5, {K}] bfloat16 on cpu; w [{N}, {K}] bf"),
        (ones((K, N), "bfloat16").T, f"w [{N}, {K}] bfloat16"),
        (ScaledWeight(CODES, ones((N,), "float32")), f"w_scales [{N}] float32"),
        (ScaledWeight(CODES, ones((), "float32")), "w_scales [] float32"),
    ],
)
@pytest.mark.parametrize(
    "kind", [Matmul, AllGatherMatmul, MatmulReduceScatter, MatmulAllReduce]
)
def test_float8_activations_need_weights_with_scales_of_blocks(
    kind, w, words, cpu_world
):
    with kind(world=cpu_world, activations="float8") as op:
        x, words = ones((5, K), "bfloat16"), f"{NOT_BLOCKS}|{words}"
        refused(lambda: op(x, w), words, ArgumentError)


def test_activations_that_do_not_exist_are_refused(cpu_world):
    words = (
        "unknown activations|wanted: '16-bit' or 'float8'|got: activations = 'float16'"
    )
    for kind in (Matmul, MatmulReduceScatter, MatmulAllReduceNorm):
        refused(
            lambda k=kind: k(world=cpu_world, activations="float16"),
            words,
            ArgumentError,
        )
    with pytest.raises(TypeError, match="activations"):
        Matmul(world=cpu_world, activations=8)


def test_outputs_do_not_overlap_scales(cpu_world):
    memory = np.ones(4 * N, np.uint8)
    scales = memory.view(np.float32)
    out = memory.view(numpy_dtype("bfloat16")).reshape(2, N)
    with Matmul(world=cpu_world) as op:
        x, w = ones((2, K), "bfloat16"), ScaledWeight(CODES, scales)
        words = "wanted: out apart from w_scales|got: out overlaps w_scales"
        refused(lambda: op(x, w, out), words, ArgumentError)


OF_EXPERTS = {"gate_up": ones((8, 64, 144), E4M3), "down": ones((8, 144, 32), E4M3)}


@pytest.mark.parametrize(
    ("scales", "words"),
    [
        ((None, (8, 1, 1)), "got: gate_up [8, 64, 144] float8_e4m3fn on cpu, without"),
        (((8, 1, 2), None), "or a ScaledWeight|got: down [8, 144, 32] float8_e4m3fn"),
        (((8, 1, 2), (8, 144)), "scales of one kind and dtype, or all without"),
        (((1, 2), (2, 1)), "do not fit its codes|of experts both with their number"),
        (((8, 2, 2), (8, 2, 1)), "the scales of gate_up do not fit its codes"),
        (((), ()), "the scales of gate_up do not fit its codes"),
    ],
)
def test_scales_of_experts_that_do_not_fit_are_refused(scales, words, cpu_world):
    weights = [
        codes if shape is None else ScaledWeight(codes, ones(shape, "float32"))
        for codes, shape in zip(OF_EXPERTS.values(), scales, strict=True)
    ]
    router = ones((8, 144), "bfloat16")
    refused(
        lambda: MoE(router, *weights, top_k=2, world=cpu_world), words, ArgumentError
    )


def test_a_shared_expert_has_scales_as_the_others(cpu_world):
    scaled = [
        ScaledWeight(codes, ones((8, 1, 1), "float32")) for codes in OF_EXPERTS.values()
    ]
    shared = ones((64, 144), "bfloat16"), ones((144, 32), "bfloat16")
    router = ones((8, 144), "bfloat16")
    refused(
        lambda: MoE(router, *scaled, top_k=2, shared=shared, world=cpu_world),
        "scales of one kind and dtype, or all without|no scales",
        ArgumentError,
    )


def test_the_weights_of_an_mlp_are_scaled_alike(cpu_world):
    gate, down = ScaledWeight(CODES, ones((N,), "float32")), ones((K, N), E4M3)
    words = "scales of one kind and dtype, or all without|got: float8_e4m3fn per "
    for scales in (ones((), "float32"), ones((K,), "bfloat16")):
        weights = gate, gate, ScaledWeight(down, scales)
        refused(lambda w=weights: MLP(*w, world=cpu_world), words, ArgumentError)
    mixed = ones((N, K), "bfloat16"), gate, ScaledWeight(down, ones((K,), "float32"))
    refused(lambda: MLP(*mixed, world=cpu_world), "no scales", ArgumentError)


@pytest.mark.parametrize(
    ("w", "words"),
    [
        (CODES, "w [N, K] or [E, N, K] of float32, bfloat16, float16|float8_e4m3fn"),
        (ones((4,), "float32"), "w [N, K] or [E, N, K] of|got: w [4] float32"),
        (ones((0, 4), "float32"), "w [N, K] or [E, N, K] of|got: w [0, 4] float32"),
        (np.full((2, 2), np.inf, np.float32), "finite elements|infinity or NaN"),
        (np.full((2, 2), np.nan, np.float16), "finite elements|infinity or NaN"),
    ],
)
def test_weights_that_cannot_be_quantized_are_refused(w, words):
    words = f"a weight cannot be quantized|where: quantize(w)|{words}"
    refused(lambda: etc_dist.quantize(w), words, ArgumentError)


def test_a_scale_is_per_block_row_or_matrix():
    words = "unknown per|'block' or 'row' or 'matrix'"
    refused(lambda: etc_dist.quantize(CODES, per="column"), words, ArgumentError)
