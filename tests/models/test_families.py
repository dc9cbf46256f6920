"""Each family against transformers: prompts, decoding and ragged steps, on one rank and
on two."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from etc_dist.models.config import ModelConfig, read_config
from etc_dist.models.decoder import decoder_graph
from etc_dist.models.families import FAMILIES
from etc_dist.models.gguf_file import GgufFile
from etc_dist.models.part import Part
from etc_dist.models.weights import load_weights
from etc_dist.runtime.cpu import simulate
from etc_dist.schedule import schedule_static
from tests.models.families import CASES, FILES, Case, Tiny
from tests.models.steps import SHAPES, row_arrays, share_dims, tile_dims

pytestmark = pytest.mark.torch
PAGE, PAGES = 16, 2
MOST_ERROR = 2.5
"""Of all logits, in units of the error of transformers in bf16."""
STEPS = [[18, 2], [1, 3], [1, 1]]
"""The rows of each request in each step: prompts, one of them in two parts."""


class Ranks:
    """A model on some ranks, in this process."""

    def __init__(
        self, folder: Any, config: ModelConfig, count: int, has_experts: bool = False
    ) -> None:
        parts = [Part(rank, count, has_experts) for rank in range(count)]
        part_config, num_requests = parts[0].config(config), len(STEPS[0])
        sizes = part_config.sizes(PAGE)
        self.config, self.lengths = config, [0] * num_requests
        graph = decoder_graph(count, sizes=sizes, shapes=SHAPES, best_columns=64)
        self.plan = schedule_static(graph)
        rng = np.random.default_rng(3)
        table = rng.permutation(num_requests * PAGES).reshape(num_requests, PAGES)
        self.given = [load_weights(folder, config, "bfloat16", part) for part in parts]
        pages = (
            part_config.layers,
            num_requests * PAGES,
            2,
            part_config.kv_heads,
            PAGE,
            part_config.head_dim,
        )
        for arrays in self.given:
            arrays["embedding"] = arrays["embedding"][: config.vocabulary]
            arrays |= config.tables(PAGE * PAGES)
            arrays["table"] = table.astype(np.int32)
            arrays["cache"] = np.full(pages, np.nan, arrays["norm"].dtype)
        shape_numbers = {name: n % 2 for n, name in enumerate(sizes.matmuls)}
        self.dims = tile_dims(SHAPES, shape_numbers, count)
        names = ["layers", "hidden", "inner", "vocabulary"]
        names += ["shared_inner"] if part_config.shared_inner else []
        names += ["dense_layers", "dense_inner"] if part_config.dense_layers else []
        self.dims |= {name: getattr(part_config, name) for name in names}
        if part_config.dense_layers:
            self.dims["sparse_layers"] = part_config.layers - part_config.dense_layers
        self.experts: list[list[Any]] = [[] for _ in range(num_requests)]
        """Those that the rows of each request chose, of each step."""
        self.dims |= {
            "all_ids": config.vocabulary,
            "positions": len(self.given[0]["cos_sin"]),
            "requests": num_requests,
            "most_pages": PAGES,
            "pages": num_requests * PAGES,
            "steps": 1,
            "stops": 1,
            "samples": 0,
        }

    def step(self, rows: list[list[int]], tasks: int) -> np.ndarray:
        """The logits of the next ids of each request. tasks: of attention, for each KV
        head. The first step is verified with its rows."""
        is_first = not any(self.lengths)
        of = [(r, n) for r, ids in enumerate(rows) for n in range(len(ids))]
        request = [r for r, _ in of]
        position = [self.lengths[r] + n for r, n in of]
        for r, ids in enumerate(rows):
            self.lengths[r] += len(ids)
        arrays = row_arrays([rows[r][n] for r, n in of], request, position)
        for rank_arrays in self.given:
            element, width = rank_arrays["norm"].dtype, self.dims["vocabulary"]
            rank_arrays |= arrays
            rank_arrays["logits"] = np.full((len(of), width), np.nan, element)
            if self.config.mixture is not None:
                top_k = self.config.mixture.router.top_k
                shape = self.config.layers, len(of), top_k
                rank_arrays["experts"] = np.full(shape, -9, np.int32)
        dims = self.dims | dict.fromkeys(("rows", "outputs"), len(of))
        dims |= share_dims(tasks, head_dim=self.config.head_dim)
        results = simulate(self.plan, self.given, dims, check=is_first).outputs
        for rank_arrays, outputs in zip(self.given, results, strict=True):
            rank_arrays["cache"] = outputs["cache"]
        for r in range(len(rows)):
            row_ids = [n for n, outputs in enumerate(request) if outputs == r]
            if self.config.mixture is not None:
                self.experts[r].append(results[0]["experts"][:, row_ids])
        logits = np.concatenate([outputs["logits"] for outputs in results], axis=1)
        return logits[:, : self.config.vocabulary].astype(np.float32)


def distance(some: list[Any], references: list[Any]) -> float:
    """The root mean square of the differences."""
    off = np.concatenate(some) - np.concatenate(references)
    return float(np.sqrt(np.mean(off**2)))


def test_each_family_has_a_case():
    """Two are in test_decoder_logits.py."""
    kinds = {family.model_type for family in FAMILIES.values()}
    assert {case.kind for case in CASES} == kinds - {"qwen3_moe", "mixtral"}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_logits_are_those_of_transformers(case: Case, tmp_path, rng):
    reference = Tiny(case, {})
    reference.save(tmp_path)
    config = read_config(tmp_path)
    lengths = [sum(counts) for counts in zip(*STEPS, strict=True)]
    texts = [rng.integers(config.vocabulary, size=n).tolist() for n in lengths]
    for ranks in (1, 2) if config.heads > 1 else (1,):
        model, starts, of_steps = Ranks(tmp_path, config, ranks), [0] * len(texts), []
        for step_idx, counts in enumerate(STEPS):
            ends = [b + n for b, n in zip(starts, counts, strict=True)]
            spans = [slice(*span) for span in zip(starts, ends, strict=True)]
            rows = [text[span] for text, span in zip(texts, spans, strict=True)]
            of_steps.append((model.step(rows, 1 + step_idx), spans))
            starts = ends
        if ranks == 1 or config.mixture is not None:
            first = config.dense_layers
            ids_of_experts = [
                np.concatenate(e, axis=1)[first:] if e else None for e in model.experts
            ]
            runs = [*zip(texts, ids_of_experts, strict=True)]
            expected = [reference.logits(text, experts=of) for text, of in runs]
            rounded = [reference.logits(text, "bfloat16", of) for text, of in runs]
            most = MOST_ERROR * distance(rounded, expected)
        for logits, spans in of_steps:
            of_step = [w[span] for w, span in zip(expected, spans, strict=True)]
            assert distance([logits], of_step) < most
    for name, changes in case.drops.items():
        variant = Tiny(case, changes, reference.model.state_dict()).logits(texts[0])
        assert distance([variant], expected[:1]) > 2 * most, name
    for name, step_idx in case.fills.items():
        variant = reference.filled(case, name, step_idx).logits(texts[0])
        assert distance([variant], expected[:1]) > 2 * most, name


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("qwen2_moe", {"num_experts": 8}),
        ("hy_v3", {"num_experts": 8}),
        ("gpt_oss", {"num_local_experts": 8}),
    ],
)
def test_ranks_may_have_whole_experts(kind, changes, tmp_path, rng):
    """Beside a shared expert and its gate, after a dense layer, and with biases."""
    case = next(case for case in CASES if case.kind == kind)
    Tiny(case, changes).save(tmp_path)
    config = read_config(tmp_path)
    rows = [rng.integers(config.vocabulary, size=n).tolist() for n in (5, 2)]
    logits, experts = [], []
    for ranks, has_experts in ((1, False), (2, True)):
        model = Ranks(tmp_path, config, ranks, has_experts)
        logits.append(model.step(rows, 1))
        experts.append(np.concatenate([of[0] for of in model.experts], axis=1))
    np.testing.assert_array_equal(*experts)
    off = np.linalg.norm(logits[1] - logits[0])
    assert off < 0.02 * np.linalg.norm(logits[0])


@pytest.mark.parametrize("case", FILES, ids=str)
def test_gguf_files_have_the_same_weights(case: Case, tmp_path):
    model = Tiny(case, {})
    model.save(tmp_path)
    config = read_config(tmp_path)
    assert case.gguf is not None
    path = tmp_path / "model.gguf"
    model.save_gguf(path, FAMILIES[config.architecture].gguf, case.gguf)
    file = GgufFile(path)
    file_config = file.config()
    head = replace(file_config.head, is_paired=config.head.is_paired)
    assert replace(file_config, stop_tokens=config.stop_tokens, head=head) == config
    weights = file.weights(file_config, "bfloat16")
    for name, array in load_weights(tmp_path, config, "bfloat16").items():
        np.testing.assert_array_equal(weights[name], array, name)
