"""One program serves every depth, batch and length."""

from __future__ import annotations

import re

import numpy as np
import pytest

import etc_dist
from etc_dist.codegen import generate
from etc_dist.models.decoder import decoder_graph
from etc_dist.models.sizes import MATMULS, DecoderSizes
from etc_dist.models.weights import load_weights
from etc_dist.runtime.argument_block import Places, fill
from etc_dist.runtime.memory_plan import Capacity
from etc_dist.schedule import SCHEDULES
from tests.models.conftest import FEW_ROWS, SHAPES
from tests.models.references import QWEN, Plain, draw_folder
from tests.models.steps import Steps

QWEN_32B = DecoderSizes(64, 8, 128, 1e-6, normalizes_heads=True)
MOST_BYTES = 4096
NUMBERS = {"dim", "events", "head", "period", "slots", "states", "tail", "tensor"}
NUMBERS |= {"units"}
"""Of an argument block: dims, and places and counts that follow from them."""


def dims_of(layers: int, rows: int, steps: int = 1) -> dict[str, int]:
    return {f"{name}_shape": rows % 2 for name in MATMULS} | {
        "rows": rows,
        "layers": layers,
        "hidden": 5120,
        "inner": 25600,
        "vocabulary": 151936,
        "positions": 4096,
        "requests": rows,
        "most_pages": 64,
        "pages": 64 * rows,
        "slices": 1 + 15 // rows,
        "steps": steps,
        "stops": 1,
    }


@pytest.mark.parametrize("schedule", ["static", "dynamic"])
def test_sizes_are_numbers_in_the_arguments(schedule):
    plan = SCHEDULES[schedule](decoder_graph(1, sizes=QWEN_32B))
    source = generate(plan)
    few, deep, many = (
        fill(plan, source, dims_of(*sizes), 0, Capacity(), Places([0], 0, 0, 0, 0, 0))
        for sizes in ((2, 1), (64, 1), (64, 128))
    )
    assert few.nbytes == deep.nbytes == many.nbytes <= MOST_BYTES
    for other in (deep, many):
        names = [n for n in few.dtype.names if not np.array_equal(few[n], other[n])]
        assert "dim_layers" in names
        assert {name.split("_")[0] for name in names} <= NUMBERS
    assert not re.search(r"\b(5120|25600|151936|4096)\b", source.text)


STEPS = {  # layers: rows of each request in each step
    2: ([1], [2, 1, 2], [63, 1, 64], [1, 1, 90]),
    64: ([1], [3, 1, 2]),
}


def test_no_step_compiles_again(one_rank, compiled, tmp_path, rng):
    small = {"hidden_size": 64, "intermediate_size": 72, "num_attention_heads": 2}
    small = QWEN | {"num_key_value_heads": 1, "vocab_size": 72} | small
    sizes = DecoderSizes(2, 1, 64, 1e-6, normalizes_heads=True, page_size=16)
    graph = decoder_graph(1, sizes=sizes, shapes=SHAPES, best_columns=64)
    with etc_dist.compile(graph, one_rank) as program:
        for layers, rows in STEPS.items():
            config = draw_folder(tmp_path, rng, small | {"num_hidden_layers": layers})
            assert config.sizes(page_size=16) == sizes
            weights = load_weights(tmp_path, config, "bfloat16")
            steps = Steps(program, weights, config, sizes, [130, 8, 300], rng)
            model = Plain(tmp_path, config)
            kept = [model.start() for _ in range(3)]
            for counts in rows:
                given = [
                    (r, rng.integers(72, size=n).tolist()) for r, n in enumerate(counts)
                ]
                is_long = sum(counts) > FEW_ROWS
                logits, _ = steps.run(given, slices=len(counts), shape=int(is_long))
                wanted = np.concatenate([model.logits(i, kept[r]) for r, i in given])
                error = np.linalg.norm(logits - wanted) / np.linalg.norm(wanted)
                assert error < 0.004 * (4 + layers)
    assert compiled == ["decoder_graph"]
