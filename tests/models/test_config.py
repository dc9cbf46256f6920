"""Configurations of models."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from etc_dist.errors import ArgumentError
from etc_dist.functions.append_kv import EVERY_POSITION
from etc_dist.functions.router import Router
from etc_dist.models.config import parse_config, read_config
from etc_dist.models.experts import DecoderMixture
from etc_dist.models.families import MODEL_TYPES
from etc_dist.models.setup import ModelSetup

SAVED = Path(__file__).parents[1] / "golden/models/test_fields_of_transformers"
SMOL = {
    "architectures": ["LlamaForCausalLM"],
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}


LLAMA3 = {
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
}
QWEN = {"architectures": ["Qwen3ForCausalLM"]}


def write(folder, **changes):
    (folder / "config.json").write_text(json.dumps(SMOL | changes))
    return read_config(folder)


def test_sizes_are_those_of_the_file(tmp_path):
    config = write(tmp_path)
    assert (config.head_dim, config.stop_tokens, config.is_tied) == (64, (2,), True)
    sizes = config.sizes(page_size=16)
    assert (sizes.group, sizes.normalizes_heads, sizes.norm_eps) == (3, False, 1e-5)


@pytest.mark.parametrize(
    ("name", "value"), [("head_dim", 64), ("kv_heads", 9), ("rope_base", 10000.0)]
)
def test_null_is_the_default(name, value, tmp_path):
    keys = {"kv_heads": "num_key_value_heads", "rope_base": "rope_theta"}
    config = write(tmp_path, **{keys.get(name, name): None})
    assert getattr(config, name) == value


def test_mixtral_has_another_base_without_one(tmp_path):
    assert write(tmp_path, **MIXTRAL, rope_theta=None).rope_base == 1e6


@pytest.mark.parametrize(
    ("architecture", "stops"), [("LlamaForCausalLM", (2,)), ("Qwen3ForCausalLM", ())]
)
def test_a_file_without_stop_tokens_has_those_of_its_architecture(
    architecture, stops, tmp_path
):
    write(tmp_path, architectures=[architecture])
    path = tmp_path / "config.json"
    settings = json.loads(path.read_text())
    del settings["eos_token_id"]
    path.write_text(json.dumps(settings))
    assert read_config(tmp_path).stop_tokens == stops


def test_scaled_rotations_are_slower(tmp_path):
    plain = write(tmp_path).cos_sin(2)[1]
    linear = write(tmp_path, rope_scaling={"type": "linear", "factor": 4})
    np.testing.assert_allclose(linear.cos_sin(5)[4], plain, atol=1e-6)
    angles = np.arcsin(write(tmp_path, **LLAMA3).cos_sin(2)[1, 32:])
    before = np.arcsin(plain[32:])
    np.testing.assert_allclose(angles[0], before[0], rtol=1e-6)
    np.testing.assert_allclose(angles[-1], before[-1] / 8, rtol=1e-5)


EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "intermediate_size": None,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
}


@pytest.mark.parametrize(
    ("changes", "mixture", "inner"),
    [
        (EXPERTS, DecoderMixture(128, Router(8)), 768),
        (
            EXPERTS | {"norm_topk_prob": None},
            DecoderMixture(128, Router(8, False)),
            768,
        ),
        (
            EXPERTS | {"num_experts": None, "num_local_experts": 16},
            DecoderMixture(16, Router(8)),
            768,
        ),
        (MIXTRAL, DecoderMixture(8, Router(2)), 1536),
    ],
)
def test_mixtures_of_experts_are_read(changes, mixture, inner, tmp_path):
    config = write(tmp_path, **changes)
    assert (config.mixture, config.inner) == (mixture, inner)
    assert config.sizes(page_size=16).mixture == mixture


DOTS = EXPERTS | {"architectures": ["Dots1ForCausalLM"], "intermediate_size": 64}
DOTS |= {"n_shared_experts": 1}
ERNIE = {"architectures": ["Ernie4_5_MoeForCausalLM"], "moe_intermediate_size": 64}
EXAONE = {"architectures": ["Exaone4ForCausalLM"], "head_dim": 64}
SMOL_3 = {"architectures": ["SmolLM3ForCausalLM"]}
FULL = ["full_attention"] * SMOL["num_hidden_layers"]
SLIDING = ["sliding_attention"]
MINISTRAL = {"architectures": ["MinistralForCausalLM"]}
WINDOW = {"use_sliding_window": True, "sliding_window": 4096}


@pytest.mark.parametrize(
    ("base", "changes"),
    [
        ({}, {"model_type": "llama"}),
        ({}, {"rope_scaling": {"type": "default", "factor": 1.0}}),
        ({}, {"is_llama_config": True, "rope_interleaved": False, "pruned_heads": {}}),
        ({}, {"attention_bias": False, "mlp_bias": False}),
        ({}, {"use_sliding_window": True, "sliding_window": None}),
        ({}, {"sliding_window": SMOL["max_position_embeddings"]}),
        ({}, WINDOW | {"layer_types": FULL}),
        ({}, {"use_qk_norm": False, "num_experts": 0}),
        (QWEN, {"use_qk_norm": True, "sliding_window": 4096}),
        (QWEN, WINDOW | {"max_window_layers": 30}),
        (QWEN, WINDOW | {"layer_types": FULL}),
        (EXPERTS, {"num_local_experts": 128, "scoring_func": "softmax", "n_group": 1}),
        (EXPERTS, {"shared_expert_intermediate_size": 0, "qkv_bias": False}),
        (MIXTRAL, {"norm_topk_prob": True, "use_sliding_window": True}),
        (DOTS, {"scoring_func": "noaux_tc", "topk_method": "noaux_tc"}),
        (ERNIE, {"moe_layer_end_index": -1, "moe_gate": "topk", "use_bias": False}),
        (ERNIE, {"moe_layer_end_index": 29, "num_nextn_predict_layers": 1}),
        (LLAMA3, {"rope_parameters": LLAMA3["rope_scaling"]}),
    ],
)
def test_neutral_values_change_nothing(base, changes, tmp_path):
    assert write(tmp_path, **base, **changes) == write(tmp_path, **base)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        (QWEN | WINDOW, [0] * 28 + [4096] * 2),
        (QWEN | WINDOW | {"max_window_layers": 1}, [0] + [4096] * 29),
        (QWEN | WINDOW | {"layer_types": FULL[1:] + SLIDING}, [0] * 29 + [4096]),
        (QWEN | {"sliding_window": 4096}, []),
        (EXPERTS | WINDOW | {"max_window_layers": 30}, [4096] * 30),
        (MIXTRAL | {"sliding_window": 64}, [64] * 30),
        (DOTS | {"sliding_window": 64, "max_window_layers": 29}, [0] * 29 + [64]),
        (MINISTRAL | {"layer_types": SLIDING + FULL[1:]}, [4096] + [0] * 29),
        (MINISTRAL | {"sliding_window": 8192}, []),
        (SMOL_3 | WINDOW, [0, 0, 0, 4096] * 7 + [0, 0]),
    ],
)
def test_layers_have_windows(changes, windows, tmp_path):
    config = write(tmp_path, **changes)
    assert config.windows == tuple(windows)
    tables = config.tables(8)
    assert config.table_shapes(8) == {name: t.shape for name, t in tables.items()}
    if windows:
        spans = [window or 2**30 for window in windows]
        assert tables["spans"][:, 0].tolist() == spans


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        (EXAONE, 4096),
        (EXAONE | {"sliding_window": 8192}, 8192),
        (SMOL_3, EVERY_POSITION),
        (SMOL_3 | {"no_rope_layers": [1, 1, 1, 0] * 8}, EVERY_POSITION),
    ],
)
def test_layers_have_no_rotary_embedding(changes, window, tmp_path):
    config = write(tmp_path, **changes)
    tables = config.tables(8)
    assert config.table_shapes(8) == {name: t.shape for name, t in tables.items()}
    assert tables["cos_sin"][8:].tolist() == [[1.0] * 32 + [0.0] * 32] * 8
    last = [EVERY_POSITION, 8]
    spans = [last if n % 4 == 3 else [window, 0] for n in range(config.layers)]
    assert tables["spans"].tolist() == spans


def test_all_layers_are_rotated_if_a_model_has_no_window(tmp_path):
    config = write(tmp_path, **EXAONE, sliding_window=None)
    assert config.features.tables == 1 and not config.features.has_span


@pytest.mark.parametrize("types", [FULL, None])
def test_no_layer_is_rotated_if_none_slides_in_a_model_with_a_window(types, tmp_path):
    changes = {"layer_types": types, "sliding_window_pattern": 1}
    config = write(tmp_path, **EXAONE | changes)
    last = [EVERY_POSITION, 8]
    assert config.tables(8)["spans"].tolist() == [last] * config.layers


@pytest.mark.parametrize("pattern", [None, 0, 2.0, "LLLG"])
def test_a_pattern_of_windows_is_a_positive_integer(pattern, tmp_path):
    words = "sliding_window_pattern as an integer from 1"
    with pytest.raises(ArgumentError, match=words):
        write(tmp_path, **EXAONE, sliding_window_pattern=pattern)


def test_the_architecture_follows_from_the_model_type(tmp_path):
    config = write(tmp_path, architectures=None, model_type="qwen3")
    assert config == write(tmp_path, **QWEN)


def test_a_field_that_is_missing_has_its_default(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    config = read_config(tmp_path)
    assert (config.hidden, config.head_dim, config.kv_heads) == (4096, 128, 32)
    (tmp_path / "config.json").write_text('{"model_type": "mixtral"}')
    config = read_config(tmp_path)
    assert (config.norm_eps, config.mixture) == (1e-5, DecoderMixture(8, Router(2)))


def test_a_scaling_without_its_length_has_that_of_the_model(tmp_path):
    scaling = LLAMA3["rope_scaling"].copy()
    del scaling["original_max_position_embeddings"]
    assert write(tmp_path, rope_scaling=scaling) == write(tmp_path, **LLAMA3)


GLM_ROUTER = Router(8, score="sigmoid", has_correction=True)


@pytest.mark.parametrize(
    ("name", "stops", "mixture"),
    [
        ("LlamaForCausalLM", (2,), None),
        ("Qwen3ForCausalLM", (), None),
        ("Qwen3MoeForCausalLM", (), DecoderMixture(128, Router(8, False))),
        ("MixtralForCausalLM", (2,), DecoderMixture(8, Router(2))),
        ("Qwen2MoeForCausalLM", (), DecoderMixture(60, Router(4, False), "gated")),
        (
            "Glm4MoeForCausalLM",
            (),
            DecoderMixture(128, GLM_ROUTER, "plain", has_dense=True),
        ),
    ],
)
def test_files_that_transformers_wrote_are_read(name, stops, mixture, tmp_path):
    text = (SAVED / f"test_saved_configurations-{name}.txt").read_text()
    (tmp_path / "config.json").write_text(text)
    config = read_config(tmp_path)
    assert (config.architecture, config.stop_tokens) == (name, stops)
    assert (config.hidden, config.heads, config.mixture) == (256, 4, mixture)
    assert config.rope_base == (1e6 if name == "MixtralForCausalLM" else 1e4)


@pytest.mark.parametrize(
    ("generation", "stops"),
    [
        ({}, (2,)),
        ({"eos_token_id": None}, (2,)),
        ({"eos_token_id": -1}, (2,)),
        ({"eos_token_id": 7}, (7,)),
        ({"eos_token_id": [7, 2], "repetition_penalty": 1.05}, (7, 2)),
    ],
)
def test_stop_tokens_are_those_of_the_generation_config(generation, stops, tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert write(tmp_path).stop_tokens == stops


@pytest.mark.parametrize("stop", [None, -1, []])
def test_a_model_may_have_no_stop_token(stop, tmp_path):
    assert write(tmp_path, eos_token_id=stop).stop_tokens == ()


@pytest.mark.parametrize("kind", MODEL_TYPES.values())
def test_the_steps_of_each_family_have_dims(kind, tmp_path):
    """As a bundle proves them, from the configuration alone."""
    small = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2}
    small |= {"intermediate_size": 256, "moe_intermediate_size": 256, "head_dim": 64}
    if kind == "dots1":  # has no defaults of these
        small |= {"n_shared_experts": 1, "num_experts": 8, "num_experts_per_tok": 2}
    config = parse_config({"model_type": kind, **small}, tmp_path)
    setup = ModelSetup(config, positions=64, ranks=2)
    dims = next(setup.dims(setup.graph(), 132))
    assert dims["layers"] == config.layers
    assert dims["positions"] == 64 * config.features.tables
