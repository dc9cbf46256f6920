"""Folders with weights in float8 and their scales."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import etc_dist
from etc_dist.emulate import Emulator
from etc_dist.errors import ArgumentError
from etc_dist.functions.router import Router
from etc_dist.functions.scaled_weights import E4M3
from etc_dist.ir.tensor import numpy_dtype
from etc_dist.models import load
from etc_dist.models.config import read_config
from etc_dist.models.decoder import decoder_for, decoder_graph
from etc_dist.models.experts import DecoderMixture
from etc_dist.models.float8 import are_converted, widen
from etc_dist.models.part import Part
from etc_dist.models.safetensors_file import read_tensors
from etc_dist.models.setup import part_of
from etc_dist.models.sizes import DecoderSizes
from etc_dist.models.weights import load_weights
from etc_dist.runtime.cpu import simulate
from etc_dist.schedule import SCHEDULES, schedule_static
from tests.conftest import some_of
from tests.functions.compiled import check_compiled, check_wgmmas
from tests.graphs.paged import BASE
from tests.graphs.scaled import expanded
from tests.models.references import QWEN, QWEN_MOE, Plain, draw_folder, save
from tests.models.steps import SHAPES
from tests.models.test_experts import DENSE as DENSE_LAYER
from tests.models.test_experts import EMULATED, check_steps
from tests.models.test_experts import SHAPES as EXPERT_SHAPES
from tests.models.test_model import expect_best
from tests.models.test_tensor_parallel import (
    PAGE,
    check_logits,
    dims_of,
    given_on,
    logits_of,
)

RELEASED = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "modules_to_not_convert": ["lm_head"],
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
SMALL = {"num_hidden_layers": 1, "tie_word_embeddings": True}
DENSE, MIXTURE = QWEN | SMALL, QWEN_MOE | SMALL | {"num_experts": 4}
ENDS = ("_proj.weight",)
FILE = "model.safetensors"
exhaustive = pytest.mark.exhaustive
FILES = [f"model-{n:05}-of-00002.safetensors" for n in (1, 2)]


def release(
    folder: Path,
    rng: Any,
    settings: Mapping[str, Any],
    scale_dtype: str = "float32",
    excluded: str = "lm_head",
) -> tuple[Path, Path]:
    """Two folders with the same weights: those of projections in float8, with scales in
    another file; and all as numbers of fp32. skipped: in modules_to_not_convert."""
    plain, released = folder / "plain", folder / "released"
    plain.mkdir(), released.mkdir()
    draw_folder(plain, rng, settings)
    quantization = RELEASED | {"modules_to_not_convert": [excluded]}
    (released / "config.json").write_text(
        json.dumps({**settings, "quantization_config": quantization})
    )
    tensors, scales, widened = {}, {}, {}
    for name, array in read_tensors(plain / FILE):
        tensors[name] = widened[name] = np.array(array)
        if name.endswith(ENDS):
            codes, scale = etc_dist.quantize(tensors[name])
            scale = scale.astype(numpy_dtype(scale_dtype))
            tensors[name], scales[f"{name}_scale_inv"] = codes, scale
            wide = codes.astype(np.float64) * expanded(scale, *codes.shape)
            widened[name] = wide.astype(np.float32)
    assert len(scales) > 6
    save(plain / FILE, widened, "F32")
    save(released / FILES[0], tensors)
    dtype = "F32" if scale_dtype == "float32" else "BF16"
    save(released / FILES[1], scales, dtype)
    return plain, released


@pytest.mark.parametrize(
    ("part", "is_converted"),
    [
        ("model.layers.7.mlp.gate_proj", False),
        ("mlp.gate_proj", False),
        ("model.layers.7*", False),
        ("lm_head", True),
        ("model.layers.7.mlp.gate", True),  # the router of another layer
    ],
)
def test_names_of_what_is_not_of_float8_have_whole_parts(part, is_converted):
    quantization = {"modules_to_not_convert": [part]}
    assert are_converted(quantization, ["mlp.gate_proj"]) is is_converted


def test_all_codes_are_multiplied_by_the_scale_of_their_block():
    bits = np.arange(300 * 264).astype(np.uint8).reshape(300, 264)
    codes = bits.view(numpy_dtype(E4M3))
    scales = np.exp2(np.arange(9) - 4).astype(np.float32).reshape(3, 3)
    scales[1, 2] = 0
    expected = codes.astype(np.float64) * expanded(scales, 300, 264)
    np.testing.assert_array_equal(widen(codes, scales), expected)


@pytest.mark.parametrize("scale_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("part", [Part(0, 1), Part(1, 2)], ids=str)
@pytest.mark.parametrize("settings", [DENSE, MIXTURE], ids=["dense", "moe"])
def test_weights_that_no_decoder_reads_are_widened(
    settings, part, scale_dtype, tmp_path, rng
):
    excluded = "model.layers.0*"  # of 16 bits in the configuration alone
    plain, released = release(tmp_path, rng, settings, scale_dtype, excluded)
    config = read_config(released)
    assert not config.float8
    expected = load_weights(plain, config, "bfloat16", part)
    weights = load_weights(released, config, "bfloat16", part)
    assert weights.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(weights[name], array, name)


WIDE = DENSE | {"num_attention_heads": 8, "num_key_value_heads": 4}
ALL_FLOAT8 = ("qkv", "o", "gate_up", "down")
DIVIDED = {
    # Each rank has a block, and a half of the last one.
    384: (
        WIDE,
        ALL_FLOAT8,
        192,
        ([*range(128), *range(256, 320)], [*range(128, 256), *range(320, 384)]),
        ([0, 2], [1, 2]),
    ),
    # Each rank has two blocks, of which the second one has fewer. The keys of each are
    # a half of a block.
    432: (DENSE, ALL_FLOAT8[1:], 256, (range(256), range(256, 432)), ([0, 1], [2, 3])),
}
"""By the inner width: what changes, and what two ranks have of it."""


@pytest.mark.parametrize("inner", DIVIDED)
def test_ranks_have_codes_with_the_scales_of_their_blocks(inner, tmp_path, rng):
    settings, float8, num_columns, places, blocks = DIVIDED[inner]
    settings = settings | {"intermediate_size": inner}
    _, released = release(tmp_path, rng, settings, "bfloat16")
    config = read_config(released)
    whole = load_weights(released, config, "bfloat16")
    assert config.float8 == ALL_FLOAT8
    for rank in range(2):
        part, place, of = Part(rank, 2), list(places[rank]), blocks[rank]
        sizes = part.config(config)
        assert (sizes.float8, sizes.inner) == (float8, num_columns)
        weights = load_weights(released, config, "bfloat16", part)
        expected = {
            "w_gate": whole["w_gate"][:, place],
            "w_up_scales": whole["w_up_scales"][:, of],
            "w_down": whole["w_down"][..., place],
            "w_down_scales": whole["w_down_scales"][..., of],
            "w_o": np.split(whole["w_o"], 2, 2)[rank],
            "w_o_scales": np.split(whole["w_o_scales"], 2, 2)[rank],
        }
        for name, array in expected.items():
            assert weights[name].dtype == array.dtype
            cut = weights[name][tuple(map(slice, array.shape))]
            assert cut.tobytes() == array.tobytes(), name
        num_places = len(place)
        for padding in (
            weights["w_gate"][:, num_places:],
            weights["w_down"][..., num_places:],
        ):
            assert not padding.astype(np.float32).any()


@pytest.mark.parametrize("inner", DIVIDED)
def test_ranks_give_the_logits_of_the_widened_model(inner, tmp_path, rng):
    settings = DIVIDED[inner][0] | {"intermediate_size": inner, "rope_theta": BASE}
    plain, released = release(tmp_path, rng, settings)
    config, ids = read_config(released), rng.integers(504, size=9)
    parts = [Part(rank, 2) for rank in range(2)]
    arrays = [given_on(released, config, ids, part) for part in parts]
    sizes = parts[0].config(config).sizes(PAGE)
    graph = decoder_graph(2, sizes=sizes, shapes=SHAPES, best_columns=64)
    dims = dims_of(config, 2, len(ids))
    results = simulate(schedule_static(graph), arrays, dims).outputs
    check_logits(plain, read_config(plain), ids, logits_of(results, config))


EXPERTS = DENSE_LAYER | {"hidden_size": 144, "num_experts": 8}
EXPERTS |= {"moe_intermediate_size": 192, "intermediate_size": 432}
EXPERTS |= {"num_attention_heads": 4, "num_key_value_heads": 4}
OF_EXPERTS = ("expert_up", "expert_down", "shared_up", "shared_down")
OF_EXPERTS += ("dense_up", "dense_down")


class OnCpu:
    """As an emulator, by the NumPy bodies."""

    def __init__(self, graph: Any, schedule: str, workers: int):
        self.plan = SCHEDULES[schedule](graph)

    def run(self, arrays: Any, dims: Any, seed: int) -> Any:
        return simulate(self.plan, arrays, dims).outputs


@pytest.mark.parametrize(
    ("runner", "schedule", "ranks", "experts"),
    [
        (OnCpu, "static", 2, "tensor"),
        pytest.param(Emulator, "static", 2, "tensor", marks=exhaustive),
        pytest.param(Emulator, "static", 2, "parallel", marks=exhaustive),
        pytest.param(Emulator, "dynamic", 1, "tensor", marks=exhaustive),
    ],
)
def test_experts_are_multiplied_by_their_codes(
    runner, schedule, ranks, experts, tmp_path, rng
):
    """With a shared expert, and a first layer without experts."""
    plain, released = release(tmp_path, rng, EXPERTS)
    config = read_config(released)
    assert config.float8 == ("qkv", "o", *OF_EXPERTS)
    parts = [part_of(rank, ranks, experts) for rank in range(ranks)]
    part_config = parts[0].config(config)
    assert part_config.float8 == config.float8
    weights = [load_weights(released, config, "bfloat16", part) for part in parts]
    assert weights[0]["w_gate"].dtype == numpy_dtype(E4M3)
    sizes, shapes = part_config.sizes(16), EXPERT_SHAPES
    graph = decoder_graph(ranks, sizes=sizes, shapes=shapes, best_columns=64)
    wide = {name: np.array(a) for name, a in read_tensors(plain / FILE)}
    reference = Plain(plain, read_config(plain), wide)
    steps = EMULATED[1 : 2 if runner is OnCpu else 3]
    runner = runner(graph, schedule=schedule, workers=4)
    check_steps(runner, weights, part_config, reference, steps, rng)


@exhaustive
@pytest.mark.parametrize("schedule", ["static", "dynamic"])
@pytest.mark.parametrize("mixture", [None, DecoderMixture(128, Router(8))], ids=str)
def test_programs_of_all_tiles_compile_without_spills(mixture, schedule):
    sizes = DecoderSizes(32, 4, 128, normalizes_heads=True, mixture=mixture)
    sizes = replace(sizes, float8=sizes.matmuls[:-1])
    check_wgmmas(check_compiled(decoder_for(schedule, 1, sizes), schedule).cubin)


@pytest.mark.mpi(ranks=[1, 2])
@pytest.mark.parametrize("schedule", some_of(["static", "dynamic"], 2))
def test_a_released_folder_generates_what_its_numbers_do(
    schedule, tmp_path, rng, world
):
    plain, released = release(tmp_path, rng, DENSE)
    file = plain / FILE
    save(file, {name: np.array(array) for name, array in read_tensors(file)})
    options = {"positions": 64, "page_size": 16, "schedule": schedule}
    with load(released, **options, world=world) as model:
        assert model.program.plan.graph.tensor("w_gate").dtype == E4M3
        [new_ids] = model.generate([[3, 1, 4]], max_new_tokens=8)
    expect_best(plain, [3, 1, 4], new_ids)


NAME = "model.layers.0.self_attn.q_proj.weight"


def not_a_number(a):
    a = a.copy()
    a.view(np.uint8)[3, 5] = 0x7F
    return a


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("_scale_inv", lambda a: None, f"{NAME}: {E4M3} without scales"),
        ("", lambda a: None, f"{NAME}_scale_inv alone"),
        ("_scale_inv", lambda a: a[:1], r"scales \[1, 2\] float32"),
        ("_scale_inv", lambda a: a.astype(np.uint8), "U8"),
        (
            "_scale_inv",
            lambda a: a * np.inf,
            f"{NAME}_scale_inv: numbers that are not finite",
        ),
        ("", not_a_number, f"{NAME}: numbers that are not finite"),
        ("", lambda a: a[None], r"q_proj.weight \[1, 256, 256\], scales"),
    ],
)
def test_tensors_that_do_not_fit_are_named(name, change, text, tmp_path, rng):
    _, released = release(tmp_path, rng, DENSE)
    for file in FILES:
        tensors = {n: np.array(a) for n, a in read_tensors(released / file)}
        if NAME + name in tensors:
            tensor = change(tensors.pop(NAME + name))
            if tensor is not None:
                tensors[NAME + name] = tensor
            save(released / file, tensors, "F32" if name else "BF16")
    with pytest.raises(ArgumentError, match=text):
        load_weights(released, read_config(released), "bfloat16")


def test_a_matrix_of_16_bits_that_no_list_has_is_named(tmp_path, rng):
    plain, released = release(tmp_path, rng, DENSE)
    config = (released / "config.json").read_text()
    (plain / "config.json").write_text(config)
    text = f"{NAME}: float32 instead of {E4M3}: add it to modules_to_not_convert"
    with pytest.raises(ArgumentError, match=text):
        load_weights(plain, read_config(plain), "bfloat16")


def test_scales_of_e8m0_are_refused(tmp_path, rng):
    _, released = release(tmp_path, rng, DENSE)
    file = released / FILES[0]
    file.write_bytes(file.read_bytes().replace(b'"F8_E4M3"', b'"F8_E8M0"'))
    with pytest.raises(ArgumentError, match="proj.weight: F8_E8M0"):
        load_weights(released, read_config(released), "bfloat16")
