"""Weights of a Hugging Face folder."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import numpy as np
import pytest

from etc_dist.errors import ArgumentError
from etc_dist.ir.tensor import numpy_dtype
from etc_dist.models.config import parse_config
from etc_dist.models.families import FAMILIES
from etc_dist.models.part import WHOLE, Part
from etc_dist.models.safetensors_file import MAX_HEADER, STORED, read_tensors
from etc_dist.models.weight_places import WeightPlaces
from etc_dist.models.weights import (
    check_weights,
    load_weights,
    stack_weights,
    weight_shapes,
)
from tests.models.references import save
from tests.models.test_config import SMOL

SMALL = {
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "vocab_size": 8,
}


@pytest.fixture
def model(tmp_path, rng):
    config = parse_config(SMOL | SMALL, tmp_path / "config.json")
    shapes = {"model.embed_tokens": (8, 16), "model.norm": (16,)}
    for layer in range(2):
        layer_shapes = {
            "input_layernorm": (16,),
            "post_attention_layernorm": (16,),
            "self_attn.q_proj": (128, 16),
            "self_attn.k_proj": (64, 16),
            "self_attn.v_proj": (64, 16),
            "self_attn.q_norm": (64,),
            "self_attn.k_norm": (64,),
            "self_attn.o_proj": (16, 128),
            "mlp.gate_proj": (24, 16),
            "mlp.up_proj": (24, 16),
            "mlp.down_proj": (16, 24),
        }
        shapes |= {f"model.layers.{layer}.{n}": s for n, s in layer_shapes.items()}
    tensors = {f"{n}.weight": rng.integers(-9, 9, s) for n, s in shapes.items()}
    return config, {name: array.astype(np.float32) for name, array in tensors.items()}


@pytest.fixture(params=["Qwen3MoeForCausalLM", "MixtralForCausalLM"])
def mixture(request, model, tmp_path, rng):
    """The configuration, the tensors, and the names of an expert's matrices."""
    settings = SMOL | SMALL | {"architectures": [request.param], "num_local_experts": 8}
    settings |= {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
    config, tensors = parse_config(settings, tmp_path / "config.json"), model[1]
    form = FAMILIES[request.param].mixture
    assert form is not None
    block, names = form.block, form.names
    is_qwen = request.param.startswith("Qwen3")
    absent_names = (".mlp.",) if is_qwen else (".mlp.", "q_norm", "k_norm")
    tensors = {
        n: a for n, a in tensors.items() if not any(t in n for t in absent_names)
    }
    for layer in range(2):
        head = f"model.layers.{layer}.{block}"
        tensors[f"{head}.gate.weight"] = rng.integers(-9, 9, (8, 16))
        for expert in range(8):
            for name, shape in zip(names, ((24, 16), (24, 16), (16, 24)), strict=True):
                full = f"{head}.experts.{expert}.{name}.weight"
                tensors[full] = rng.integers(-9, 9, shape)
    return config, tensors, block, names


def test_weights_of_experts_are_stacked(mixture, tmp_path):
    config, tensors, block, names = mixture
    save(tmp_path / "model.safetensors", tensors)
    weights = load_weights(tmp_path, config, "bfloat16")
    head = f"model.layers.1.{block}"
    np.testing.assert_array_equal(weights["router"][1], tensors[f"{head}.gate.weight"])
    for name, to in zip(names, ("w_gate", "w_up", "w_down"), strict=True):
        expected = tensors[f"{head}.experts.5.{name}.weight"]
        np.testing.assert_array_equal(weights[to][1, 5], expected)


@pytest.mark.parametrize("names", ["of the files", "of transformers"])
def test_stacks_of_experts_are_the_same_weights(mixture, tmp_path, names):
    config, tensors, block, (gate, up, down) = mixture
    save(tmp_path / "model.safetensors", tensors)
    expected = load_weights(tmp_path, config, "bfloat16")

    def stack(head: str, name: str) -> np.ndarray:
        return np.array([tensors.pop(f"{head}.{e}.{name}.weight") for e in range(8)])

    for layer in range(2):
        head = f"model.layers.{layer}.{block}.experts"
        gates = np.concatenate([stack(head, gate), stack(head, up)], axis=1)
        tensors[f"{head}.gate_up_proj"] = gates
        tensors[f"{head}.down_proj"] = stack(head, down)
    if names == "of transformers":  # those of state_dict()
        tensors = {n.replace("block_sparse_moe", "mlp"): a for n, a in tensors.items()}
    save(tmp_path / "model.safetensors", tensors)
    weights = load_weights(tmp_path, config, "bfloat16")
    for name, array in expected.items():
        np.testing.assert_array_equal(weights[name], array)


def test_an_expert_that_is_missing_is_named(mixture, tmp_path):
    config, tensors, block, names = mixture
    name = f"model.layers.0.{block}.experts.7.{names[1]}.weight"
    del tensors[name]
    save(tmp_path / "model.safetensors", tensors)
    with pytest.raises(ArgumentError, match=f"{name}: missing"):
        load_weights(tmp_path, config, "bfloat16")


@pytest.mark.parametrize("is_tied", [True, False])
def test_rows_of_padding_are_zero(model, tmp_path, rng, is_tied):
    config = replace(model[0], is_tied=is_tied, vocabulary=13)
    numbers = rng.integers(1, 9, (2, 13, 16)).astype(np.float32)
    names = "model.embed_tokens.weight", "lm_head.weight"
    tensors = model[1] | dict(zip(names[: 2 - is_tied], numbers, strict=False))
    save(tmp_path / "model.safetensors", tensors)
    last = load_weights(tmp_path, replace(config, heads=2), "bfloat16", Part(1, 2))
    np.testing.assert_array_equal(last["embedding"][:13], numbers[0])
    np.testing.assert_array_equal(last["w_head"][:5], numbers[1 - is_tied][8:])
    assert last["embedding"].shape == (16, 16) and not last["embedding"][13:].any()
    assert last["w_head"].shape == (8, 16) and not last["w_head"][5:].any()


@pytest.mark.parametrize("is_tied", [True, False])
def test_names_of_the_base_model_have_no_prefix(model, tmp_path, is_tied):
    config, tensors = replace(model[0], is_tied=is_tied), model[1]
    if not is_tied:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save(tmp_path / "model.safetensors", tensors)
    expected = load_weights(tmp_path, config, "bfloat16")
    bare = {name.removeprefix("model."): array for name, array in tensors.items()}
    save(tmp_path / "model.safetensors", bare)
    weights = load_weights(tmp_path, config, "bfloat16")
    for name, array in expected.items():
        np.testing.assert_array_equal(weights[name], array)


def test_a_name_with_and_without_its_prefix_is_stored_twice(model, tmp_path):
    config, tensors = model
    tensors["norm.weight"] = tensors["model.norm.weight"]
    save(tmp_path / "model.safetensors", tensors)
    with pytest.raises(ArgumentError, match="model.norm.weight: stored more than once"):
        load_weights(tmp_path, config, "bfloat16")


def write_header(file, header, data):
    text = header.encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize("dtype", STORED)
def test_weights_are_stacked_by_layer(model, tmp_path, dtype):
    config, tensors = model
    names = sorted(tensors)
    for file_idx, part in enumerate((names[:9], names[9:])):
        file = tmp_path / f"model-{file_idx}.safetensors"
        save(file, {n: tensors[n] for n in part}, dtype)
    weights = load_weights(tmp_path, config, "bfloat16")
    parts = [tensors[f"model.layers.1.self_attn.{n}_proj.weight"] for n in "qkv"]
    np.testing.assert_array_equal(weights["w_qkv"][1], np.concatenate(parts))
    np.testing.assert_array_equal(weights["norm"][2], tensors["model.norm.weight"])
    assert np.shares_memory(weights["w_head"], weights["embedding"])
    assert weights["k_norm"].shape == (2, 64)


@pytest.mark.parametrize(
    ("name", "array", "text"),
    [
        ("model.norm.weight", None, "model.norm.weight: missing"),
        (
            "model.norm.bias",
            np.zeros(16),
            "of config.json[^$]*model.norm.bias: unknown",
        ),
        ("model.norm.weight", np.zeros(8), r"\[8\] instead of \[16\]"),
        ("model.norm.weight", np.full(16, np.nan), "not finite"),
    ],
)
def test_tensors_that_do_not_fit_are_named(model, tmp_path, name, array, text):
    config, tensors = model
    tensors[name] = array
    arrays = {n: a for n, a in tensors.items() if a is not None}
    save(tmp_path / "model.safetensors", arrays)
    with pytest.raises(ArgumentError, match=text):
        load_weights(tmp_path, config, "bfloat16")


def test_numbers_too_large_for_the_dtype_are_named(model, tmp_path):
    config, tensors = model
    tensors["model.norm.weight"] = np.full(16, 1e38)
    save(tmp_path / "model.safetensors", tensors, "F32")
    with pytest.raises(ArgumentError, match="model.norm.weight: .* not finite"):
        load_weights(tmp_path, config, "float16")


def test_a_head_of_a_tied_model_is_its_embedding(model, tmp_path):
    config, tensors = model
    head = tensors["model.embed_tokens.weight"].copy()
    save(tmp_path / "model.safetensors", {**tensors, "lm_head.weight": head})
    load_weights(tmp_path, config, "bfloat16")
    head[3, 5] += 1
    save(tmp_path / "model.safetensors", {**tensors, "lm_head.weight": head})
    with pytest.raises(ArgumentError, match="lm_head.weight: not the embedding"):
        load_weights(tmp_path, config, "bfloat16")


def test_a_tensor_in_two_files_is_refused(model, tmp_path):
    config, tensors = model
    save(tmp_path / "model-1.safetensors", tensors)
    twice = "model.norm.weight"
    save(tmp_path / "model-2.safetensors", {twice: tensors[twice] + 1})
    with pytest.raises(ArgumentError, match=f"{twice}: stored more than once"):
        load_weights(tmp_path, config, "bfloat16")


@pytest.mark.parametrize("size", [None, 0, 4, 40, 4000])
def test_files_that_are_not_complete_are_refused(model, tmp_path, size):
    config, tensors = model
    file = tmp_path / "model.safetensors"
    if size is not None:
        save(file, tensors)
        file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ArgumentError, match="the model cannot be loaded"):
        load_weights(tmp_path, config, "bfloat16")


