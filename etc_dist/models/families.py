"""The families of models: names, and defaults of fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from etc_dist.models.family import (
    NORMS,
    Family,
    all_but_each_last,
    every_layer,
    last_layers,
    three_of_four,
)
from etc_dist.models.mixture_families import MIXTURES, OF_MISTRAL, OPTIONAL_BIASES

OWN_FIELDS: Mapping[str, tuple[Any, ...]] = {
    "final_logit_softcapping": (),
    "hidden_activation": (),
    "qkv_bias": (False,),
    "query_pre_attn_scalar": (),
    "rope_local_base_freq": (),
    "shared_expert_intermediate_size": (0,),
    "sliding_window_pattern": (),
}
"""Fields that only some families read: refused of others unless null or one of these
values."""
_OF_GEMMA = (
    "final_logit_softcapping",
    "hidden_activation",
    "query_pre_attn_scalar",
    "rope_local_base_freq",
    "sliding_window_pattern",
)


LLAMA, QWEN = "LlamaForCausalLM", "Qwen3ForCausalLM"
QWEN_2 = "Qwen2ForCausalLM"
_OF_QWEN = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_WINDOWS_OF_QWEN: Mapping[str, Any] = {
    "slides": last_layers,
    "reads_layer_types": True,
    "window_switch": "use_sliding_window",
}
_OF_OLMO = {
    "vocab_size": 50304,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 50279,
}
_NORMS_OF_OLMO: Mapping[str, Any] = {
    "normalizes_all": True,
    "norms": {
        "post_attention_layernorm": "post_norm",
        "post_feedforward_layernorm": "post_mlp_norm",
    },
}
_LIST = (
    Family(
        LLAMA,
        "llama",
        {
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6,
            "eos_token_id": 2,
        },
        biases=OPTIONAL_BIASES,
        gguf="llama",
        layers="optional biases of q, k, v, o",
    ),
    Family(
        QWEN_2,
        "qwen2",
        _OF_QWEN,
        biases={"qkv": True},
        **_WINDOWS_OF_QWEN,
        gguf="qwen2",
        layers="biases of q, k, v",
    ),
    Family(
        QWEN,
        "qwen3",
        {**_OF_QWEN, "head_dim": 128},
        normalizes_heads=True,
        **_WINDOWS_OF_QWEN,
        biases=OPTIONAL_BIASES,
        gguf="qwen3",
        layers="norm of each query and key; optional biases of q, k, v, o",
    ),
    Family(
        "Gemma3ForCausalLM",
        "gemma3_text",
        {
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-6,
            "eos_token_id": 1,
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
        },
        theta=1e6,
        local_theta=1e4,
        normalizes_heads=True,
        biases=OPTIONAL_BIASES,
        slides=all_but_each_last,
        reads_layer_types=True,
        norms={
            "input_layernorm": "norm",
            "post_attention_layernorm": "post_norm",
            "pre_feedforward_layernorm": "mlp_norm",
            "post_feedforward_layernorm": "post_mlp_norm",
        },
        gain_offset=1,
        activation="gelu_pytorch_tanh",
        scales_embeddings=True,
        reads=frozenset(_OF_GEMMA),
        gguf="gemma3",
        layers="sliding windows, two rotary embeddings, four norms, GELU",
    ),
    Family(
        "Glm4ForCausalLM",
        "glm4",
        {
            "vocab_size": 151552,
            "hidden_size": 4096,
            "intermediate_size": 13696,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1.5625e-07,
            "eos_token_id": [151329, 151336, 151338],
            "attention_bias": True,
        },
        biases={"qkv": "attention_bias"},
        partial=0.5,
        is_paired=True,
        is_fused=True,
        norms={
            **NORMS,
            "post_self_attn_layernorm": "post_norm",
            "post_mlp_layernorm": "post_mlp_norm",
        },
        gguf="glm4",
        layers="biases of q, k, v; partial rotary embedding; four norms",
    ),
    Family(
        "HunYuanDenseV1ForCausalLM",
        "hunyuan_v1_dense",
        {
            "vocab_size": 290943,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 2,
        },
        normalizes_heads=True,
        normalizes_rotated=True,
        head_norms=("query_layernorm", "key_layernorm"),
        biases=OPTIONAL_BIASES,
        has_alpha=True,
        gguf="hunyuan-dense",
        layers="norm of each rotated query and key; optional biases of q, k, v, o",
    ),
    Family(
        "MistralForCausalLM",
        "mistral",
        OF_MISTRAL,
        slides=every_layer,
        layers="sliding window",
    ),
    Family(
        "MinistralForCausalLM",
        "ministral",
        OF_MISTRAL,
        slides=every_layer,
        reads_layer_types=True,
        layers="sliding windows of some layers",
    ),
    Family(
        "Ministral3ForCausalLM",
        "ministral3",
        {
            **OF_MISTRAL,
            "vocab_size": 131072,
            "num_hidden_layers": 34,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
        },
        rope={
            "rope_type": "yarn",
            "rope_theta": 1000000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale_all_dim": 1.0,
            "mscale": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
        slides=every_layer,
        layers="sliding window; queries that grow with the position",
    ),
    Family(
        "Olmo2ForCausalLM",
        "olmo2",
        _OF_OLMO,
        **_NORMS_OF_OLMO,
        gguf="olmo2",
        layers="norms of all queries and of all keys, after attention and the MLP",
    ),
    Family(
        "Olmo3ForCausalLM",
        "olmo3",
        {**_OF_OLMO, "sliding_window": 4096},
        **_NORMS_OF_OLMO,
        theta=5e5,
        local_theta=5e5,
        slides=three_of_four,
        reads_layer_types=True,
        layers="as olmo2, with sliding windows and two rotary embeddings",
    ),
    Family(
        "Phi3ForCausalLM",
        "phi3",
        {
            "vocab_size": 32064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 32000,
        },
        partial=1.0,
        rope_names={"su": "longrope", "yarn": "longrope"},
        is_fused=True,
        slides=every_layer,
        gguf="phi3",
        layers="fused matrices in the files, partial rotary embedding, sliding window",
    ),
    Family(
        "SeedOssForCausalLM",
        "seed_oss",
        {
            "vocab_size": 155136,
            "hidden_size": 4096,
            "intermediate_size": 27648,
            "num_hidden_layers": 64,
            "num_attention_heads": 80,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 524288,
            "rms_norm_eps": 1e-6,
            "eos_token_id": 2,
            "attention_bias": True,
        },
        biases={"qkv": "attention_bias", "o": "attention_out_bias"},
        gguf="seed_oss",
        layers="optional biases of q, k, v, and of o",
    ),
)
FAMILIES: Mapping[str, Family] = {
    family.architecture: family for family in (*_LIST, *MIXTURES)
}
"""By architecture."""
MODEL_TYPES = {name: family.model_type for name, family in FAMILIES.items()}
