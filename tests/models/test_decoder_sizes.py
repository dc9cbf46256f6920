"""One program serves every depth, batch and length."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

import etc_dist
from etc_dist.codegen import generate
from etc_dist.functions.router import Router
from etc_dist.models.decoder import decoder_for, decoder_graph
from etc_dist.models.experts import DecoderMixture
from etc_dist.models.sizes import MATMULS, DecoderSizes
from etc_dist.models.step_policy import step_shapes
from etc_dist.models.weights import load_weights
from etc_dist.runtime.argument_block import Places, fill
from etc_dist.runtime.memory_plan import Capacity
from etc_dist.schedule import SCHEDULES
from tests.models.references import QWEN, QWEN_MOE, Plain, draw_folder
from tests.models.steps import FEW_ROWS, SHAPES, Steps, share_dims, tile_dims

QWEN_32B = DecoderSizes(64, 8, 128, 1e-6, normalizes_heads=True)
MIXED = replace(QWEN_32B, heads=16, kv_heads=2, mixture=DecoderMixture(128, Router(8)))
DENSE = step_shapes(has_experts=False)
MOST_BYTES = 4096
NUMBERS = {"dim", "events", "head", "period", "slots", "states", "tail", "address"}
NUMBERS |= {"units", "surplus", "divisor", "first", "initial", "total"}
"""Of an argument block: dims, and places and counts that follow from them."""


def dims_of(
    layers: int,
    rows: int,
    steps: int = 1,
    matmuls: Sequence[str] = MATMULS,
    ranks: int = 1,
) -> dict[str, int]:
    return tile_dims(DENSE, dict.fromkeys(matmuls, rows % 2), ranks) | {
        "rows": rows,
        "outputs": rows,
        "layers": layers,
        "hidden": 5120,
        "inner": 25600,
        "vocabulary": 151936,
        "all_ids": 151936,
        "positions": 4096,
        "requests": rows,
        "most_pages": 64,
        "pages": 64 * rows,
        **share_dims(1 + 15 // rows),
        "steps": steps,
        "stops": 1,
        "samples": 0,
    }


def test_auto_gives_the_graph_of_the_static_schedule():
    auto, static, dynamic = (
        decoder_for(name, 1, MIXED).show() for name in ("auto", "static", "dynamic")
    )
    assert auto == static != dynamic


@pytest.mark.parametrize("schedule", ["static", "dynamic"])
@pytest.mark.parametrize("sizes", [QWEN_32B, MIXED], ids=["dense", "experts"])
def test_sizes_are_numbers_in_the_arguments(sizes, schedule):
    plan = SCHEDULES[schedule](decoder_for(schedule, 1, sizes))
    source = generate(plan)
    few, deep, many = (
        fill(
            *(plan, source, dims_of(layers, rows, matmuls=sizes.matmuls)),
            *(0, Capacity(), Places([0], 0, 0, 0, 0, 0), 132),
        )
        for layers, rows in ((2, 1), (64, 1), (64, 128))
    )
    assert few.nbytes == deep.nbytes == many.nbytes <= MOST_BYTES
    for arguments in (deep, many):
        names = [n for n in few.dtype.names if not np.array_equal(few[n], arguments[n])]
        assert "dim_layers" in names
        assert {name.split("_")[0] for name in names} <= NUMBERS
    assert not re.search(r"\b(5120|25600|151936|4096)\b", source.text)


@pytest.mark.parametrize("ranks", [1, 2])
def test_tasks_of_a_step_are_assigned_without_tickets(ranks):
    plan = SCHEDULES["static"](decoder_graph(ranks, sizes=MIXED))
    assert plan.lane("tensor").policy == "strided"


def test_the_rows_of_a_step_are_divided_evenly_into_tiles():
    graph = decoder_graph(1, sizes=QWEN_32B)
    for rows, height, tile_rows in (
        (24, 32, 24),
        (48, 64, 48),
        (96, 64, 48),
        (128, 64, 64),
    ):
        shape = next(n for n, s in enumerate(DENSE) if s.rows == height)
        shapes = tile_dims(DENSE, dict.fromkeys(MATMULS, shape))
        env = graph.environment(dims_of(1, rows) | shapes, 0)
        assert {env[f"{name}_tile_even_rows"] for name in MATMULS} == {tile_rows}


FEW_LAYERS, MANY_LAYERS = 2, 6
STEPS = [[1], [2, 1, 2], [63, 1, 64], [1, 1, 90]]
"""Rows of each request in each step."""
MIXTURE = DecoderMixture(16, Router(4))
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 72}


@pytest.mark.mpi(ranks=[1])
@pytest.mark.parametrize(
    ("settings", "mixture", "most"),
    [(QWEN, None, MANY_LAYERS), (QWEN_MOE | EXPERTS, MIXTURE, 4)],
    ids=["dense", "experts"],
)
def test_no_step_compiles_again(
    settings, mixture, most, one_rank, compiled, tmp_path, rng
):
    small = {"hidden_size": 64, "intermediate_size": 72, "num_attention_heads": 2}
    small = settings | {"num_key_value_heads": 1, "vocab_size": 72} | small
    heads = DecoderSizes(2, 1, 64, 1e-6, normalizes_heads=True, page_size=16)
    sizes = replace(heads, mixture=mixture)
    graph = decoder_graph(1, sizes=sizes, shapes=SHAPES, best_columns=64)
    with etc_dist.compile(graph, one_rank) as program:
        for layers, rows in ((FEW_LAYERS, STEPS), (most, STEPS[:2])):
            config = draw_folder(tmp_path, rng, small | {"num_hidden_layers": layers})
            assert config.sizes(page_size=16) == sizes
            weights = load_weights(tmp_path, config, "bfloat16")
            steps = Steps(program, weights, config, sizes, [130, 8, 300], rng)
            model = Plain(tmp_path, config)
            caches = [model.start() for _ in range(3)]
            for counts in rows:
                settings = [
                    (r, rng.integers(72, size=n).tolist()) for r, n in enumerate(counts)
                ]
                is_long = sum(counts) > FEW_ROWS
                logits, _ = steps.run(settings, tasks=len(counts), shape=int(is_long))
                expected = np.concatenate(
                    [
                        model.logits(ids, caches[r], ids_of_experts)
                        for (r, ids), ids_of_experts in zip(
                            settings, steps.experts_of(settings), strict=True
                        )
                    ]
                )
                error = np.linalg.norm(logits - expected) / np.linalg.norm(expected)
                assert error < 0.004 * (4 + layers)
    assert compiled == ["decoder_graph"]
