"""Models in GGUF files: configuration and weights, with the names that a Hugging
Face folder has. The package `gguf` dequantizes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from etc_dist.models.config import LLAMA, QWEN_MOE, ModelConfig, parse_config
from etc_dist.models.experts import Mixture
from etc_dist.models.extras import extra_module
from etc_dist.models.gguf_reader import GgufTensor
from etc_dist.models.gguf_split import read_parts
from etc_dist.models.part import WHOLE, Part
from etc_dist.models.safetensors_file import weights_error
from etc_dist.models.weights import stack_weights

ARCHITECTURES = {
    "llama": LLAMA,
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": QWEN_MOE,
}
PAIRED = ("llama",)
"""Architectures whose queries and keys are stored with the two elements that the
rotary embedding rotates next to each other."""
FACTORS = "rope_freqs.weight"
"""Divisors of the rotary embedding's rates."""
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
"""Those of experts are stacked; {} stands for the number of one."""
KEYS = {
    "embedding_length",
    "feed_forward_length",
    "block_count",
    "context_length",
    "vocab_size",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.finetuned",  # a note
    "rope.scaling.original_context_length",  # contained in the factors
}
"""Metadata of an architecture that is read, or has no effect here."""
STOPS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
STOP_TEXTS = {
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<EOT>",
    "_<EOT>",
}
"""Tokens that end a text: by their role, and by their text, as in llama.cpp. A file
has one id of a role, where the folder of the same model may have several."""
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
            raise weights_error(
                self.path, wanted, repr(wrong[0][:40]), "use another file"
            )
        return value.tolist() if isinstance(value, np.ndarray) else value

    def key_names(self) -> tuple[str, ...]:
        """The keys of the metadata."""
        return tuple(self._content.metadata)

    def config(self) -> ModelConfig:
        kind = self.get("general.architecture")

        def of(key: str, default: Any = None) -> Any:
            return self.get(f"{kind}.{key}", default)

        names = {tensor.name for tensor in self._content.tensors}
        tokens = self.get("tokenizer.ggml.tokens", ())
        stops = [self.get(f"tokenizer.ggml.{n}_token_id") for n in STOPS]
        stops += [n for n, token in enumerate(tokens) if token in STOP_TEXTS]
        given = {
            "architectures": [ARCHITECTURES.get(kind, f"{kind} of a GGUF file")],
            "hidden_size": of("embedding_length"),
            "intermediate_size": of("feed_forward_length"),
            "num_hidden_layers": of("block_count"),
            "num_attention_heads": of("attention.head_count"),
            "num_key_value_heads": of("attention.head_count_kv"),
            "head_dim": of("attention.key_length"),
            "rms_norm_eps": of("attention.layer_norm_rms_epsilon"),
            "rope_theta": of("rope.freq_base", 10000.0),
            "max_position_embeddings": of("context_length"),
            "vocab_size": of("vocab_size", len(tokens)),
            "tie_word_embeddings": "output.weight" not in names,
            "eos_token_id": sorted({stop for stop in stops if stop is not None}),
            "rope_scaling": self._rope(of),
            "moe_intermediate_size": of("expert_feed_forward_length"),
            "num_experts": of("expert_count"),
            "num_experts_per_tok": of("expert_used_count"),
            "norm_topk_prob": True,
        }
        config = parse_config(given, self.path)
        self._refuse_variants(kind, config)
        return config

    def _refuse_variants(self, kind: str, config: ModelConfig) -> None:
        """Refuse metadata that changes the model in a way that is not implemented."""
        mixture = config.mixture or Mixture(0, 0, normalizes=True)
        neutral = {
            "rope.dimension_count": config.head_dim,
            "rope.scale_linear": 1.0,
            "rope.scaling.attn_factor": 1.0,
            "attention.value_length": config.head_dim,
            "attention.sliding_window": 0,
            "attention.causal": True,
            "expert_count": mixture.experts,
            "expert_used_count": mixture.top_k,
            "expert_feed_forward_length": config.inner,
            "expert_shared_count": 0,
            "expert_gating_func": 1,  # softmax
            "expert_weights_norm": mixture.normalizes,
        }
        found = []
        for name in self._content.metadata:
            prefix, _, key = name.partition(".")
            if prefix != kind or key in KEYS:
                continue
            value = self.get(name)
            if key not in neutral or value != neutral[key]:
                found.append(f"{name} = {value!r}")
        if found:
            wanted = "no variants beyond those of docs/models.md"
            fix = "use another file, or the Hugging Face folder of this model"
            raise weights_error(self.path, wanted, ", ".join(found), fix)

    def weights(
        self, config: ModelConfig, dtype: str, part: Part = WHOLE
    ) -> dict[str, Any]:
        """As `load_weights`."""
        return stack_weights(self.tensors(config), config, dtype, self.path, part)

    def _rope(self, of: Any) -> dict[str, Any]:
        # As llama.cpp: a factor without a type is a linear one.
        is_linear = of("rope.scaling.factor", 1.0) not in (0.0, 1.0)
        kind = of("rope.scaling.type", "linear" if is_linear else "none")
        factors = [t for t in self._content.tensors if t.name == FACTORS]
        if factors and kind != "none":
            return {"rope_type": f"{kind} with {FACTORS}"}
        if factors:
            return {"rope_type": "factors", "factors": self._values(factors[0])}
        if kind == "none":
            return {"rope_type": "default"}
        return {"rope_type": kind, "factor": of("rope.scaling.factor", 1.0)}

    def tensors(self, config: ModelConfig) -> Iterator[tuple[str, Any]]:
        paired = self.get("general.architecture") in PAIRED
        heads = {"attn_q": config.heads, "attn_k": config.kv_heads}
        for tensor in self._content.tensors:
            if tensor.name == FACTORS:
                continue
            values = self._values(tensor)
            _, _, rest = tensor.name.partition("blk.")
            layer, _, name = rest.partition(".")
            own = LAYER_TENSORS.get(name.removesuffix(".weight"))
            if own is None or not name.endswith(".weight"):
                yield TENSORS.get(tensor.name, tensor.name), values
                continue
            count = heads.get(name.removesuffix(".weight"))
            if paired and count and len(values) % (2 * count) == 0:
                values = _halves(values, count)
            parts = values if "{}" in own else [values]
            for expert, part in enumerate(parts):
                yield f"model.layers.{layer}.{own.format(expert)}.weight", part

    def _values(self, tensor: GgufTensor) -> Any:
        try:
            return self._dequantize(tensor.data, tensor.kind)
        except NotImplementedError as error:
            wanted = "tensors of a type that the package gguf can dequantize"
            got = f"{tensor.name}: {tensor.kind.name}"
            fix = "use a file of another quantization"
            raise weights_error(self.path, wanted, got, fix) from error


def _halves(rows: Any, heads: int) -> Any:
    """Rows of heads in which elements i and i + 1 are rotated together, in the order in
    which those of the first and the second half are."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return np.swapaxes(pairs, 1, 2).reshape(rows.shape)
