"""The families of models: names, defaults of fields, and how their layers differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

NORMS = {"input_layernorm": "norm", "post_attention_layernorm": "mlp_norm"}
"""Before attention, and before the MLP."""


OWN_FIELDS = frozenset(
    {
        "final_logit_softcapping",
        "hidden_activation",
        "query_pre_attn_scalar",
        "rope_local_base_freq",
        "sliding_window_pattern",
    }
)
"""Fields that only some families read."""


def no_layer(number: int, given: Mapping[str, Any]) -> bool:
    """The layers of a family without sliding windows."""
    return False


def every_layer(number: int, given: Mapping[str, Any]) -> bool:
    """Those of a family whose layers are alike."""
    return True


def three_of_four(number: int, given: Mapping[str, Any]) -> bool:
    """All layers but each fourth."""
    return (number + 1) % 4 != 0


def all_but_each_last(number: int, given: Mapping[str, Any]) -> bool:
    """All layers but the last of each sliding_window_pattern."""
    pattern = given["sliding_window_pattern"]
    return type(pattern) is int and pattern > 0 and (number + 1) % pattern != 0


def last_layers(number: int, given: Mapping[str, Any]) -> bool:
    """Those from max_window_layers on."""
    first = given["max_window_layers"]
    return type(first) is int and number >= first


@dataclass(frozen=True)
class Family:
    """Models of one architecture, which is a name in config.json.

    model_type: its other name there. defaults: the values of fields that a file does
    not have, as in transformers. theta: the default of rope_theta. normalizes_heads:
    each query and key is normalized; normalizes_all: all of a row together;
    normalizes_rotated: after they are rotated. head_norms: the names of these norms in
    the files. biases: of the matmuls `qkv` and `o`: True, or the field that says
    whether there are any. has_experts: in place of an MLP. partial: the default of
    partial_rotary_factor; None: it is 1. is_paired: neighbours are rotated together.
    rope_names: other names of kinds of rotary embeddings. is_fused: q, k and v are one
    matrix in the files, as are gate and up. rope: the default of rope_parameters.
    has_alpha: "dynamic" may have alpha. local_theta: the default of rope_theta in
    layers with a sliding window, which have a rotary embedding of their own; None: they
    have not.

    norms: the array of each norm of a layer, by its name in the files. gain_offset: is
    added to their gains. activation: of the MLP, as hidden_activation has it.
    scales_embeddings: by the root of their size.

    reads: those of OWN_FIELDS that change results.

    slides: whether a layer has a sliding window, if the model has one: by its number
    and the fields of config.json. reads_layer_types: layer_types decides, if it is
    given. window_switch: the field without which no layer has one.

    gguf: general.architecture of its GGUF files. layers: what they have, for users."""

    architecture: str
    model_type: str
    defaults: Mapping[str, Any]
    theta: float = 1e4
    normalizes_heads: bool = False
    normalizes_all: bool = False
    normalizes_rotated: bool = False
    head_norms: tuple[str, str] = ("q_norm", "k_norm")
    biases: Mapping[str, str | bool] = field(default_factory=dict)
    has_experts: bool = False
    partial: float | None = None
    is_paired: bool = False
    rope_names: Mapping[str, str] = field(default_factory=dict)
    is_fused: bool = False
    rope: Mapping[str, Any] = field(default_factory=dict)
    has_alpha: bool = False
    local_theta: float | None = None
    gain_offset: int = 0
    activation: str = "silu"
    scales_embeddings: bool = False
    reads: frozenset[str] = frozenset()
    norms: Mapping[str, str] = field(default_factory=lambda: NORMS)
    slides: Callable[[int, Mapping[str, Any]], bool] = no_layer
    reads_layer_types: bool = False
    window_switch: str = ""
    gguf: str = ""
    layers: str = "plain"

    def has_bias(self, matmul: str, given: Mapping[str, Any]) -> bool:
        """Whether a matmul has a bias. given: the fields of config.json."""
        bias = self.biases.get(matmul, False)
        return given.get(bias) is True if isinstance(bias, str) else bias


LLAMA, QWEN = "LlamaForCausalLM", "Qwen3ForCausalLM"
QWEN_2 = "Qwen2ForCausalLM"
QWEN_MOE, MIXTRAL = "Qwen3MoeForCausalLM", "MixtralForCausalLM"
OPTIONAL_BIASES = {"qkv": "attention_bias", "o": "attention_bias"}
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
_OF_MISTRAL = {
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
        has_experts=True,
        slides=every_layer,
        window_switch="use_sliding_window",
        gguf="qwen3moe",
        layers="as qwen3, with a mixture of experts",
    ),
    Family(
        MIXTRAL,
        "mixtral",
        {
            **_OF_MISTRAL,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
        },
        theta=1e6,
        has_experts=True,
        slides=every_layer,
        layers="a mixture of experts",
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
        reads=OWN_FIELDS,
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
        _OF_MISTRAL,
        slides=every_layer,
        layers="sliding window",
    ),
    Family(
        "MinistralForCausalLM",
        "ministral",
        _OF_MISTRAL,
        slides=every_layer,
        reads_layer_types=True,
        layers="sliding windows of some layers",
    ),
    Family(
        "Ministral3ForCausalLM",
        "ministral3",
        {
            **_OF_MISTRAL,
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
FAMILIES: Mapping[str, Family] = {family.architecture: family for family in _LIST}
"""By architecture."""
MODEL_TYPES = {family.architecture: family.model_type for family in _LIST}
