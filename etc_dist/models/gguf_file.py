"""Models in GGUF files: configuration and weights, with the names that a Hugging
Face folder has. The package `gguf` dequantizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from etc_dist.models.config import ModelConfig, parse_config
from etc_dist.models.extras import extra_module
from etc_dist.models.families import FAMILIES
from etc_dist.models.family import Family
from etc_dist.models.fields import names, refused
from etc_dist.models.gguf_keys import (
    ARCHITECTURE,
    CAPS,
    TYPE,
    WINDOW,
    fields_of,
    refuse_keys,
)
from etc_dist.models.gguf_mixtures import CORRECTION, SHARED_GATE, mixture_tensors
from etc_dist.models.gguf_reader import GgufTensor
from etc_dist.models.gguf_split import read_parts
from etc_dist.models.part import WHOLE, Part
from etc_dist.models.rope import LENGTH, is_number
from etc_dist.models.weights import stack_weights

ARCHITECTURES = {family.gguf: name for name, family in FAMILIES.items() if family.gguf}
PARTIAL_KINDS = [
    family.gguf for family in FAMILIES.values() if family.partial is not None
]
PAIRED = ("llama", "smollm3")
"""Architectures whose queries and keys are stored with the two elements that the
rotary embedding rotates next to each other."""
FACTORS = "rope_freqs.weight"
"""Divisors of the rotary embedding's rates."""
LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
"""Those of longrope, for short and for long texts."""
YARN_KEYS = {
    LENGTH: "original_context_length",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
HUNYUAN = {
    "attn_q_norm": "self_attn.query_layernorm",
    "attn_k_norm": "self_attn.key_layernorm",
}
OF_GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GEMMAS = {"gemma2": 46, "gemma3": 62}
"""Architectures, and the layers of the largest model, which has another scale."""
SINKS = "attn_sinks"
OTHER_TENSORS = {
    **dict.fromkeys(GEMMAS, OF_GEMMA),
    "hunyuan-dense": HUNYUAN,
    "hunyuan-moe": HUNYUAN,
    "glm4": {
        "ffn_up": "mlp.gate_up_proj",
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
    },
    "olmo2": {
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "glm4moe": {"post_attention_norm": "post_attention_layernorm"},
    "gpt-oss": {
        "post_attention_norm": "post_attention_layernorm",
        SINKS: "self_attn.sinks",
    },
    "seed_oss": {"post_attention_norm": "post_attention_layernorm"},
}
"""Those of an architecture that differ."""
STOPS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
STOP_TEXTS = names(
    """
    <|endoftext|> <|end_of_text|> <|im_end|> <|eot_id|> <|eom_id|> <|end|>
    <|return|> <|call|> <end_of_turn> <EOT> _<EOT>
    """
)
"""Tokens that end a text: by their role, and by their text, as in llama.cpp. A file
has one id of a role, where the folder of the same model may have several."""
NO_TOKEN = 2**32 - 1
"""The id of a role that no token has: -1 as an unsigned number."""
TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


class GgufFile:
    """The model in a GGUF file, or in parts of which `path` is one.

    Raises ArgumentError for files that cannot be read, and parts that are missing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._dequantize = extra_module("gguf").quants.dequantize
        self._content = read_parts(path)

    def get(self, key: str, default: Any = None) -> Any:
        """A value of the metadata: a number, a text or a list."""
        value = self._content.metadata.get(key, default)
        texts = value if isinstance(value, list) else [value]
        wrong = [text for text in texts if isinstance(text, bytes)]
        if wrong:
            wanted = f"{key}: texts in UTF-8"
            raise refused(self.path, wanted, repr(wrong[0][:40]), "use another file")
        return value.tolist() if isinstance(value, np.ndarray) else value

    def key_names(self) -> tuple[str, ...]:
        """The keys of the metadata."""
        return tuple(self._content.metadata)

    def config(self) -> ModelConfig:
        """The configuration of the model. ArgumentError if it is not supported."""
        if self.get(TYPE, "model") != "model":
            fix = "give the file of a model, into which adapters are merged"
            got = f"{TYPE} = {self.get(TYPE)!r}"
            raise refused(self.path, f"{TYPE} 'model'", got, fix)
        kind = str(self.get(ARCHITECTURE))
        tokens, metadata = self._tokens(), self._content.metadata
        names = {tensor.name for tensor in self._content.tensors}
        family = self._family()
        fields = fields_of(kind, family, metadata, self.path)
        bias, norm = "attention_bias", "use_qk_norm"
        bias_field = None if family is None else family.biases.get("qkv")
        if isinstance(bias_field, str):
            bias = bias_field
        if family is not None and isinstance(family.normalizes_heads, str):
            fields[norm] = "blk.0.attn_q_norm.weight" in names
        fields |= {
            "architectures": [ARCHITECTURES.get(kind, f"{kind} of a GGUF file")],
            "tie_word_embeddings": "output.weight" not in names,
            "eos_token_id": self._stops(tokens),
            "rope_scaling": self._rope(kind),
            "partial_rotary_factor": self._partial(kind, fields),
            "sliding_window": None,
            bias: "blk.0.attn_q.bias" in names,
            "attention_out_bias": "blk.0.attn_output.bias" in names,
        }
        defaults = {"rope_theta": 10000.0, "vocab_size": len(tokens)}
        fields |= {n: v for n, v in defaults.items() if fields[n] is None}
        if kind == "gpt-oss":
            fields["sliding_window"] = self.get(f"{kind}.{WINDOW}")
        if kind in GEMMAS:
            fields |= self._of_gemma(kind, fields)
        config = parse_config(fields, self.path)
        if kind in PAIRED:
            config = replace(config, head=replace(config.head, is_paired=True))
        refuse_keys(kind, metadata, config, self.path)
        return config

    def _family(self) -> Family | None:
        return FAMILIES.get(ARCHITECTURES.get(str(self.get(ARCHITECTURE)), ""))

    def _partial(self, kind: str, fields: Mapping[str, Any]) -> float | None:
        """The share of a head's elements that are rotated."""
        rotated, size = self.get(f"{kind}.rope.dimension_count"), fields["head_dim"]
        whole, heads = (fields[f] for f in ("hidden_size", "num_attention_heads"))
        if size is None and type(whole) is type(heads) is int and heads > 0:
            size = whole // heads
        numbers = is_number(rotated) and is_number(size)
        return rotated / size if numbers and kind in PARTIAL_KINDS else None

    def _of_gemma(self, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The window, caps, and the scale of scores, which has no key: as in llama.cpp,
        that of the largest model does not follow from the size of its heads."""
        window, scale = self.get(f"{kind}.{WINDOW}"), fields["head_dim"]
        whole, heads = (fields[f] for f in ("hidden_size", "num_attention_heads"))
        is_largest = fields["num_hidden_layers"] == GEMMAS[kind]
        if is_largest and is_number(whole) and is_number(heads):
            scale = whole / heads
        caps = {name: self.get(f"{kind}.{name}") for name in CAPS}
        caps = {name: cap or None for name, cap in caps.items() if cap is not None}
        return {"sliding_window": window, "query_pre_attn_scalar": scale, **caps}

    def _tokens(self) -> list[str]:
        name = "tokenizer.ggml.tokens"
        tokens = self.get(name, [])
        if not isinstance(tokens, list) or not all(type(t) is str for t in tokens):
            wanted, got = f"{name}: a list of texts", repr(tokens)[:80]
            raise refused(self.path, wanted, got, "use another file")
        return tokens

    def _stops(self, tokens: list[str]) -> list[int]:
        """The ids of tokens that end a text."""
        stops = {n for n, token in enumerate(tokens) if token in STOP_TEXTS}
        for role in STOPS:
            name = f"tokenizer.ggml.{role}_token_id"
            token = self.get(name, NO_TOKEN)
            if type(token) is not int:
                wanted, got = f"{name}: the id of a token", repr(token)[:80]
                raise refused(self.path, wanted, got, "use another file")
            stops.add(token)
        return sorted(stops - {NO_TOKEN})

    def weights(
        self,
        config: ModelConfig,
        dtype: str,
        part: Part = WHOLE,
        backend: str = "cpu",
    ) -> dict[str, Any]:
        """As `load_weights`."""
        return stack_weights(self.tensors(), config, dtype, self.path, part, backend)

    def _rope(self, architecture: str) -> dict[str, Any]:
        # As llama.cpp: a factor without a type is a linear one.
        key = f"{architecture}.rope.scaling"
        factor = self.get(f"{key}.factor", 1.0)
        is_linear = factor not in (0.0, 1.0)
        kind = self.get(f"{key}.type", "linear" if is_linear else "none")
        tensor_by_name = {t.name: t for t in self._content.tensors}
        if all(name in tensor_by_name for name in LONG_FACTORS):
            short, long = (self._values(tensor_by_name[name]) for name in LONG_FACTORS)
            scale = self.get(f"{key}.attn_factor")
            length = self.get(f"{key}.original_context_length")
            rope = {"rope_type": "longrope", "attention_factor": scale, LENGTH: length}
            return {
                **rope,
                "short_factor": short.tolist(),
                "long_factor": long.tolist(),
            }
        factors = [tensor_by_name[FACTORS]] if FACTORS in tensor_by_name else []
        if factors and kind != "none":
            return {"rope_type": f"{kind} with {FACTORS}"}
        if factors:
            return {"rope_type": "factors", "factors": self._values(factors[0])}
        if kind == "none":
            return {"rope_type": "default"}
        rope = {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            rope |= {n: self.get(f"{key}.{of}") for n, of in YARN_KEYS.items()}
            family = self._family()
            rope["truncate"] = None if family is None else family.rope.get("truncate")
        return rope

    def tensors(self) -> Iterator[tuple[str, Any]]:
        """The tensors by their names in safetensors files."""
        layer_tensors, offset = LAYER_TENSORS, 0
        if (family := self._family()) is not None:
            family_tensors = OTHER_TENSORS.get(family.gguf, {})
            layer_tensors = LAYER_TENSORS | family_tensors | mixture_tensors(family)
            offset = family.gain_offset
        for tensor in self._content.tensors:
            if tensor.name in (FACTORS, *LONG_FACTORS):
                continue
            values = self._values(tensor)
            if offset and tensor.name.endswith("norm.weight"):
                values = values - offset  # which a file contains
            _, _, place = tensor.name.partition("blk.")
            layer, _, name = place.partition(".")
            stem, _, suffix = name.rpartition(".")
            is_prediction = stem.startswith("nextn.")
            layer_name = layer_tensors.get(stem, stem if is_prediction else None)
            if layer_name is None or suffix not in ("weight", "bias"):
                yield TENSORS.get(tensor.name, tensor.name), values
                continue
            if stem == SHARED_GATE:
                values = values.reshape(1, -1)
            end = "" if stem in (CORRECTION, SINKS) else f".{suffix}"
            parts = values if "{}" in layer_name else [values]
            for expert, part in enumerate(parts):
                yield f"model.layers.{layer}.{layer_name.format(expert)}{end}", part

    def _values(self, tensor: GgufTensor) -> Any:
        try:
            return self._dequantize(tensor.data, tensor.kind)
        except NotImplementedError as error:
            wanted = "tensors of a type that the package gguf can dequantize"
            got = f"{tensor.name}: {tensor.kind.name}"
            fix = "use a file of another quantization"
            raise refused(self.path, wanted, got, fix) from error
