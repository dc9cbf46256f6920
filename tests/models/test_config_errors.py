"""Configurations that are refused, and fields by their names."""

from __future__ import annotations

import json

import pytest

from etc_dist.errors import ArgumentError
from etc_dist.models.config import read_config
from etc_dist.models.families import OWN_FIELDS
from etc_dist.models.fields import NEUTRAL
from tests.models.test_config import (
    ERNIE,
    EXAONE,
    EXPERTS,
    LLAMA3,
    MIXTRAL,
    QWEN,
    SMOL_3,
    write,
)
from tests.models.test_fields import GEMMA, GLM, GPT_OSS, HY
from tests.models.test_float8 import RELEASED
from tests.refusals import refused

DYNAMIC = {"rope_type": "dynamic", "factor": 1.0}
OLMO = {"architectures": ["Olmo3ForCausalLM"]}
PHI = {"architectures": ["Phi3ForCausalLM"]}
YARN = {"rope_type": "yarn", "factor": 4.0}
LONG = {"rope_type": "longrope", "short_factor": [1] * 32, "long_factor": [2] * 32}
LINEAR = {"rope_type": "linear", "factor": 4.0}
MXFP4 = {"quant_method": "mxfp4"}
WINDOW = {"use_sliding_window": True, "sliding_window": 4096}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "LlamaForCausalLM or Qwen"),
        ({"architectures": []}, "LlamaForCausalLM or Qwen"),
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
        ({"rope_scaling": DYNAMIC | {"alpha": 1000.0}}, "no alpha"),
        (OLMO | {"attention_bias": True}, "attention_bias false"),
        (OLMO | {"rope_parameters": YARN}, "rope_parameters with full_attention and"),
        ({"attention_bias": 1}, "attention_bias true or false"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings true or false"),
        ({"layer_types": ["sliding_attention"]}, "layer_types full_attention"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 1"),
        ({"rope_scaling": {"type": "factors"}}, "a factor of each pair"),
        ({"rope_parameters": {"full_attention": {}}}, "one scaling for all layers"),
        ({"rope_scaling": [1]}, "rope_scaling: an object"),
        ({"rope_scaling": {"type": ["linear"]}}, "rope_type default or linear"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor: positive"),
        (LLAMA3 | {"original_max_position_embeddings": 8}, "one original_max_pos"),
        ({"head_dim": 258}, "head_dim: an integer from 1 to 256"),
        *(({name: 2.0}, f"no {name}") for name in sorted(OWN_FIELDS)),
        ({"head_dim": 95}, "an even head_dim"),
        (QWEN | {"head_dim": 96}, "head_dim 64 or 128 or 256"),
        (PHI | {"partial_rotary_factor": 1.5}, "partial_rotary_factor from 0, at"),
        (PHI | {"partial_rotary_factor": 0.01}, "an even number of elements"),
        ({"num_key_value_heads": 2}, "a multiple of num_key_value_heads"),
        ({"rope_scaling": {"rope_type": "mrope"}}, "rope_type default or linear"),
        ({"rope_scaling": YARN | {"truncate": 1}}, "truncate true or false"),
        ({"rope_scaling": YARN | {"beta_fast": 0}}, "with beta_fast: positive"),
        ({"rope_scaling": YARN | {"rope_theta": 0}}, "one rope_theta"),
        ({"rope_scaling": LONG | {"short_factor": [1] * 31}}, "a factor of each"),
        ({"rope_scaling": LONG | {"long_factor": [0] * 32}}, "a factor of each"),
        ({"model_type": "granite"}, "model_type 'llama' of LlamaForCausalLM"),
        ({"architectures": None, "model_type": "gpt2"}, "and model_type 'gpt2'"),
        ({"sliding_window": 4096}, "no sliding window"),
        ({"num_experts": 8}, "no num_experts"),
        ({"use_qk_norm": True}, "use_qk_norm false"),
        ({"rope_scaling": {"type": "linear", "rope_type": "default"}}, "one type of"),
        ({"rope_scaling": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 1"),
        ({"rope_scaling": {"factor": 4}}, "type default without factor"),
        ({"rope_scaling": LINEAR, "rope_parameters": LINEAR | {"factor": 8}}, "equal"),
        (QWEN | {"layer_types": ["sliding_attention"] * 30}, "a sliding_window for"),
        (QWEN | {"layer_types": ["full_attention"] * 29}, "layer_types full"),
        (QWEN | WINDOW | {"sliding_window": 0}, "sliding_window: an integer from 1"),
        (QWEN | {"use_qk_norm": False}, "use_qk_norm true"),
        (EXPERTS | {"num_experts": 513}, "num_experts: an integer from 1 to 512"),
        (EXPERTS | {"num_experts_per_tok": 33}, "num_experts_per_tok: an integer"),
        (EXPERTS | {"moe_intermediate_size": None}, "moe_intermediate_size: an"),
        (EXPERTS | {"norm_topk_prob": "yes"}, "norm_topk_prob true or false"),
        (EXPERTS | {"num_local_experts": 64}, "one number for num_experts and"),
        (MIXTRAL | {"num_local_experts": None}, "num_experts: an integer"),
        (MIXTRAL | {"num_experts_per_tok": 9}, "an integer from 1 to 8"),
        (MIXTRAL | {"layer_types": ["full_attention"] * 30} | WINDOW, "layer_types f"),
        (MIXTRAL | {"norm_topk_prob": False}, "norm_topk_prob true"),
        (GLM | {"first_k_dense_replace": 30}, "first_k_dense_replace: dense layers b"),
        (GLM | {"n_group": 3}, "groups of equal size"),
        (
            HY | {"mlp_layer_types": ["sparse", "dense"] * 15},
            "mlp_layer_types: dense l",
        ),
        (
            ERNIE | {"moe_layer_end_index": 28},
            "moe_layer_end_index: the last layer, 29",
        ),
        (SMOL_3 | {"no_rope_layers": [1] * 29}, "no_rope_layers: 0 or 1 for each"),
        (SMOL_3 | {"no_rope_layers": [2] * 30}, "no_rope_layers: 0 or 1 for each"),
        (SMOL_3 | {"no_rope_layer_interval": 0}, "no_rope_layer_interval: an integer"),
        (SMOL_3 | {"no_rope_layer_interval": None}, "no_rope_layer_interval: an int"),
        (EXAONE | {"sliding_window_pattern": "LLLG"}, "layer_types, or sliding_window"),
        (MIXTRAL | {"first_k_dense_replace": 1}, "no first_k_dense_replace"),
        (MIXTRAL | {"n_shared_experts": 1}, "no n_shared_experts"),
        (MIXTRAL | {"scoring_func": "sigmoid"}, "no scoring_func"),
        (MIXTRAL | {"routed_scaling_factor": 2.0}, "no routed_scaling_factor"),
        (MIXTRAL | {"shared_expert_intermediate_size": 8}, "no shared_expert_interm"),
        ({"hidden_act": "gelu"}, "hidden_act silu"),
        (GEMMA | {"hidden_act": "gelu"}, "hidden_act gelu_pytorch_tanh"),
        (GEMMA | {"attn_logit_softcapping": 0}, "attn_logit_softcapping null or a"),
        ({"quantization_config": MXFP4}, "config: null, or quant_method 'fp8'"),
        *(
            ({"quantization_config": RELEASED | change}, r"_block_size \[128, 128\]\n")
            for change in (
                {"quant_method": "fbgemm_fp8"},
                {"weight_block_size": [64, 128]},
                {"weight_block_size": None},
                {"activation_scheme": "static"},
                {"fmt": "e5m2"},
                {"scale_fmt": "ue8m0"},
            )
        ),
        (
            GPT_OSS | {"quantization_config": MXFP4 | {"bits": 4}},
            "quant_method 'mxfp4'",
        ),
        (GPT_OSS | {"quantization_config": {}}, "quantization_config: null, or quant"),
        (GPT_OSS | {"swiglu_limit": 0}, "swiglu_alpha and swiglu_limit: from 0 to"),
    ],
)
def test_models_that_are_not_implemented_are_refused(changes, text, tmp_path):
    with pytest.raises(ArgumentError, match=text):
        write(tmp_path, **changes)


@pytest.mark.parametrize("text", [None, "", "[]", "{"])
def test_a_folder_without_a_model_is_refused(text, tmp_path):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ArgumentError, match="the model cannot be loaded"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b'{"eos_token_id": "a"}', "eos_token_id: ids of tokens"),
        (b'{"eos_token_id": 2.0}', "eos_token_id: ids of tokens"),
        (b'{"eos_token_id": [2, 7],', "a JSON object"),
        ('{"eos_token_id": [2, 7]'.encode("utf-16"), "a JSON object"),
        (b"[2, 7]", "a JSON object"),
        (b'{"suppress_tokens": [2]}', "suppress_tokens [] or null"),
        (
            b'{"forced_bos_token_id": 3, "other": 1}',
            "forced_bos_token_id null|got: forced_bos_token_id = 3; other = 1 to do",
        ),
    ],
)
def test_a_wrong_generation_config_is_refused_by_name(content, text, tmp_path):
    (tmp_path / "generation_config.json").write_bytes(content)
    where = f"where: {tmp_path / 'generation_config.json'} wanted|"
    refused(lambda: write(tmp_path), where + text, ArgumentError)


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_a_value_that_is_not_neutral_is_refused(name, tmp_path):
    words = f"wanted: {name} |got: {name} = 12345 to do"
    refused(lambda: write(tmp_path, **{name: 12345}), words, ArgumentError)


@pytest.mark.parametrize("value", [0, 1, True, "sigmoid", [0], {"a": 0}])
def test_a_field_that_is_unknown_is_refused(value, tmp_path):
    words = f"no unknown field logit_scale got: logit_scale = {json.dumps(value)} to do"
    refused(lambda: write(tmp_path, logit_scale=value), words, ArgumentError)


def test_all_fields_are_named_at_once(tmp_path):
    changes = {"is_causal": False, "embedding_multiplier": 12, "scale": "x" * 100}
    words = "wanted: embedding_multiplier 1 or null; is_causal true or null; no "
    words += "unknown field scale got: embedding_multiplier = 12; is_causal = false;|"
    words += "... to do"
    refused(lambda: write(tmp_path, **changes), words, ArgumentError)
