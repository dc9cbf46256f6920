"""The families of models with a mixture of experts."""

from __future__ import annotations

from etc_dist.models.family import Family, MixtureForm, every_layer, every_other

OPTIONAL_BIASES = {"qkv": "attention_bias", "o": "attention_bias"}
OF_MISTRAL = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 2,
    "sliding_window": 4096,
}
QWEN_MOE = "Qwen3MoeForCausalLM"
_QWEN = MixtureForm()
MIXTURES = (
    Family(
        QWEN_MOE,
        "qwen3_moe",
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "sliding_window": 4096,
        },
        normalizes_heads=True,
        biases=OPTIONAL_BIASES,
        mixture=_QWEN,
        slides=every_layer,
        window_switch="use_sliding_window",
        gguf="qwen3moe",
        layers="as qwen3, with a mixture of experts",
    ),
    Family(
        "MixtralForCausalLM",
        "mixtral",
        {
            **OF_MISTRAL,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
        },
        theta=1e6,
        mixture=MixtureForm(
            inner="intermediate_size",
            block="block_sparse_moe",
            names=("w1", "w3", "w2"),
            normalizes=True,
        ),
        slides=every_layer,
        layers="a mixture of experts",
    ),
    Family(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "sliding_window": 4096,
            "max_window_layers": 28,
            "qkv_bias": True,
        },
        biases={"qkv": "qkv_bias"},
        mixture=MixtureForm(
            shared="shared_expert",
            shared_gate="shared_expert_gate",
            shared_inner="shared_expert_intermediate_size",
        ),
        slides=every_other,
        reads_layer_types=True,
        window_switch="use_sliding_window",
        reads=frozenset({"qkv_bias", "shared_expert_intermediate_size"}),
        layers="biases of q, k, v; a mixture with a gated shared expert",
    ),
)
"""These families."""
