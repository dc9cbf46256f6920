"""Small models of random weights, as Hugging Face folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.graphs.paged import BASE
from tests.models.test_weights import save

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "eos_token_id": [],
    "head_dim": 64,
    "hidden_size": 72,
    "intermediate_size": 136,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": BASE,
    "tie_word_embeddings": True,
    "vocab_size": 520,
}


def draw_tensors(rng: np.random.Generator, config: dict[str, Any]) -> dict[str, Any]:
    """The tensors of a model, by their names in safetensors files."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, width = (
        config[f"num_{n}_heads"] * config["head_dim"]
        for n in ("attention", "key_value")
    )
    layer_shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (heads, hidden),
        "self_attn.k_proj": (width, hidden),
        "self_attn.v_proj": (width, hidden),
        "self_attn.o_proj": (hidden, heads),
    }
    if config["architectures"] == ["Qwen3MoeForCausalLM"]:
        inner, experts = config["moe_intermediate_size"], config["num_experts"]
        layer_shapes["mlp.gate"] = experts, hidden
        blocks = [f"mlp.experts.{expert}" for expert in range(experts)]
    else:
        blocks = ["mlp"]
    for block in blocks:
        layer_shapes |= {
            f"{block}.{name}_proj": (inner, hidden) for name in ("gate", "up")
        }
        layer_shapes[f"{block}.down_proj"] = hidden, inner
    if config["architectures"][0].startswith("Qwen3"):
        layer_shapes |= {f"self_attn.{n}_norm": (config["head_dim"],) for n in "qk"}
    ids = config["vocab_size"], hidden
    shapes = {"model.embed_tokens": ids, "model.norm": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head"] = ids
    for layer in range(config["num_hidden_layers"]):
        shapes |= {
            f"model.layers.{layer}.{n}": shape for n, shape in layer_shapes.items()
        }
    return {
        f"{name}.weight": (rng.standard_normal(shape, np.float32) + 1) * 0.3
        if len(shape) == 1
        else rng.standard_normal(shape, np.float32) * shape[-1] ** -0.5
        for name, shape in shapes.items()
    }


def make_model(folder: Path, rng: np.random.Generator, **changes: Any) -> Path:
    """Write a model, with changes to CONFIG."""
    config = CONFIG | changes
    (folder / "config.json").write_text(json.dumps(config))
    save(folder / "model.safetensors", draw_tensors(rng, config))
    return folder