NORM, HEAD = "model.norm.weight", "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (NORM, {"data_offsets": [-4, 28]}),
        (NORM, {"data_offsets": [0, 32]}),
        (NORM, {"data_offsets": [257, 289]}),
        (NORM, {"data_offsets": [256]}),
        (NORM, {"data_offsets": [256.0, 288]}),
        (NORM, {"shape": [-1]}),
        (NORM, {"shape": [16, 2]}),
        (NORM, {"shape": [2**62, 2**62, 0]}),
        (NORM, {"dtype": "F32"}),
        (HEAD, {"data_offsets": None}),
    ],
)
def test_damaged_headers_are_refused(model, tmp_path, name, change):
    file = tmp_path / "model.safetensors"
    save(file, model[1])
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header[name] |= change
    write_header(file, json.dumps(header), data[end:])
    with pytest.raises(ArgumentError, match="a complete safetensors file"):
        load_weights(tmp_path, model[0], "bfloat16")


EMPTY = '{"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}'


@pytest.mark.parametrize(
    ("header", "data", "text"),
    [
        ('"abc"', b"", "a JSON object expected, got str"),
        ('{"a": 5}', b"", "a: 5"),
        ("[" * 100_000, b"", "nested too deeply"),
        (f'{{"a": {EMPTY}, "a": 5}}', b"", "'a' has two values"),
        (f'{{"a": {EMPTY}}}', b"1234", "4 bytes after the last tensor"),
    ],
)
def test_headers_that_are_not_of_tensors_are_refused(
    model, tmp_path, header, data, text
):
    write_header(tmp_path / "model.safetensors", header, data)
    with pytest.raises(ArgumentError, match=text):
        load_weights(tmp_path, model[0], "bfloat16")


