"""The models of decode steps: fields of their public config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.harness import SMALL
from etc_dist.functions.scaled_weights import BLOCK
from etc_dist.models.config import ModelConfig, parse_config
from etc_dist.models.float8 import METHOD, UNCONVERTED
from etc_dist.models.mixture_families import QWEN_MOE
from etc_dist.models.quantized import FIELD

Fields = Mapping[str, Any]
FLOAT8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": METHOD,
    "weight_block_size": [BLOCK, BLOCK],
}
"""The quantization_config of a model with float8 weights."""


def qwen3(layers: int, hidden: int, inner: int, heads: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "hidden_act": "silu",
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    }


def experts(fields: Fields, count: int, top_k: int) -> dict[str, Any]:
    """With experts of the same inner size in place of each MLP."""
    return {
        **fields,
        "architectures": [QWEN_MOE],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": fields["intermediate_size"],
        "num_experts": count,
        "num_experts_per_tok": top_k,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def gpt_oss(layers: int, hidden: int, heads: int, count: int) -> dict[str, Any]:
    """count: of experts."""
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_size": hidden,
        "intermediate_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": count,
        "num_experts_per_tok": 4,
        "vocab_size": 201088,
        "max_position_embeddings": 131072,
        "initial_context_length": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        "swiglu_limit": 7.0,
        "attention_bias": True,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": 200002,
        "pad_token_id": 199999,
    }


LLAMA_1B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
QWEN_2_32B = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "vocab_size": 152064,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "sliding_window": 131072,
    "max_window_layers": 64,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "bos_token_id": 151643,
    "eos_token_id": 151643,
}
MISTRAL_24B = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "hidden_size": 5120,
    "intermediate_size": 32768,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 131072,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e8,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


GLM_4_AIR = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "num_nextn_predict_layers": 1,
    "vocab_size": 151552,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000,
    "partial_rotary_factor": 0.5,
    "use_qk_norm": False,
    "attention_bias": True,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "eos_token_id": [151329, 151336, 151338],
    "pad_token_id": 151329,
}


def in_float8(fields: Fields) -> dict[str, Any]:
    """With float8 weights of all matmuls but that of the output head."""
    count = fields["num_hidden_layers"] if "num_experts" in fields else 0
    routers = [f"model.layers.{n}.mlp.gate" for n in range(count)]
    return {**fields, FIELD: FLOAT8 | {UNCONVERTED: ["lm_head", *routers]}}


def config_of(fields: Fields) -> ModelConfig:
    """Without stop tokens, which random weights may choose."""
    return replace(parse_config(fields, Path("config.json")), stop_tokens=())


FIELDS: dict[str, Fields] = {
    "qwen3-8b": qwen3(36, 4096, 12288, 32),
    "qwen3-14b": qwen3(40, 5120, 17408, 40),
    "qwen3-32b": qwen3(64, 5120, 25600, 64),
    "qwen3-30b-a3b": {
        **experts(qwen3(48, 2048, 768, 32), 128, 8),
        "num_key_value_heads": 4,
    },
}
FIELDS |= {f"{name}-fp8": in_float8(fields) for name, fields in FIELDS.items()}
FIELDS |= {
    "llama-3.2-1b": LLAMA_1B,
    "qwen2.5-32b": QWEN_2_32B,
    "mistral-small-24b": MISTRAL_24B,
    "glm-4.5-air": GLM_4_AIR,
    "gpt-oss-20b": gpt_oss(24, 2880, 64, 32),
}
MODELS = {name: config_of(fields) for name, fields in FIELDS.items()}
SIZES = {
    "hidden_size": 72,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 24,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "vocab_size": 576,
    "max_position_embeddings": 512,
}
SMALL_FIELDS: dict[str, Fields] = {SMALL: qwen3(0, 0, 0, 0) | SIZES}
SMALL_FIELDS["small-experts"] = experts(
    {**SMALL_FIELDS[SMALL], "intermediate_size": 48}, 16, 4
)
OF_BLOCKS: Fields = {
    "hidden_size": 144,
    "intermediate_size": 384,
    "moe_intermediate_size": 384,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}
"""Sizes of more than a block of float8 weights, of which 2 ranks have parts."""
SMALL_FIELDS |= {
    f"{name}-fp8": in_float8({**fields, **OF_BLOCKS})
    for name, fields in SMALL_FIELDS.items()
}
SMALL_FIELDS |= {
    "small-tied": {**LLAMA_1B, **SIZES},
    "small-biases": {**QWEN_2_32B, **SIZES},
    "small-dense": {
        **GLM_4_AIR,
        **SIZES,
        "moe_intermediate_size": 48,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 2.0,
    },
    "small-sinks": {**gpt_oss(2, 72, 24, 16), "vocab_size": 576, "sliding_window": 20},
}
SMALL_MODELS = {name: config_of(fields) for name, fields in SMALL_FIELDS.items()}
"""The models that the CPU backend checks."""
