"""Decoders of random weights, each step fed with the ids of a reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from etc_dist.models.weights import load_weights
from tests.conftest import first_always
from tests.models.references import (
    LLAMA,
    MIXTRAL,
    QWEN,
    QWEN_MOE,
    REFERENCES,
    draw_folder,
)
from tests.models.steps import FEW_ROWS, MOST_ROWS, Steps, Workload, last_rows

# NOTE: with bf16, transformers itself is as far from its results in fp32.
ERRORS = {"bfloat16": (0.016, 0.12), "float16": (0.002, 0.015)}
"""Of logits, relative to their root mean square: of all, and of each."""
LONGEST = 2048
TIED = QWEN | {"tie_word_embeddings": True}
WIDE = QWEN | {"head_dim": 128, "num_key_value_heads": 1}
LINEAR = LLAMA | {"rope_scaling": {"type": "linear", "factor": 4.0}}
LLAMA3 = LLAMA | {
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    }
}
UNNORMALIZED = QWEN_MOE | {"norm_topk_prob": False}
ZIPF = tuple(-2 * np.log1p(np.arange(32)))
FEW = (0.0,) * 4 + (-30.0,) * 28
"""All rows choose the same four experts."""


@dataclass(frozen=True)
class Case:
    """given: its config.json. longest: of the prompts. preference: of experts."""

    name: str
    given: dict[str, Any]
    batch: int
    page_size: int
    longest: int = LONGEST
    steps: int = 64
    dtype: str = "bfloat16"
    preference: tuple[float, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}-{self.dtype}-{self.batch}-{self.page_size}"


CASES = [
    Case("short", QWEN, 3, 16, longest=140, steps=5),
    Case("short-llama3", LLAMA3, 3, 64, longest=20, steps=1),
    Case("mixtral", MIXTRAL, 3, 64, longest=20, steps=1),
    Case("zipf", QWEN_MOE, 12, 16, longest=9, steps=1, preference=ZIPF),
    Case("experts", QWEN_MOE, 3, 16, longest=60, steps=4),
    Case("few-experts", QWEN_MOE, 8, 64, longest=30, steps=3, preference=FEW),
    *(Case("experts", QWEN_MOE, batch, 64) for batch in (1, 8, 32, 128)),
    Case("unnormalized", UNNORMALIZED, 3, 16),
    Case("experts", QWEN_MOE, 8, 64, dtype="float16"),
    *(Case("qwen", QWEN, batch, page) for batch in (1, 8, 32) for page in (16, 64)),
    *(Case("wide", WIDE, batch, page) for batch in (3, 128) for page in (16, 64)),
    Case("wide", WIDE, 8, 64, dtype="float16"),
    Case("tied", TIED, 3, 64),
    Case("llama", LLAMA, 3, 16),
    Case("linear", LINEAR, 3, 64),
    Case("llama3", LLAMA3, 3, 64),
]


def draw_prompts(rng: np.random.Generator, batch: int, longest: int) -> Any:
    """Prompts of 1 to `longest` ids, most of them short."""
    lengths = np.geomspace(1, longest, batch) if batch > 1 else [longest]
    lengths = rng.permutation(np.round(lengths).astype(int))
    return [rng.integers(QWEN["vocab_size"], size=n).tolist() for n in lengths]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "kind", ["numpy", pytest.param("transformers", marks=pytest.mark.torch)]
)
@pytest.mark.parametrize("case", first_always([(c,) for c in CASES], 3), ids=str)
def test_steps_give_the_logits_of_a_reference(
    kind, case, one_rank, decoder_of, tmp_path, rng
):
    config = draw_folder(tmp_path, rng, case.given, case.preference)
    reference = REFERENCES[kind](tmp_path, config)
    work = Workload(draw_prompts(rng, case.batch, case.longest), case.steps)
    sizes = config.sizes(case.page_size, case.dtype)
    weights = load_weights(tmp_path, config, case.dtype)
    ours = Steps(decoder_of(sizes), weights, config, sizes, work.positions, rng)
    caches = [reference.start() for _ in work.prompts]
    all_error, most_error = ERRORS[case.dtype]
    for step_idx, rows in enumerate(work):
        count = sum(len(ids) for _, ids in rows)
        options = {"tasks": 1 + step_idx % 3}
        options["shape"] = int(count > FEW_ROWS)
        unused = step_idx % 2 if count < MOST_ROWS else 0
        logits, ids = ours.run(rows, **options, unused=unused)
        expected = np.concatenate(
            [
                reference.logits(new, caches[r], experts)
                for (r, new), experts in zip(rows, ours.experts_of(rows), strict=True)
            ]
        )
        scale = np.sqrt((expected**2).mean())
        assert np.linalg.norm(logits - expected) < all_error * np.linalg.norm(expected)
        assert np.abs(logits - expected).max() < most_error * scale
        np.testing.assert_array_equal(ids, logits.argmax(axis=1))
        second, first = np.sort(expected, axis=1)[:, -2:].T
        best, is_clear = expected.argmax(axis=1), first - second > most_error * scale
        np.testing.assert_array_equal(ids[is_clear], best[is_clear])
        for (r, _), row in zip(rows, last_rows(rows), strict=True):
            if ours.lengths[r] >= len(work.prompts[r]):
                work.next_ids[r] = int(best[row])
