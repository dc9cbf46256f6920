"""Configurations of models."""

from __future__ import annotations

import json

import numpy as np
import pytest

from etc_dist.errors import ArgumentError
from etc_dist.models.config import read_config
from etc_dist.models.experts import Mixture

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


def write(folder, **changes):
    (folder / "config.json").write_text(json.dumps(SMOL | changes))
    return read_config(folder)


def test_sizes_are_those_of_the_file(tmp_path):
    found = write(tmp_path)
    assert (found.head_dim, found.stop_tokens, found.is_tied) == (64, (2,), True)
    sizes = found.sizes(page_size=16)
    assert (sizes.group, sizes.normalizes_heads, sizes.norm_eps) == (3, False, 1e-5)


@pytest.mark.parametrize(
    ("name", "value"), [("head_dim", 64), ("kv_heads", 9), ("rope_base", 10000.0)]
)
def test_null_is_the_default(name, value, tmp_path):
    keys = {"kv_heads": "num_key_value_heads", "rope_base": "rope_theta"}
    found = write(tmp_path, **{keys.get(name, name): None})
    assert getattr(found, name) == value


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
    given = json.loads(path.read_text())
    del given["eos_token_id"]
    path.write_text(json.dumps(given))
    assert read_config(tmp_path).stop_tokens == stops


def test_scaled_rotations_are_slower(tmp_path):
    plain = write(tmp_path).cos_sin(2)[1]
    linear = write(tmp_path, rope_scaling={"type": "linear", "factor": 4})
    np.testing.assert_allclose(linear.cos_sin(5)[4], plain, atol=1e-6)
    angles = np.arcsin(write(tmp_path, **LLAMA3).cos_sin(2)[1, 32:])
    before = np.arcsin(plain[32:])
    np.testing.assert_allclose(angles[0], before[0], rtol=1e-6)
    np.testing.assert_allclose(angles[-1], before[-1] / 8, rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "LlamaForCausalLM or Qwen3"),
        ({"architectures": []}, "LlamaForCausalLM or Qwen3"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: an integer from 1"),
        ({"num_hidden_layers": 1.5}, "num_hidden_layers: an integer from 1"),
        ({"vocab_size": None}, "vocab_size: an integer from 1"),
        ({"vocab_size": 10**30}, "vocab_size: an integer from 1 to 16777216"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: a positive number"),
        ({"rope_theta": float("inf")}, "rope_theta: a positive number"),
        ({"rope_parameters": {"rope_theta": 5e5}}, "one rope_theta"),
        ({"rope_theta": [1], "rope_parameters": {"rope_theta": 1}}, "one rope_theta"),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 0}}, "rope_theta: a"),
        ({"eos_token_id": [1, "a"]}, "eos_token_id: ids of tokens"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings true or false"),
        ({"layer_types": ["sliding_attention"]}, "layer_types full_attention"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 1"),
        ({"rope_scaling": {"type": "factors"}}, "factors of head_dim / 2 pairs"),
        ({"rope_parameters": {"full_attention": {}}}, "one scaling for all layers"),
        ({"rope_scaling": [1]}, "rope_scaling: an object"),
        ({"rope_scaling": {"type": ["linear"]}}, "rope_type default or linear"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor: positive"),
        (LLAMA3 | {"original_max_position_embeddings": 8}, "one original_max_pos"),
        ({"head_dim": 96}, "head_dim 64 or 128"),
        ({"num_key_value_heads": 2}, "a multiple of num_key_value_heads"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type default or linear"),
        ({"attention_bias": True}, "no attention_bias"),
    ],
)
def test_models_that_are_not_implemented_are_refused(changes, text, tmp_path):
    with pytest.raises(ArgumentError, match=text):
        write(tmp_path, **changes)


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
        (EXPERTS, Mixture(128, 8, True), 768),
        (EXPERTS | {"norm_topk_prob": None}, Mixture(128, 8, False), 768),
        (
            EXPERTS | {"num_experts": None, "num_local_experts": 16},
            Mixture(16, 8, True),
            768,
        ),
        (MIXTRAL, Mixture(8, 2, True), 1536),
    ],
)
def test_mixtures_of_experts_are_read(changes, mixture, inner, tmp_path):
    found = write(tmp_path, **changes)
    assert (found.mixture, found.inner) == (mixture, inner)
    assert found.sizes(page_size=16).mixture == mixture


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (EXPERTS | {"num_experts": 12}, "experts in a multiple of 8"),
        (EXPERTS | {"num_experts": 512}, "num_experts: an integer from 1 to 256"),
        (EXPERTS | {"num_experts_per_tok": 33}, "num_experts_per_tok: an integer"),
        (EXPERTS | {"moe_intermediate_size": None}, "moe_intermediate_size: an"),
        (EXPERTS | {"shared_expert_intermediate_size": 64}, "no shared experts"),
        (EXPERTS | {"mlp_only_layers": [0]}, "no mlp_only_layers"),
        (EXPERTS | {"decoder_sparse_step": 2}, "decoder_sparse_step 1"),
        (EXPERTS | {"norm_topk_prob": "yes"}, "norm_topk_prob true or false"),
        (EXPERTS | {"scoring_func": "sigmoid"}, "scoring_func softmax"),
        (EXPERTS | {"n_group": 4}, "no groups of experts"),
        (EXPERTS | {"routed_scaling_factor": 2.5}, "routed_scaling_factor 1"),
        (MIXTRAL | {"num_local_experts": None}, "num_local_experts: an integer"),
        (MIXTRAL | {"num_experts_per_tok": 9}, "an integer from 1 to 8"),
        (MIXTRAL | {"sliding_window": 4096}, "sliding_window null"),
    ],
)
def test_mixtures_that_are_not_implemented_are_refused(changes, text, tmp_path):
    with pytest.raises(ArgumentError, match=text):
        write(tmp_path, **changes)


@pytest.mark.parametrize("text", [None, "", "[]", "{"])
def test_a_folder_without_a_model_is_refused(text, tmp_path):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ArgumentError, match="the model cannot be loaded"):
        read_config(tmp_path)


def test_generation_config_without_ids_is_refused(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "a"}')
    with pytest.raises(ArgumentError, match="eos_token_id: ids of tokens"):
        write(tmp_path)
