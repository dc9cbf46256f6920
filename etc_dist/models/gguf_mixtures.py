"""Mixtures of experts in GGUF files: their keys, and the names of their tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from etc_dist.functions.router import Router
from etc_dist.models.config import ModelConfig
from etc_dist.models.family import MLP_NAMES, Family

NORMALIZED = ("qwen3moe",)
"""Architectures whose weights of a row are divided by their sum, without a key."""
GATES = {"softmax": 1, "sigmoid": 2, "softmax_chosen": 3}
"""expert_gating_func of each score."""
CORRECTION, SHARED_GATE = "exp_probs_b", "ffn_gate_inp_shexp"
VALUES: Mapping[str, Callable[[ModelConfig, Router], tuple[Any, ...]]] = {
    "expert_feed_forward_length": lambda c, r: (c.inner,),
    "expert_gating_func": lambda c, r: (0, GATES[r.score]),
    "expert_group_count": lambda c, r: (0, r.num_groups),
    "expert_group_used_count": lambda c, r: (0, r.topk_group),
    "expert_shared_count": lambda c, r: (c.shared_inner // c.inner,),
    "expert_shared_feed_forward_length": lambda c, r: (c.shared_inner,),
    "expert_weights_norm": lambda c, r: (r.normalize,),
    "expert_weights_scale": lambda c, r: (0, r.scale),
    "leading_dense_block_count": lambda c, r: (c.dense_layers,),
}
"""What keys may say of a model with a router: what it does, and 0 for the default."""
PLAIN: Mapping[str, tuple[Any, ...]] = {
    "expert_feed_forward_length": (0,),
    "expert_gating_func": (0, 1),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0, 1),
    "leading_dense_block_count": (0,),
}
"""And of one without."""


def values(key: str, config: ModelConfig) -> tuple[Any, ...]:
    """The values of a key that fit the model."""
    if config.mixture is None:
        return PLAIN[key]
    return VALUES[key](config, config.mixture.router)


def mixture_fields(
    kind: str, family: Family, metadata: Mapping[str, Any]
) -> dict[str, Any]:
    """The fields of config.json of a mixture that keys of architecture `kind` are."""
    form = family.mixture
    if form is None:
        return {}
    normalizes = form.normalizes if isinstance(form.normalizes, str) else ""
    shared = "" if form.shared_count else form.shared_inner
    grouped = ("n_group", "topk_group") if form.is_grouped else ("", "")
    fields: dict[str, tuple[str, Any]] = {
        "expert_group_count": (grouped[0], 1),
        "expert_group_used_count": (grouped[1], 1),
        "expert_shared_count": (form.shared_count, 0),
        "expert_weights_norm": (normalizes, kind in NORMALIZED),
        "expert_weights_scale": (form.scale, 1.0),
        "leading_dense_block_count": (form.dense, 0),
    }
    if shared not in ("", "intermediate_size"):
        fields["expert_shared_feed_forward_length"] = shared, None
    values = {}
    for key, (field, default) in fields.items():
        value = metadata.get(f"{kind}.{key}", 0)
        value = value.tolist() if isinstance(value, np.ndarray) else value
        if field:
            values[field] = default if value == 0 and value is not False else value
    return values


def mixture_tensors(family: Family) -> dict[str, str]:
    """The names in safetensors files of the tensors of a mixture's layer. Those of
    experts are stacked; {} stands for the number of one."""
    form = family.mixture
    if form is None:
        return {}
    names = {"ffn_gate_inp": form.gate, CORRECTION: form.correction}
    names[SHARED_GATE] = form.shared_gate
    for part, of_expert, of_shared in zip(
        ("gate", "up", "down"), form.names, MLP_NAMES, strict=True
    ):
        names[f"ffn_{part}_exps"] = f"experts.{{}}.{of_expert}"
        names[f"ffn_{part}_shexp"] = f"{form.shared}.{of_shared}" if form.shared else ""
    return {name: f"{form.block}.{of}" for name, of in names.items() if of}
