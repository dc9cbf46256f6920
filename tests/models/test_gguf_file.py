"""GGUF files of models with experts."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.errors import ArgumentError
from etc_dist.functions.router import Router
from etc_dist.models.experts import DecoderMixture
from etc_dist.models.gguf_file import GgufFile
from tests.models.gguf_bytes import write

EXPERTS = {
    "expert_count": 8,
    "expert_used_count": 2,
    "expert_feed_forward_length": 24,
    "attention.key_length": 64,
}
SHAPES = {
    "attn_norm": (64,),
    "ffn_norm": (64,),
    "attn_q": (64, 64),
    "attn_k": (64, 64),
    "attn_v": (64, 64),
    "attn_output": (64, 64),
    "attn_q_norm": (64,),
    "attn_k_norm": (64,),
    "ffn_gate_inp": (8, 64),
    "ffn_gate_exps": (8, 24, 64),
    "ffn_up_exps": (8, 24, 64),
    "ffn_down_exps": (8, 64, 24),
}


def test_experts_are_stacked_by_layer(tmp_path, rng):
    shapes = {f"blk.0.{name}.weight": shape for name, shape in SHAPES.items()}
    shapes |= {"token_embd.weight": (64, 64), "output_norm.weight": (64,)}
    tensors = {n: rng.integers(-9, 9, s).astype(np.float32) for n, s in shapes.items()}
    write(tmp_path / "model.gguf", "qwen3moe", tensors, **EXPERTS)
    file = GgufFile(tmp_path / "model.gguf")
    config = file.config()
    assert (config.mixture, config.inner) == (DecoderMixture(8, Router(2)), 24)
    weights = file.weights(config, "bfloat16")
    for name, of in (
        ("router", "ffn_gate_inp"),
        ("w_gate", "ffn_gate_exps"),
        ("w_up", "ffn_up_exps"),
        ("w_down", "ffn_down_exps"),
    ):
        np.testing.assert_array_equal(weights[name][0], tensors[f"blk.0.{of}.weight"])


def test_a_vocabulary_may_have_any_size(tmp_path, rng):
    shapes = {f"blk.0.{name}.weight": shape for name, shape in SHAPES.items()}
    shapes |= {"token_embd.weight": (61, 64), "output_norm.weight": (64,)}
    tensors = {n: rng.integers(-9, 9, s).astype(np.float32) for n, s in shapes.items()}
    sizes = EXPERTS | {"vocab_size": 61}
    write(tmp_path / "model.gguf", "qwen3moe", tensors, **sizes)
    file = GgufFile(tmp_path / "model.gguf")
    embedding = file.weights(file.config(), "bfloat16")["embedding"]
    np.testing.assert_array_equal(embedding[:61], tensors["token_embd.weight"])
    assert len(embedding) == 64 and not embedding[61:].any()


def test_all_tokens_that_end_a_text_are_stop_tokens(tmp_path):
    tokens = ["a", "<|endoftext|>", "b", "<|im_end|>", "<|eom_id|>", "c"]
    metadata = {"tokens": tokens, "eos_token_id": 3, "eom_token_id": 5}
    entries = {f"tokenizer.ggml.{name}": value for name, value in metadata.items()}
    write(tmp_path / "model.gguf", metadata=entries)
    assert GgufFile(tmp_path / "model.gguf").config().stop_tokens == (1, 3, 4, 5)


def test_a_mixture_of_another_architecture_is_refused(tmp_path):
    write(tmp_path / "model.gguf", "llama", expert_count=8)
    with pytest.raises(ArgumentError, match="no num_experts"):
        GgufFile(tmp_path / "model.gguf").config()
