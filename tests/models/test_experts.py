"""A decoder with experts: the CUDA bodies, for few rows and for many."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import etc_dist
from etc_dist.emulate import Emulator
from etc_dist.functions.router import Router
from etc_dist.functions.tile_shape import TileShape
from etc_dist.ir.tensor import numpy_dtype
from etc_dist.models.config import ModelConfig
from etc_dist.models.decoder import decoder_for, decoder_graph
from etc_dist.models.experts import DecoderMixture
from etc_dist.models.part import Part
from etc_dist.models.sizes import DecoderSizes
from etc_dist.models.weights import load_weights
from tests.functions.compiled import check_wgmmas
from tests.models.references import (
    HY,
    MIXTRAL,
    QWEN_2_MOE,
    QWEN_MOE,
    Plain,
    draw_folder,
)
from tests.models.steps import share_dims, tile_dims
from tests.models.test_decoder import MOST_PAGES, PAGES, REQUESTS, VOCABULARY, rows_of

SHAPES = (
    TileShape(8, 64, swapped=True),
    TileShape(16, 64, swapped=True),
    TileShape(128, 112),
)
SMALL = {"hidden_size": 72, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
QWEN = QWEN_MOE | SMALL | {"moe_intermediate_size": 40, "num_attention_heads": 2}
SPLIT = QWEN | {"moe_intermediate_size": 48, "vocab_size": 528}
"""For two ranks."""
SHARED = QWEN_2_MOE | SMALL | {"moe_intermediate_size": 48, "vocab_size": 528}
SHARED |= {"num_attention_heads": 2, "hidden_size": 128}
SHARED |= {"shared_expert_intermediate_size": 80}
"""With a shared expert, for two ranks."""
DENSE = HY | SMALL | {"moe_intermediate_size": 48, "vocab_size": 528}
DENSE |= {"num_attention_heads": 2, "intermediate_size": 176}
DENSE |= {"mlp_layer_types": ["dense", "sparse"]}
"""With a dense layer and a shared expert, for two ranks."""
BARE = DENSE | {"num_shared_experts": 0}
WHOLE = DENSE | {"moe_intermediate_size": 40}
"""The same, of which ranks have whole experts."""
FEW = (0.0,) * 4 + (-30.0,) * 28
exhaustive = pytest.mark.exhaustive
EMULATED = [
    # The rows of each request, the tiles of all matmuls.
    ([1], 0),
    ([10, 1], 0),
    ([4, 13], 1),
    ([3, 4], 2),
]


def shapes_of(steps: list[tuple[list[int], int]]) -> tuple[TileShape, ...]:
    """Those up to the last one that a step has."""
    return SHAPES[: 1 + max(shape for _, shape in steps)]


def step_of(
    config: ModelConfig, counts: list[int], shape: int, rng: np.random.Generator
) -> tuple[dict[str, Any], dict[str, int]]:
    """The arrays and the dims of a first step with `counts` positions of each request,
    without weights."""
    assert config.mixture is not None
    rows = [(r, at) for r, count in enumerate(counts) for at in range(count)]
    request, position = rng.permutation(np.array(rows, np.int32)).T
    pages = (config.layers, PAGES, 2, config.kv_heads, 16, config.head_dim)
    table = rng.permutation(PAGES)[: REQUESTS * MOST_PAGES]
    ids = rng.integers(config.vocabulary, size=len(rows))
    ids_of_experts = np.full(
        (config.layers, len(rows), config.mixture.router.top_k), -9, np.int32
    )
    logits = np.full((len(rows), config.vocabulary), np.nan, numpy_dtype("bfloat16"))
    arrays = rows_of(ids, request, position) | {
        "logits": logits,
        "experts": ids_of_experts,
        **config.tables(MOST_PAGES * 16),
        "table": table.reshape(REQUESTS, MOST_PAGES).astype(np.int32),
        "cache": np.full(pages, np.nan, numpy_dtype("bfloat16")),
    }
    dims = {
        "rows": len(rows),
        "outputs": len(rows),
        "steps": 1,
        "stops": 1,
        "samples": 0,
        "layers": config.layers,
        "hidden": config.hidden,
    }
    dims |= {"inner": config.inner, "vocabulary": config.vocabulary}
    dims |= share_dims(1)
    if config.shared_inner:
        dims["shared_inner"] = config.shared_inner
    if config.dense_layers:
        dims |= {"dense_layers": config.dense_layers, "dense_inner": config.dense_inner}
        dims["sparse_layers"] = config.layers - config.dense_layers
    dims |= {"positions": MOST_PAGES * 16, "requests": REQUESTS}
    dims |= {"most_pages": MOST_PAGES, "pages": PAGES}
    names = config.sizes(16).matmuls
    return arrays, dims | tile_dims(SHAPES, dict.fromkeys(names, shape))


@pytest.mark.parametrize(
    ("settings", "schedule", "preference", "ranks", "steps"),
    [
        (DENSE, "static", (), 2, EMULATED[1:2]),
        pytest.param(DENSE, "static", (), 1, EMULATED, marks=exhaustive),
        pytest.param(DENSE, "dynamic", (), 2, EMULATED, marks=exhaustive),
        pytest.param(BARE, "static", (), 1, EMULATED, marks=exhaustive),
        pytest.param(BARE, "dynamic", (), 2, EMULATED[1:3], marks=exhaustive),
        pytest.param(WHOLE, "static", (), 2, EMULATED[1:3], marks=exhaustive),
        pytest.param(SHARED, "static", (), 2, EMULATED[1:2], marks=exhaustive),
        pytest.param(SPLIT, "static", (), 2, EMULATED[1:2], marks=exhaustive),
        pytest.param(SPLIT, "static", (), 2, EMULATED[2:3], marks=exhaustive),
        pytest.param(QWEN, "static", (), 1, EMULATED[1::2], marks=exhaustive),
        pytest.param(QWEN, "static", FEW, 1, EMULATED, marks=exhaustive),
        pytest.param(QWEN, "dynamic", (), 1, EMULATED, marks=exhaustive),
        pytest.param(SPLIT, "dynamic", FEW, 2, EMULATED[1::2], marks=exhaustive),
        pytest.param(SHARED, "static", (), 1, EMULATED, marks=exhaustive),
        pytest.param(SHARED, "static", FEW, 2, EMULATED[1:3], marks=exhaustive),
        pytest.param(SHARED, "dynamic", (), 1, EMULATED, marks=exhaustive),
        pytest.param(MIXTRAL | SMALL, "static", (), 1, EMULATED, marks=exhaustive),
    ],
)
def test_the_cuda_bodies_agree_in_any_order(
    settings, schedule, preference, ranks, steps, tmp_path, rng
):
    config = draw_folder(tmp_path, rng, settings, preference)
    parts = [Part(rank, ranks, settings is WHOLE) for rank in range(ranks)]
    part_config = parts[0].config(config)
    weights = [load_weights(tmp_path, config, "bfloat16", part) for part in parts]
    shapes = shapes_of(steps)
    graph = decoder_graph(
        ranks, sizes=part_config.sizes(16), shapes=shapes, best_columns=64
    )
    emulator = Emulator(graph, schedule=schedule, workers=4)
    check_steps(emulator, weights, part_config, Plain(tmp_path, config), steps, rng)


@exhaustive
def test_the_cuda_bodies_choose_as_the_router_says(tmp_path, rng):
    config = draw_folder(tmp_path, rng, QWEN, ())
    router = Router(4, score="sigmoid", scale=1.5, num_groups=4, topk_group=2)
    router = replace(router, has_correction=True, has_bias=True)
    config = replace(config, mixture=DecoderMixture(32, router))
    plain = Plain(tmp_path, config)
    shape = config.layers, 32
    biases = {name: rng.standard_normal(shape) / 4 for name in router.bias_names}
    biases = {name: bias.astype(np.float32) for name, bias in biases.items()}
    plain.biases = [*biases.values()]
    weights = [load_weights(tmp_path, config, "bfloat16", Part(0, 1)) | biases]
    graph = decoder_graph(1, sizes=config.sizes(16), shapes=SHAPES, best_columns=64)
    emulator = Emulator(graph, workers=4)
    check_steps(emulator, weights, config, plain, EMULATED[1:3], rng)


def check_steps(
    emulator: Emulator,
    weights: list[dict[str, Any]],
    part_config: ModelConfig,
    plain: Plain,
    steps: list[tuple[list[int], int]],
    rng: np.random.Generator,
) -> None:
    """Steps of a decoder, whose ranks have these weights, against NumPy."""
    for step_idx, (counts, shape) in enumerate(steps):
        step, dims = step_of(part_config, counts, shape, rng)
        dims |= {"all_ids": plain.config.vocabulary}
        every = [
            of_rank | {n: a.copy() for n, a in step.items()} for of_rank in weights
        ]
        results = emulator.run(every, dims, seed=step_idx)
        logits = np.concatenate([outputs["logits"] for outputs in results], axis=1)
        experts, next_ids = results[0]["experts"], results[0]["next_ids"]
        for outputs in results:
            np.testing.assert_array_equal(outputs["experts"], experts)
            np.testing.assert_array_equal(outputs["next_ids"], next_ids)
        np.testing.assert_array_equal(next_ids[0], logits.argmax(axis=1))
        for r in range(len(counts)):
            rows = np.flatnonzero(step["request"] == r)
            rows = rows[np.argsort(step["position"][rows])]
            ids, ids_of_experts = step["ids"][rows].tolist(), experts[:, rows]
            expected = plain.logits(ids, plain.start(), ids_of_experts)
            off = np.linalg.norm(logits[rows].astype(np.float32) - expected)
            assert off <= 0.02 * np.linalg.norm(expected)
    assert plain.gap < 0.05


@exhaustive
@pytest.mark.parametrize("schedule", ["static", "dynamic"])
@pytest.mark.parametrize(
    "kind", [{}, {"shared": "plain", "has_dense": True}, {"shared": "gated"}]
)
def test_a_program_of_all_tiles_has_at_most_a_megabyte(kind, schedule):
    mixture = DecoderMixture(128, Router(8), **kind)
    graph = decoder_for(schedule, 1, DecoderSizes(32, 4, 128, mixture=mixture))
    binary = etc_dist.build(graph, target="sm_90a", schedule=schedule)
    assert len(binary.cubin) <= 2**20
    # Without wgmmas that are serialized and lambdas that are not inlined.
    assert binary.spill_bytes <= 40 and binary.remarks == ()
    check_wgmmas(binary.cubin)
