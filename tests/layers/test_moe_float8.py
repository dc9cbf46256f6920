"""The mixture of experts with float8 weights: the layer, and its CUDA bodies."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import etc_dist
from etc_dist import MoE
from etc_dist.emulate import Emulator
from etc_dist.functions.router import Router
from etc_dist.functions.scaled_weights import (
    PER_BLOCK,
    PER_MATRIX,
    PER_ROW,
    Scaling,
)
from etc_dist.functions.wide_tile import SOME_SCALED
from etc_dist.layers.moe_few_tokens import FEW_TOKENS, most_tokens
from etc_dist.layers.moe_graph import chosen_experts_graph
from etc_dist.schedule import schedule_static
from tests.conftest import kept_proof
from tests.emulate.cases import check
from tests.graphs.mixtures import moe_few_tokens_graph, moe_graph
from tests.graphs.scaled import cancelling_codes, draw_scaled_experts, moe
from tests.layers.reference import draw, moe_reference

BLOCKS = Scaling(PER_BLOCK, "float32")
ROWS, MATRIX = Scaling(PER_ROW, "bfloat16"), Scaling(PER_MATRIX, "float32")
GROUPED = Router(
    2, score="sigmoid", num_groups=2, topk_group=1, has_correction=True, scale=2.5
)


class Drawn:
    """A whole mixture, and what a rank has of it. Its inner size on a rank is no
    multiple of 128: a block has rows of gate and of up."""

    def __init__(self, world, arrays, scaling, dtype, parallel="tensor", shared=0):
        self.rng = rng = np.random.default_rng(7)
        self.world, self.arrays, self.dtype = world, arrays, dtype
        self.is_split = parallel == "tensor"
        ranks, self.hidden, self.inner, num_experts = world.size, 272, 144, 8
        self.router = draw(rng, (num_experts, self.hidden), dtype, self.hidden**-0.5)
        # Of "tensor", each rank's part of the inner width is drawn alone.
        count = num_experts // (1 if self.is_split else ranks)
        parts = [self._draw(scaling, count, self.inner) for _ in range(ranks)]
        self.own_weights = parts[world.rank]
        wide = [[part[name][2] for part in parts] for name in ("gate_up", "down")]
        self.weights = (self.router, *self._joined(wide, self.is_split))
        self.shared = []
        if shared:
            of_ranks = [self._draw(scaling, 1, shared) for _ in range(ranks)]
            of_ranks = of_ranks if self.is_split else of_ranks[:1] * ranks
            own_share = of_ranks[world.rank]
            self.own_weights |= {
                f"shared_{name}": own_share[name] for name in own_share
            }
            wide = [[part[n][2] for part in of_ranks] for n in ("gate_up", "down")]
            wide = wide if self.is_split else [arrays[:1] for arrays in wide]
            self.shared = [w[0] for w in self._joined(wide, self.is_split)]
            self.shared.append(draw(rng, (self.hidden,), dtype, self.hidden**-0.5))

    def _draw(self, scaling, count, inner):
        shapes = {"gate_up": (2 * inner, self.hidden), "down": (self.hidden, inner)}
        return {
            name: draw_scaled_experts(self.rng, count, *shape, scaling)
            for name, shape in shapes.items()
        }

    @staticmethod
    def _joined(wide, is_split):
        gate_ups, downs = wide
        if not is_split:
            return np.concatenate(gate_ups), np.concatenate(downs)
        halves = [np.split(gate_up, 2, axis=1) for gate_up in gate_ups]
        gate_up = np.concatenate([h[n] for n in (0, 1) for h in halves], axis=1)
        return gate_up, np.concatenate(downs, axis=2)

    def layer(self, **options):
        put = {
            name: self.arrays.put_scaled(codes.copy(), scales)
            for name, (codes, scales, _) in self.own_weights.items()
            if not name.startswith("shared")
        }
        if self.shared:
            options["shared"] = tuple(
                self.arrays.put_scaled(codes[0], scales[0])
                for codes, scales, _ in (
                    self.own_weights[f"shared_{name}"] for name in ("gate_up", "down")
                )
            )
            options["shared_gate"] = self.arrays.put(self.shared[2])
        options = {"top_k": 2, "world": self.world, **options}
        router = self.arrays.put(self.router)
        return MoE(router, put["gate_up"], put["down"], **options)

    def check(self, layer, tokens, **options):
        """A call with so many tokens of each rank."""
        ranks, rank = self.world.size, self.world.rank
        x = draw(self.rng, (ranks * tokens, self.hidden), self.dtype)
        own_rows = np.split(x, ranks)[rank]
        y = layer(self.arrays.put(x if self.is_split else own_rows.copy()))
        layer.synchronize()
        router = layer.mixture.router
        answer = moe_reference(
            own_rows, self.weights, router, shared=self.shared, **options
        )
        answer.check(self.arrays.get(y), self.dtype)


@pytest.mark.mpi(ranks=[1])
@pytest.mark.parametrize(
    ("scaling", "dtype", "shared", "deterministic"),
    [
        (BLOCKS, "bfloat16", 0, "run"),
        (BLOCKS, "float16", 80, "batch"),
        (ROWS, "bfloat16", 144, "run"),
        (MATRIX, "float16", 0, "run"),
    ],
    ids=str,
)
def test_a_layer_multiplies_by_scaled_experts(
    scaling, dtype, shared, deterministic, one_rank, arrays
):
    drawn = Drawn(one_rank, arrays, scaling, dtype, shared=shared)
    correction = np.linspace(-0.2, 0.2, 8, dtype=np.float32)
    with drawn.layer(
        top_k=GROUPED, correction=arrays.put(correction), deterministic=deterministic
    ) as layer:
        for tokens in (1, FEW_TOKENS + 1, 40):
            drawn.check(layer, tokens, biases=[correction])
            is_few = tokens <= FEW_TOKENS and deterministic == "run"
            name = "moe_few_tokens_graph" if is_few else "moe_graph"
            assert layer.program.plan.graph.name == name


@pytest.mark.mpi(ranks=[2])
@pytest.mark.parametrize("parallel", ["tensor", "expert"])
def test_ranks_have_their_own_scales(parallel, world, arrays):
    drawn = Drawn(world, arrays, BLOCKS, "bfloat16", parallel, shared=80)
    with drawn.layer(parallel=parallel) as layer:
        for tokens in (3, 40):
            drawn.check(layer, tokens)


@pytest.mark.mpi(ranks=[1])
def test_codes_of_nan_and_scales_of_zero_reach_the_results(one_rank, arrays):
    drawn = Drawn(one_rank, arrays, BLOCKS, "bfloat16")
    for name, wide in zip(("gate_up", "down"), drawn.weights[1:], strict=True):
        codes, scales, _ = drawn.own_weights[name]
        codes.view(np.uint8)[3, 5, 7], wide[3, 5, 7] = 0x7F, np.nan
        scales[4, 0, 0], wide[4, :128, :128] = 0, 0
    with drawn.layer() as layer:
        for tokens in (2, 40):
            x = draw(drawn.rng, (tokens, drawn.hidden), "bfloat16")
            y = arrays.get(layer(arrays.put(x)))
            layer.synchronize()
            answer = moe_reference(x, drawn.weights, 2)
            is_nan = np.isnan(answer.expected)
            assert is_nan.any() or tokens == 2
            assert not is_nan.all()
            np.testing.assert_array_equal(np.isnan(y), is_nan)
            off = np.abs(y - answer.expected)[~is_nan]
            assert (off <= 2**-6 * answer.magnitude[~is_nan] + 1e-6).all()


# Also where down has one block, whose scale might be that of a matrix.
@pytest.mark.mpi(ranks=[1])
@pytest.mark.parametrize(("hidden", "inner"), [(272, 144), (128, 96)])
def test_quantized_experts_come_close_to_their_weights(
    hidden, inner, one_rank, arrays, rng
):
    shapes = {"gate_up": (8, 2 * inner, hidden), "down": (8, hidden, inner)}
    w = {name: draw(rng, s, "bfloat16", s[2] ** -0.5) for name, s in shapes.items()}
    scaled = {name: etc_dist.quantize(weight) for name, weight in w.items()}
    router = draw(rng, (8, hidden), "bfloat16", hidden**-0.5)
    x = draw(rng, (20, hidden), "bfloat16")
    put = [arrays.put_scaled(*pair) for pair in scaled.values()]
    with MoE(arrays.put(router), *put, top_k=2, world=one_rank) as layer:
        y = arrays.get(layer(arrays.put(x)))
        layer.synchronize()
    assert moe_reference(x, (router, *w.values()), 2).error(y) < 0.06


# The CUDA bodies.

few_graph = moe_few_tokens_graph
SIZES = (8, 272, 208)
"""Experts, hidden and inner: up begins within a block of scales."""


@pytest.mark.parametrize(
    ("graph", "tokens", "scaling", "dtype", "shared"),
    [
        (few_graph, 3, BLOCKS, "bfloat16", 144),
        (few_graph, 1, ROWS, "float16", 0),
        (moe_graph, 3, BLOCKS, "bfloat16", 0),
        (moe_graph, 24, replace(BLOCKS, dtype="bfloat16"), "bfloat16", 0),
        (moe_graph, 70, BLOCKS, "float16", 144),
    ],
    ids=["few blocks shared", "few rows", "16 rows", "32 rows", "128 rows shared"],
)
def test_the_cuda_bodies_multiply_by_scaled_experts(
    graph, tokens, scaling, dtype, shared
):
    options = {"shared": "gated"} if shared else {}
    options |= {"product_tasks": 12} if graph is few_graph else {}
    program = graph(
        1, experts=8, top_k=2, dtype=dtype, w_layout=scaling.w_layout, **options
    )
    operands = moe(tokens, SIZES, scaling, dtype, shared)
    check(Emulator(program, workers=2), *operands, dtype, seeds=[0])


def test_the_cuda_bodies_of_packed_rows_and_of_ranks(rng):
    graph = moe_graph(1, experts=8, top_k=2, packs=True, w_layout=BLOCKS.w_layout)
    check(Emulator(graph, workers=2), *moe(40, SIZES, BLOCKS), seeds=[0])


def test_a_token_has_the_same_bits_for_any_number_of_tokens(rng):
    """Where sums over k cancel: what is left is the rounding in its order."""
    hidden, inner = 512, 64
    router = draw(rng, (2, hidden), "bfloat16")
    x, gate_up, scales = cancelling_codes(rng, 70, 2 * inner, BLOCKS)
    down = draw_scaled_experts(rng, 2, hidden, inner, BLOCKS)
    arrays = {
        "router": router,
        "gate_up": np.stack([gate_up] * 2),
        "gate_up_scales": np.stack([scales] * 2),
        "down": down[0],
        "down_scales": down[1],
    }
    graph = moe_graph(1, experts=2, top_k=1, in_order=True, w_layout=BLOCKS.w_layout)
    emulator, bits = Emulator(graph, workers=2), set()
    for tokens in (1, SOME_SCALED.rows, 70):
        dims = {"tokens": tokens, "hidden": hidden, "inner": inner}
        [outputs] = emulator.run([arrays | {"x": x[:tokens].copy()}], dims)
        bits.add(outputs["y"][0].tobytes())
    assert len(bits) == 1


@pytest.mark.parametrize(
    ("graph", "tokens"), [(few_graph, 4), (moe_graph, 16), (moe_graph, 4096)]
)
def test_programs_of_float8_are_proved(graph, tokens):
    """At the sizes of Qwen3-30B-A3B."""
    plan = schedule_static(graph(1, experts=128, top_k=8, w_layout=BLOCKS.w_layout))
    kept_proof(plan, {"tokens": tokens, "hidden": 2048, "inner": 768}, 132)


def test_twice_as_many_tokens_are_few():
    assert most_tokens(8, 2048, 768, is_scaled=True) == 9  # qwen3-30b-a3b: 4 of 16 bits


def test_the_program_of_chosen_experts_takes_scaled_ones(rng):
    [arrays], _, dims = moe(40, SIZES, BLOCKS)
    graph = chosen_experts_graph(1, experts=8, top_k=2, w_layout=BLOCKS.w_layout)
    logits = arrays["x"].astype(np.float64) @ arrays.pop("router").astype(np.float64).T
    ids, weights = Router(2).choose(logits)
    _, [answer], _ = moe(40, SIZES, BLOCKS)
    choices = {"ids": ids.astype(np.int32), "weights": weights.astype(np.float32)}
    [outputs] = Emulator(graph, workers=2).run([arrays | choices], dims)
    answer.check(outputs["y"])
