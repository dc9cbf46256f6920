"""Decoders whose heads, inner width and vocabulary are split over ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from etc_dist.codegen import generate
from etc_dist.emulate import Emulator
from etc_dist.models import load
from etc_dist.models.config import ModelConfig, read_config
from etc_dist.models.decoder import decoder_graph
from etc_dist.models.part import Part
from etc_dist.models.sampling import Sampling, row_sampling
from etc_dist.models.sizes import MATMULS
from etc_dist.models.weights import load_weights
from etc_dist.runtime.cpu import simulate
from etc_dist.schedule import SCHEDULES
from tests.functions.compiled import check_compiled, check_wgmmas
from tests.functions.test_sample_column import run as run_alone
from tests.models.small import make_model
from tests.models.steps import SHAPES, row_arrays, share_dims, tile_dims
from tests.models.test_decoder import reference
from tests.models.test_decoder_sizes import MOST_BYTES, QWEN_32B
from tests.models.test_model import EXPERTS, expect_best

PAGE, POSITIONS = 16, 32
TWO = pytest.mark.mpi(ranks=[2])
SIZES = {"num_attention_heads": 12, "intermediate_size": 192, "vocab_size": 576}
"""That 2, 3 and 4 ranks can split."""
FEWER = {2: 515, 3: 585}
"""Vocabularies of which the last rank has so few ids that its last tile has none."""
DRAWN = [
    replace(case, seed=seed)
    for seed in range(4)
    for case in (
        Sampling(50.0, top_k=2),
        Sampling(5.0, top_p=0.1),
        Sampling(50.0, top_k=40, top_p=0.1),
        Sampling(0.0),
    )
]
"""Of the rows of a step."""
SPLIT_EXPERTS = EXPERTS | {"moe_intermediate_size": 96}
WHOLE_EXPERTS = EXPERTS | {"num_experts": 12}


def split_model(folder: Any, rng: Any, kv_heads: int, **changes: Any) -> Any:
    sizes = SIZES | {"num_key_value_heads": kv_heads} | changes
    return make_model(folder, rng, **sizes)


def graph_of(config: ModelConfig, ranks: int) -> Any:
    sizes = Part(0, ranks).config(config).sizes(PAGE)
    return decoder_graph(ranks, sizes=sizes, shapes=SHAPES, best_columns=64)


def given_on(
    folder: Any, config: ModelConfig, ids: Any, part: Part, steps: int = 1
) -> dict[str, Any]:
    """The arrays of a rank for one request's first positions, of which the last one is
    continued."""
    part_config, num_rows = part.config(config), len(ids)
    end = np.arange(1, num_rows + 1)
    end[-1] += steps - 1
    pages = (
        config.layers,
        POSITIONS // PAGE,
        2,
        part_config.kv_heads,
        PAGE,
        part_config.head_dim,
    )
    arrays = load_weights(folder, config, "bfloat16", part)
    own_ids = part.ids(config.vocabulary)
    arrays["w_head"][own_ids.stop - own_ids.start :] = 99  # padding has no effect
    arrays["embedding"] = arrays["embedding"][: config.vocabulary]
    return arrays | {
        "cos_sin": config.cos_sin(POSITIONS),
        "cache": np.full(pages, np.nan, arrays["norm"].dtype),
        "table": np.arange(2, dtype=np.int32)[None],
        "logits": np.full(
            (num_rows, part_config.vocabulary), np.nan, arrays["norm"].dtype
        ),
        **row_arrays(ids, np.zeros(num_rows), np.arange(num_rows), end),
    }


def dims_of(config: ModelConfig, ranks: int, rows: int) -> dict[str, int]:
    part_config = Part(0, ranks).config(config)
    dims = tile_dims(SHAPES, {name: n % 2 for n, name in enumerate(MATMULS)}, ranks)
    dims |= {
        n: getattr(part_config, n) for n in ("layers", "hidden", "inner", "vocabulary")
    }
    dims |= {
        "rows": rows,
        "outputs": rows,
        "positions": POSITIONS,
        "requests": 1,
        "most_pages": 2,
    }
    dims |= {"all_ids": config.vocabulary}
    return dims | {
        "pages": 2,
        **share_dims(2),
        "steps": 1,
        "stops": 1,
        "samples": 0,
    }


def logits_of(outputs: Any, config: ModelConfig) -> Any:
    """The logits of all ranks, without padding."""
    parts = [arrays["logits"] for arrays in outputs]
    return np.concatenate(parts, axis=1)[:, : config.vocabulary]


def ids_of_one_rank(logits: Any, first: int = 0) -> Any:
    """The ids that one rank draws for the first rows of DRAWN from its logits."""
    num_rows = len(logits)
    ids, _ = run_alone(logits, DRAWN[:num_rows], np.arange(first, first + num_rows))
    return ids


def check_logits(folder: Any, config: ModelConfig, ids: Any, logits: Any) -> None:
    """Those of all positions are within bf16 error of the reference."""
    weights = load_weights(folder, config, "bfloat16")
    expected = reference(weights, config.sizes(PAGE), list(ids))
    expected = expected[:, : config.vocabulary]
    error = np.linalg.norm(logits.astype(np.float32) - expected)
    assert error < 0.02 * np.linalg.norm(expected)


# Some ranks share a KV head, others have one or two each.
@pytest.mark.parametrize(
    ("ranks", "kv_heads", "tied"),
    [
        (1, 2, True),
        (2, 1, True),
        (3, 6, False),
        pytest.param(4, 2, True, marks=pytest.mark.exhaustive),
        pytest.param(2, 2, False, marks=pytest.mark.exhaustive),
        pytest.param(3, 1, False, marks=pytest.mark.exhaustive),
        pytest.param(4, 4, False, marks=pytest.mark.exhaustive),
        pytest.param(8, 4, True, marks=pytest.mark.exhaustive),
    ],
)
def test_all_ranks_have_equal_ids_of_the_largest_logits(
    ranks, kv_heads, tied, tmp_path, rng
):
    kind = "LlamaForCausalLM" if tied else "Qwen3ForCausalLM"
    changes = {"architectures": [kind], "tie_word_embeddings": tied}
    changes |= {"num_attention_heads": 8 if ranks == 8 else 12}
    changes |= {"vocab_size": FEWER.get(ranks, 573)}
    folder = split_model(tmp_path, rng, kv_heads, **changes)
    config = read_config(folder)
    ids = rng.integers(config.vocabulary, size=11)
    parts = [Part(rank, ranks) for rank in range(ranks)]
    arrays = [given_on(folder, config, ids, part) for part in parts]
    plan = SCHEDULES["static"](graph_of(config, ranks))
    results = simulate(plan, arrays, dims_of(config, ranks, len(ids))).outputs
    logits = logits_of(results, config)
    check_logits(folder, config, ids, logits)
    for outputs in results:
        np.testing.assert_array_equal(outputs["next_ids"][0], logits.argmax(axis=1))
    arrays = [given_on(folder, config, ids, part, 2) for part in parts]
    two = simulate(plan, arrays, dims_of(config, ranks, len(ids)) | {"steps": 2})
    longer = np.append(ids, logits[-1].argmax())
    weights = load_weights(folder, config, "bfloat16")
    last = reference(weights, config.sizes(PAGE), longer.tolist())[-1]
    last = last[: config.vocabulary]
    for outputs in two.outputs:
        np.testing.assert_array_equal(outputs["next_ids"], two.outputs[0]["next_ids"])
        np.testing.assert_array_equal(outputs["next_ids"][0], logits.argmax(axis=1))
        assert (outputs["next_ids"][1, :-1] == -1).all()
        next_logits = last[outputs["next_ids"][1, -1]]
        assert next_logits > last.max() - 0.05 * np.abs(last).max()


@pytest.mark.parametrize(
    ("ranks", "schedule"), [(2, "static"), (2, "dynamic"), (3, "static")]
)
def test_ranks_draw_the_ids_of_one_rank_in_each_step(ranks, schedule, tmp_path, rng):
    folder = split_model(tmp_path, rng, ranks, vocab_size=FEWER[ranks])
    config = read_config(folder)
    ids = rng.integers(config.vocabulary, size=15)
    plan = SCHEDULES[schedule](graph_of(config, ranks))
    parts = [Part(rank, ranks) for rank in range(ranks)]
    for steps in (1, 2):
        arrays = [
            given_on(folder, config, ids, part, steps)
            | {"sampling": row_sampling(15, DRAWN[:15])}
            for part in parts
        ]
        dims = dims_of(config, ranks, 15) | {"steps": steps, "samples": 1}
        results = simulate(plan, arrays, dims).outputs
        logits = logits_of(results, config)
        expected = ids_of_one_rank(logits, steps - 1)
        if steps == 2:  # of the last row
            expected[:-1] = [-1] * 14
        for outputs in results:
            assert outputs["next_ids"][-1].tolist() == expected


def test_the_bits_of_logits_depend_on_the_number_of_ranks(tmp_path, rng):
    folder = split_model(tmp_path, rng, 12)
    config, ids, bits = read_config(folder), rng.integers(576, size=5), set()
    for ranks in (1, 2):
        parts = [Part(rank, ranks) for rank in range(ranks)]
        arrays = [given_on(folder, config, ids, part) for part in parts]
        plan = SCHEDULES["static"](graph_of(config, ranks))
        results = simulate(plan, arrays, dims_of(config, ranks, 5)).outputs
        logits = logits_of(results, config)
        check_logits(folder, config, ids, logits)
        bits.add(logits.tobytes())
    assert len(bits) == 2


# Without --all, test_experts.py runs the bodies on two ranks.
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("ranks", "schedule"), [(2, "static"), (2, "dynamic"), (3, "static")]
)
def test_the_cuda_bodies_agree_in_any_order(ranks, schedule, tmp_path, rng):
    """Of ids of the largest logits, and of ids by chance."""
    model = split_model(tmp_path, rng, ranks, vocab_size=FEWER[ranks])
    config = read_config(model)
    ids = rng.integers(config.vocabulary, size=3)
    parts = [Part(rank, ranks) for rank in range(ranks)]
    arrays = [given_on(model, config, ids, part) for part in parts]
    graph = graph_of(config, ranks)
    program = Emulator(graph, schedule=schedule, workers=2)
    dims, first = dims_of(config, ranks, len(ids)), None
    for seed in range(2):
        arrays = [
            outputs | {"sampling": row_sampling(3, seed * DRAWN[:3])}
            for outputs in arrays
        ]
        results = program.run(arrays, dims | {"samples": seed}, seed=seed)
        logits = logits_of(results, config)
        check_logits(model, config, ids, logits)
        expected = ids_of_one_rank(logits) if seed else logits.argmax(axis=1)
        for outputs in results:
            np.testing.assert_array_equal(outputs["next_ids"][0], expected)
        first = logits if first is None else first
        np.testing.assert_array_equal(logits, first)


def model_of_world(world, tmp_path, rng, **changes):
    """A model, equal on all ranks, of which each rank has one KV head."""
    kv_heads = 2 if world.size == 4 else world.size
    return split_model(tmp_path, rng, kv_heads, **changes)


@pytest.mark.mpi(ranks=[2])
@pytest.mark.parametrize(
    ("schedule", "steps", "changes"),
    [
        pytest.param("static", 1, {}, marks=pytest.mark.exhaustive),
        ("static", 1, SPLIT_EXPERTS),
        ("static", 1, WHOLE_EXPERTS),
        ("dynamic", 1, {}),
        ("static", 3, {}),
    ],
    ids=["dense", "experts", "whole-experts", "dynamic", "three-steps"],
)
def test_all_ranks_generate_the_same_text(
    schedule, steps, changes, tmp_path, world, rng
):
    folder = model_of_world(world, tmp_path, rng, **changes)
    prompts = [rng.integers(576, size=n).tolist() for n in (1, 18, 7)]
    options = {"batch": 3, "positions": 64, "page_size": PAGE, "world": world}
    load_options = {"schedule": schedule, "steps_per_launch": steps}
    if changes == WHOLE_EXPERTS:
        load_options["experts"] = "parallel"
    with load(folder, **load_options, **options) as model:
        texts = model.generate(prompts, max_new_tokens=4)
        assert [len(new) for new in texts] == [4, 4, 4]
        assert world.gather(texts) == [texts] * world.size
        assert model.generate(prompts, max_new_tokens=4) == texts
    rank_texts = slice(world.rank, None, world.size)
    for prompt, new in zip(prompts[rank_texts], texts[rank_texts], strict=True):
        expect_best(folder, prompt, new)


@pytest.mark.parametrize(
    "vocabulary",
    [
        pytest.param(576, marks=[TWO, pytest.mark.exhaustive]),
        pytest.param(531, marks=pytest.mark.mpi(ranks=[2, 4])),
    ],
)
def test_each_rank_has_a_part_of_the_logits(vocabulary, tmp_path, world, rng):
    folder = model_of_world(world, tmp_path, rng, vocab_size=vocabulary)
    ids = rng.integers(vocabulary, size=7)
    table = np.arange(2)[None]
    options = {"batch": 1, "positions": POSITIONS, "page_size": PAGE, "world": world}
    with load(folder, **options) as model:
        next_ids = model.step(ids, [0] * 7, range(7), table)
        rank_logits = np.asarray(
            model.logits if world.backend == "cpu" else model.logits.get()
        )
        parts = world.gather(rank_logits.astype(np.float32))
        logits = np.concatenate(parts, axis=1)
        assert logits.shape == (7, vocabulary)
        check_logits(folder, model.config, ids, logits)
        np.testing.assert_array_equal(next_ids, logits.argmax(axis=1))


@pytest.mark.parametrize("schedule", ["static", "dynamic"])
def test_the_arguments_of_eight_ranks_are_few(schedule):
    source = generate(SCHEDULES[schedule](graph_of_32b(8)))
    assert source.arguments.dtype.itemsize <= MOST_BYTES


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_programs_of_all_tiles_compile_without_spills(ranks):
    cubin = check_compiled(graph_of_32b(ranks)).cubin
    check_wgmmas(cubin)
    assert len(cubin) <= 2**20


def graph_of_32b(ranks: int) -> Any:
    heads = {"heads": 64 // ranks, "kv_heads": 8 // ranks}
    return decoder_graph(ranks, sizes=replace(QWEN_32B, **heads))
