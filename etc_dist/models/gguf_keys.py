"""The keys of a GGUF file's metadata that describe a model, and what each of them does.

Keys without a prefix follow that of the architecture, such as `llama.`. A key is
honoured, refused unless its value is neutral, or without influence. Any other
key of the architecture is refused. docs/model_files.md is made of these tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from etc_dist.models import gguf_mixtures
from etc_dist.models.config import ModelConfig
from etc_dist.models.families import FAMILIES
from etc_dist.models.family import Family
from etc_dist.models.fields import VARIANT_FIX, names, refused

ARCHITECTURE, TYPE = "general.architecture", "general.type"
FIELDS = {
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "expert_count": "num_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_used_count": "num_experts_per_tok",
    "feed_forward_length": "intermediate_size",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
"""The field of config.json that a key is."""
EACH_LAYER = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
"""The keys that may have an array, with a number for each layer."""
ROPE = names(
    """
    rope.scaling.factor rope.scaling.original_context_length rope.scaling.type
    rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow
    """
)
PREDICTING = "nextn_predict_layers"
"""The last ones of block_count, which predict further tokens."""
HONOURED = frozenset(FIELDS) | ROPE
OF_MIXTURES = frozenset(gguf_mixtures.VALUES) - FIELDS.keys()
"""Honoured of mixtures that have what they say, else refused unless neutral."""
WINDOW = "attention.sliding_window"
CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
Values = Callable[[ModelConfig], tuple[Any, ...]]
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.output_scale": (0, 1),
    "attention.shared_kv_layers": (0,),
    "attention.sliding_window": (0,),
    "attention.temperature_length": (0,),
    "attention.temperature_scale": (0,),
    "embedding_length_per_layer_input": (0,),
    "embedding_scale": (0, 1),
    "expert_chunk_feed_forward_length": (0,),
    "interleave_moe_layer_step": (0, 1),
    "logit_scale": (0, 1),
    "moe_every_n_layers": (0, 1),
    "n_deepstack_layers": (0,),
    PREDICTING: (0,),
    "residual_scale": (0, 1),
    "rope.scale_linear": (0, 1),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (-1, 0),
    "rope.scaling.yarn_log_multiplier": (0,),
    "router_logit_softcapping": (0,),
    "swin_norm": (False,),
    "use_parallel_residual": (False,),
}
"""Refused unless one of these values."""
OWN_SIZES: Mapping[str, Values] = {
    "attention.scale": lambda c: (0, float(np.float32(c.head.size**-0.5))),
    "attention.value_length": lambda c: (c.head.size,),
    "rope.scaling.attn_factor": lambda c: (c.rope.get("attention_factor", 1),),
    CAPS[0]: lambda c: (c.features.score_cap or 0,),
    CAPS[1]: lambda c: (c.features.logit_cap or 0,),
    "embedding_length_out": lambda c: (c.hidden,),
    "rope.dimension_count": lambda c: (c.head.rotated,),
}
"""Refused unless the value that follows from others."""
UNUSED = names(
    """
    attention.group_norm_epsilon attention.group_norm_groups
    attention.layer_norm_epsilon pooling_type rope.scaling.finetuned tensor_data_layout
    """
)
"""Notes, and numbers of layers that no model here has."""


def fields_of(
    kind: str, family: Family | None, metadata: Mapping[str, Any], path: Path
) -> dict[str, Any]:
    """The fields of config.json that the keys of architecture `kind` are; None for
    those that are missing. Raises ArgumentError for layers with different numbers.
    family: None for another one than all."""
    fields = {}
    for key, field in FIELDS.items():
        value = metadata.get(f"{kind}.{key}")
        if key in EACH_LAYER and isinstance(value, np.ndarray):
            value = _of_all_layers(f"{kind}.{key}", value, path)
        if key.startswith("expert_") and type(value) is int and value == 0:
            value = None  # a model without experts
        fields[field] = value
    if family is None:
        return fields
    layers = fields["num_hidden_layers"]
    if family.may_predict and type(layers) is int:
        count = metadata.get(f"{kind}.{PREDICTING}", 0)
        if type(count) is not int or not 0 <= count < layers:
            wanted = f"{kind}.{PREDICTING}: an integer below block_count"
            raise refused(path, wanted, repr(count)[:120], VARIANT_FIX)
        fields["num_hidden_layers"] = layers - count
    return fields | gguf_mixtures.mixture_fields(kind, family, metadata)


def _of_all_layers(name: str, values: Any, path: Path) -> Any:
    if len(values) == 0 or (values != values[0]).any():
        got = f"{name} = {values.tolist()}"[:120]
        raise refused(path, f"{name}: one number for all layers", got, VARIANT_FIX)
    return values[0].item()


def refuse_keys(
    kind: str, metadata: Mapping[str, Any], config: ModelConfig, path: Path
) -> None:
    """Raise ArgumentError that names the keys of architecture `kind` that are unknown
    or not neutral."""
    faults = []
    known_keys = (HONOURED | UNUSED) - gguf_mixtures.VALUES.keys()
    known_keys |= {PREDICTING} if FAMILIES[config.architecture].may_predict else set()
    for name, value in metadata.items():
        prefix, _, key = name.partition(".")
        is_known = key in known_keys
        if prefix == kind and not is_known and not _is_neutral(key, value, config):
            faults.append(f"{name} = {value!r}"[:120])
    if faults:
        wanted = "no variants beyond those of docs/model_files.md"
        raise refused(path, wanted, "; ".join(faults), VARIANT_FIX)


def _is_neutral(key: str, value: Any, config: ModelConfig) -> bool:
    if key == WINDOW and type(value) is int and value >= config.positions:
        return True
    if key == WINDOW and value in config.windows:
        return True
    return isinstance(value, (bool, int, float)) and value in _values(key, config)


def _values(key: str, config: ModelConfig) -> tuple[Any, ...]:
    """Those that a key may have."""
    if key in gguf_mixtures.VALUES:
        return gguf_mixtures.values(key, config)
    return OWN_SIZES[key](config) if key in OWN_SIZES else NEUTRAL.get(key, ())
