"""Tiny models of transformers, one or more of each family, that exercise each field of
their configurations which changes results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from etc_dist.models.gguf_keys import FIELDS
from tests.models.gguf_bytes import write

Array = np.ndarray[Any, Any]
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 136,
    "max_position_embeddings": 128,
    "rms_norm_eps": 2**-10,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


@dataclass(frozen=True)
class Case:
    """kind: the model_type. fields: of its configuration, in addition to SIZES. drops:
    by name, changes to these that a test must notice. gguf: keys of a GGUF file that
    the fields are, beyond the sizes; None: it is not tested."""

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    drops: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    gguf: Mapping[str, Any] | None = None

    def __str__(self) -> str:
        return self.kind


BIAS = {"attention_bias": True}
CASES = (
    Case("llama", BIAS, {"biases": {"attention_bias": False}}),
    Case("qwen2", gguf={}),
    Case("qwen3", BIAS, {"biases": {"attention_bias": False}}, {}),
    Case(
        "seed_oss",
        {"attention_out_bias": True},
        {"qkv": {"attention_bias": False}, "o": {"attention_out_bias": False}},
        {},
    ),
)


class Tiny:
    """A model of transformers with random weights, in fp32."""

    def __init__(self, case: Case, changes: Mapping[str, Any], weights: Any = None):
        """weights: those of another model, of which this one takes what it has."""
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        fields = {**SIZES, **case.fields, **changes}
        config = CONFIG_MAPPING[case.kind](**fields)
        self.model = AutoModelForCausalLM.from_config(config).float().eval()
        if weights is not None:
            self.model.load_state_dict(weights, strict=False)
            return
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for name, of in self.model.named_parameters():
                noise = torch.randn(of.shape, generator=generator)
                if of.ndim > 1:
                    noise *= of.shape[-1] ** -0.5
                elif name.endswith("bias"):
                    noise *= 0.5
                else:
                    noise = of + noise / 8  # of the initial gain
                of.copy_(noise.bfloat16())

    def save(self, folder: Path) -> None:
        """A Hugging Face folder, in bf16."""
        self.model.bfloat16().save_pretrained(folder)
        self.model.float()

    def save_gguf(self, path: Path, kind: str, keys: Mapping[str, Any]) -> None:
        """A GGUF file of architecture `kind`, whose names of tensors are those of the
        package gguf. keys: of this architecture, in addition to those of all."""
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

        config = self.model.config
        [arch] = [arch for arch, name in MODEL_ARCH_NAMES.items() if name == kind]
        names = get_tensor_name_map(arch, config.num_hidden_layers)
        tensors = {}
        for name, of in self.model.state_dict().items():
            stem, _, suffix = name.rpartition(".")
            if not (name == "lm_head.weight" and config.tie_word_embeddings):
                tensors[f"{names.get_name(stem)}.{suffix}"] = of.numpy()
        of_all = {
            key: getattr(config, field)
            for key, field in FIELDS.items()
            if getattr(config, field, None) is not None
        }
        rope = config.rope_parameters["rope_theta"]
        write(path, kind, tensors, **of_all, **{"rope.freq_base": float(rope)}, **keys)

    def logits(self, ids: Any) -> Array:
        """Of all positions of a text."""
        import torch

        with torch.no_grad():
            found = self.model(torch.tensor([list(ids)]), use_cache=False)
        return found.logits[0].numpy()