def test_a_header_beyond_the_limit_is_not_read(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes((MAX_HEADER + 1).to_bytes(8, "little"))
    os.truncate(path, MAX_HEADER + 99)
    with pytest.raises(ArgumentError, match="at most 100000000"):
        read_tensors(path)


def test_sizes_beyond_memory_are_refused(model, tmp_path):
    save(tmp_path / "model.safetensors", model[1])
    config = replace(model[0], hidden=2**24, inner=2**24, vocabulary=2**24)
    with pytest.raises(ArgumentError, match="weights that fit in memory"):
        load_weights(tmp_path, config, "bfloat16")


def test_corrections_of_scores_are_float32(tmp_path):
    settings = SMOL | SMALL | {"architectures": ["MiniMaxM2ForCausalLM"]}
    settings |= {"num_local_experts": 8, "num_experts_per_tok": 2}
    config = parse_config(settings, tmp_path / "config.json")
    element = numpy_dtype("bfloat16")
    weights = {n: np.zeros(s, element) for n, s in weight_shapes(config).items()}
    with pytest.raises(ArgumentError, match="correction: dtype bfloat16"):
        check_weights(weights, config, WHOLE, True)
    weights["correction"] = weights["correction"].astype(np.float32)
    assert check_weights(weights, config, WHOLE, True) == "bfloat16"


@pytest.mark.parametrize(
    ("architecture", "predicting", "correction"),
    [
        ("Glm4Moe", "layers.2.eh_proj", "gate.e_score_correction_bias"),
        ("Ernie4_5_Moe", "mtp_block.0.x", "moe_statics.e_score_correction_bias"),
    ],
)
def test_dense_layers_and_those_that_predict_more(
    architecture, predicting, correction, tmp_path, rng
):
    settings = SMOL | SMALL | {"architectures": [f"{architecture}ForCausalLM"]}
    settings |= {"num_experts": 2, "num_experts_per_tok": 1, "num_key_value_heads": 2}
    settings |= {"moe_intermediate_size": 8, "tie_word_embeddings": True}
    config = parse_config(settings, tmp_path / "config.json")
    places = WeightPlaces(config, WHOLE)
    shapes = weight_shapes(config)
    tensors = {
        name: rng.integers(-9, 9, np.broadcast_to(0, shapes[to])[index].shape)
        for name in places
        for to, index in [places.find(name)]
    }
    tensors[f"model.{predicting}.weight"] = np.ones((4, 4))
    correction = f"model.layers.1.mlp.{correction}"
    if architecture == "Ernie4_5_Moe":  # as its files have it
        tensors[correction] = tensors[correction][None]
    save(tmp_path / "model.safetensors", tensors)
    weights = load_weights(tmp_path, config, "bfloat16")
    dense = tensors["model.layers.0.mlp.gate_proj.weight"]
    np.testing.assert_array_equal(weights["w_dense_gate"][0].astype(np.float32), dense)
    expert = tensors["model.layers.1.mlp.experts.1.down_proj.weight"]
    np.testing.assert_array_equal(weights["w_down"][0, 1].astype(np.float32), expert)
    np.testing.assert_array_equal(weights["correction"][0], tensors[correction].ravel())


EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1}


@pytest.mark.parametrize(
    ("architecture", "changes", "name"),
    [
        ("Glm4MoeForCausalLM", EXPERTS, "1.mlp.gate.e_score_correction_bias"),
        ("Phi3ForCausalLM", {}, "0.self_attn.qkv_proj.weight"),
        ("Phi3ForCausalLM", {}, "0.mlp.gate_up_proj.weight"),
    ],
)
def test_a_number_in_place_of_an_array_is_named(architecture, changes, name, tmp_path):
    settings = (
        SMOL | SMALL | {"architectures": [architecture], "num_key_value_heads": 2}
    )
    config = parse_config(settings | changes, tmp_path / "config.json")
    tensors = [(f"model.layers.{name}", np.ones((), np.float32))]
    with pytest.raises(ArgumentError, match=r"\[[01]\] instead of \["):
        stack_weights(tensors, config, "bfloat16", tmp_path)
