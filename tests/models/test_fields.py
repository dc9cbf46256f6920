"""Fields of config.json that are honoured, or change nothing."""

from __future__ import annotations

import json

from etc_dist.errors import ArgumentError
from etc_dist.models.fields import DECODING, HONOURED, NEUTRAL, UNUSED
from tests.models.test_config import (
    ERNIE,
    EXPERTS,
    LLAMA3,
    MIXTRAL,
    QWEN,
    SMOL_3,
    write,
)

LINEAR = {"type": "linear", "factor": 4}
WINDOW = {"use_sliding_window": True, "sliding_window": 64}
GEMMA = {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 64}
GEMMA |= {"hidden_act": None}
QWEN_2_MOE = EXPERTS | {"architectures": ["Qwen2MoeForCausalLM"], "head_dim": None}
MINIMAX = {"architectures": ["MiniMaxM2ForCausalLM"], "head_dim": 128}
GLM = {"architectures": ["Glm4MoeForCausalLM"], "head_dim": 128}
HY = {"architectures": ["HYV3ForCausalLM"], "head_dim": 128}
GPT_OSS = {"architectures": ["GptOssForCausalLM"]}
CHANGES = {
    "architectures": ({}, ["Qwen3ForCausalLM"]),
    "attention_bias": ({}, True),
    "attn_logit_softcapping": (GEMMA, 50.0),
    "attention_out_bias": ({"architectures": ["SeedOssForCausalLM"]}, True),
    "eos_token_id": ({}, 7),
    "experts_per_token": (GPT_OSS, 2),
    "final_logit_softcapping": (GEMMA, 30.0),
    "first_k_dense_replace": (GLM, 2),
    "head_dim": ({}, 128),
    "hidden_act": ({}, "gelu"),
    "hidden_activation": (GEMMA, "silu"),
    "hidden_size": ({}, 1152),
    "intermediate_size": ({}, 768),
    "layer_types": ({}, ["sliding_attention"] * 30),
    "max_position_embeddings": ({}, 4096),
    "max_window_layers": (QWEN | WINDOW | {"max_window_layers": 30}, 29),
    "mlp_layer_types": (HY, ["dense"] * 2 + ["sparse"] * 28),
    "model_type": ({}, "qwen3"),
    "moe_intermediate_size": (EXPERTS, 64),
    "moe_k": (ERNIE, 2),
    "moe_layer_end_index": (ERNIE, 28),
    "moe_layer_start_index": (ERNIE, 2),
    "moe_num_experts": (ERNIE, 4),
    "moe_num_shared_experts": (ERNIE, 0),
    "moe_topk": ({"architectures": ["HunYuanMoEV1ForCausalLM"], "num_experts": 4}, 2),
    "n_group": (MIXTRAL, 2),
    "n_routed_experts": (EXPERTS, 64),
    "n_shared_experts": (GLM, 2),
    "no_rope_layer_interval": (SMOL_3, 2),
    "no_rope_layers": (SMOL_3, [1] * 29 + [0]),
    "norm_topk_prob": (EXPERTS, False),
    "num_attention_heads": ({}, 18),
    "num_experts": (EXPERTS, 64),
    "num_experts_per_tok": (EXPERTS, 4),
    "num_hidden_layers": ({}, 15),
    "num_key_value_heads": ({}, 9),
    "num_local_experts": (MIXTRAL, 16),
    "num_mtp_layers": ({}, 1),
    "num_nextn_predict_layers": ({}, 1),
    "num_shared_experts": (HY, 2),
    "original_max_position_embeddings": (LLAMA3, 4096),
    "partial_rotary_factor": ({"architectures": ["Phi3ForCausalLM"]}, 0.5),
    "qkv_bias": (QWEN_2_MOE, False),
    "quantization_config": (GPT_OSS, {"quant_method": "fp8"}),
    "query_pre_attn_scalar": (GEMMA, 168),
    "rms_norm_eps": ({}, 1e-6),
    "rope_parameters": ({}, LINEAR),
    "rope_scaling": ({}, LINEAR),
    "rope_local_base_freq": (GEMMA, 5e3),
    "rope_theta": ({}, 5e5),
    "rotary_dim": (MINIMAX, 64),
    "routed_scaling_factor": (MIXTRAL, 2.5),
    "router_scaling_factor": (HY, 2.5),
    "scoring_func": (MIXTRAL, "sigmoid"),
    "shared_expert_intermediate_size": (QWEN_2_MOE, 64),
    "sliding_window": (MIXTRAL, 64),
    "sliding_window_pattern": (GEMMA, 2),
    "swiglu_alpha": (GPT_OSS, 1.0),
    "swiglu_limit": (GPT_OSS, 9.0),
    "tie_word_embeddings": ({}, False),
    "topk_group": (MIXTRAL, 2),
    "topk_method": (MIXTRAL, "noaux_tc"),
    "use_qk_norm": ({}, True),
    "use_sliding_window": (QWEN | {"sliding_window": 64}, True),
    "vocab_size": ({}, 32000),
}
"""A value of each field that is honoured, and what else config.json has."""


def test_each_field_that_is_honoured_changes_the_model(tmp_path):
    assert CHANGES.keys() == HONOURED
    for name, (base, value) in CHANGES.items():
        before = write(tmp_path, **base)
        try:
            assert write(tmp_path, **base | {name: value}) != before, name
        except ArgumentError as error:
            assert error.where == str(tmp_path / "config.json")


def test_other_fields_change_nothing(tmp_path):
    values = dict.fromkeys(DECODING | UNUSED, 12345)
    values |= {name: values[-1] for name, values in NEUTRAL.items() if values}
    empty = {"a": None, "b": False, "c": "", "d": [], "e": {}}
    config = write(tmp_path, **values, **empty)
    assert config == write(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(values | empty))
    assert write(tmp_path) == config


def test_no_field_is_listed_twice():
    tables = HONOURED, NEUTRAL.keys(), DECODING, UNUSED
    assert len(frozenset().union(*tables)) == sum(map(len, tables))
