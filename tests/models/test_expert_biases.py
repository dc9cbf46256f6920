"""A decoder with biases of the router and of experts, and attention sinks: the CUDA
bodies give what the NumPy bodies give, which test_families.py compares with others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from etc_dist.emulate import Emulator
from etc_dist.ir.tensor import numpy_dtype
from etc_dist.models.config import parse_config
from etc_dist.models.decoder import decoder_graph
from etc_dist.models.part import Part
from etc_dist.models.weights import FLOAT32, weight_shapes
from etc_dist.runtime.cpu import simulate
from tests.models.test_decoder import VOCABULARY
from tests.models.test_experts import shapes_of, step_of

GIVEN = {
    "model_type": "gpt_oss",
    "head_dim": 64,
    "hidden_size": 72,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "swiglu_limit": 0.5,
    "sliding_window": 5,
    "vocab_size": VOCABULARY,
}
DTYPE = "float16"
"""Rounding then hardly ever changes the choice of an expert."""
STEPS = [([10, 1], 0), ([4, 13], 1), ([3, 4], 2)]
"""The rows of each request, the tiles of all matmuls."""
exhaustive = pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("schedule", "ranks", "steps"),
    [
        ("static", 2, STEPS[1:2]),
        pytest.param("static", 1, STEPS, marks=exhaustive),
        pytest.param("static", 2, STEPS, marks=exhaustive),
        pytest.param("dynamic", 1, STEPS, marks=exhaustive),
        pytest.param("dynamic", 2, STEPS[1:2], marks=exhaustive),
    ],
)
def test_the_cuda_bodies_agree(schedule, ranks, steps, rng):
    whole = parse_config(GIVEN, Path("config.json"))
    parts = [Part(rank, ranks) for rank in range(ranks)]
    part_config = parts[0].config(whole)
    sizes = part_config.sizes(16, DTYPE)
    graph = decoder_graph(ranks, sizes=sizes, shapes=shapes_of(steps), best_columns=64)
    emulator = Emulator(graph, schedule=schedule, workers=4)
    weights = [drawn(whole, part, rng) for part in parts]
    for name in ("embedding", "norm", "mlp_norm", "router", "o_bias"):
        weights[-1][name] = weights[0][name]  # those that all ranks have in common
    for step_idx, (counts, shape) in enumerate(steps):
        step, dims = step_of(part_config, counts, shape, rng)
        dims |= {"all_ids": whole.vocabulary}
        step |= {n: step[n].astype(DTYPE) for n in ("logits", "cache")}
        every = [
            of_rank | {n: a.copy() for n, a in step.items()} for of_rank in weights
        ]
        references = simulate(emulator.plan, every, dims).outputs
        results = emulator.run(every, dims, seed=step_idx)
        for outputs, reference in zip(results, references, strict=True):
            np.testing.assert_array_equal(outputs["experts"], reference["experts"])
            logits, exact = (
                of["logits"].astype(np.float32) for of in (outputs, reference)
            )
            assert np.linalg.norm(logits - exact) <= 0.005 * np.linalg.norm(exact)


def drawn(whole: Any, part: Part, rng: np.random.Generator) -> dict[str, Any]:
    """Random weights of a part, of which the padding has no effect."""
    weights = {}
    for name, shape in weight_shapes(whole, part).items():
        numbers = rng.standard_normal(shape)
        if name.endswith("norm"):
            numbers = 1 + numbers / 8
        elif not name.endswith(("bias", "sinks")):
            numbers *= shape[-1] ** -0.5
        weights[name] = numbers.astype(numpy_dtype(FLOAT32.get(name, DTYPE)))
    weights["embedding"] = weights["embedding"][: whole.vocabulary]
    return weights
