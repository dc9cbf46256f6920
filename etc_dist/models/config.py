"""The configuration of a model, from the config.json of a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from etc_dist.errors import ArgumentError
from etc_dist.functions.rotary import HEAD_DIMS, frequencies, rotary_table
from etc_dist.models.decoder import DecoderSizes

ARCHITECTURES = {"LlamaForCausalLM": False, "Qwen3ForCausalLM": True}
"""The models, and whether they normalize each query and key."""
ROPES = ("default", "linear", "llama3", "factors")

ROPE_KEYS = {
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}
"""The numbers of each scaling."""


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of a model. rope: its scaling, as config.json has it. stop_tokens: the
    ids that end a text."""

    architecture: str
    layers: int
    hidden: int
    inner: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int
    positions: int
    norm_eps: float
    rope_base: float
    rope: Mapping[str, Any]
    is_tied: bool
    stop_tokens: tuple[int, ...]

    def sizes(self, page_size: int, dtype: str = "bfloat16") -> DecoderSizes:
        return DecoderSizes(
            self.heads,
            self.kv_heads,
            self.head_dim,
            self.norm_eps,
            ARCHITECTURES[self.architecture],
            page_size,
            dtype,
        )

    def cos_sin(self, positions: int) -> Any:
        """The table of the rotary embedding, [positions, head_dim]."""
        rates = frequencies(self.head_dim, self.rope_base)
        kind = self.rope.get("rope_type", "default")
        if kind == "linear":
            rates = rates / self.rope["factor"]
        if kind == "llama3":
            rates = _llama3(rates, self.rope)
        if kind == "factors":  # of a GGUF file
            rates = rates / np.asarray(self.rope["factors"], np.float64)
        return rotary_table(positions, rates)


def read_config(folder: str | Path) -> ModelConfig:
    """The configuration in `folder`.

    Raises ArgumentError for a folder without a model, and for a model of another
    architecture or with a variant that is not implemented."""
    path = Path(folder) / "config.json"
    try:
        given = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        fix = "give the folder of a Hugging Face model, with config.json"
        raise _refused(path, "a readable config.json", str(error), fix) from error
    if not isinstance(given, dict):
        raise _refused(path, "a JSON object", type(given).__name__, "correct the file")
    return replace(parse_config(given, path), **_generation(path))


def _generation(path: Path) -> dict[str, Any]:
    """What generation_config.json changes."""
    try:
        given = json.loads((path.parent / "generation_config.json").read_text())
        return {"stop_tokens": _stop_tokens(given["eos_token_id"])}
    except (KeyError, OSError, TypeError, ValueError):
        return {}


def _stop_tokens(stop: Any) -> tuple[int, ...]:
    return tuple(stop) if isinstance(stop, list) else () if stop is None else (stop,)


def parse_config(given: Mapping[str, Any], path: Path) -> ModelConfig:
    name = ", ".join(map(str, given.get("architectures") or ()))
    rope = dict(given.get("rope_scaling") or given.get("rope_parameters") or {})
    rope["rope_type"] = rope.get("rope_type", rope.pop("type", "default"))

    def number(key: str, default: Any = None) -> Any:
        value = default if given.get(key) is None else given[key]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            raise _refused(path, f"{key}: a positive number", repr(value), "correct it")
        return value

    if name not in ARCHITECTURES:
        fix = "use a model of one of these architectures"
        raise _refused(path, " or ".join(ARCHITECTURES), repr(name), fix)
    heads = number("num_attention_heads")
    found = ModelConfig(
        architecture=name,
        layers=number("num_hidden_layers"),
        hidden=number("hidden_size"),
        inner=number("intermediate_size"),
        vocabulary=number("vocab_size"),
        heads=heads,
        kv_heads=number("num_key_value_heads", heads),
        head_dim=number("head_dim", number("hidden_size") // heads),
        positions=number("max_position_embeddings"),
        norm_eps=number("rms_norm_eps"),
        rope_base=number("rope_theta", rope.get("rope_theta") or 10000.0),
        rope=rope,
        is_tied=bool(given.get("tie_word_embeddings", False)),
        stop_tokens=_stop_tokens(given.get("eos_token_id")),
    )
    variants = {
        "head_dim 64 or 128": found.head_dim in HEAD_DIMS,
        "a multiple of num_key_value_heads heads": heads % found.kv_heads == 0,
        f"rope_type {' or '.join(ROPES)}": rope["rope_type"] in ROPES,
        "hidden_act silu": given.get("hidden_act", "silu") == "silu",
        "no attention_bias": not given.get("attention_bias"),
        "no mlp_bias": not given.get("mlp_bias"),
        "no sliding window": not given.get("use_sliding_window"),
        "sizes that are multiples of 8": not any(
            size % 8 for size in (found.hidden, found.inner, found.vocabulary)
        ),
    }
    missing = [wanted for wanted, holds in variants.items() if not holds]
    keys = ROPE_KEYS.get(rope["rope_type"], ())
    missing += [f"rope_scaling with {key}" for key in keys if key not in rope]
    if missing:
        fix = "use a model of which each variant is implemented"
        raise _refused(path, "; ".join(missing), "another variant", fix)
    return found


def _llama3(rates: Any, rope: Mapping[str, Any]) -> Any:
    """Slow rates divided by a factor, with a smooth transition to fast ones."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * rates / (2 * np.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return rates * (smooth + (1 - smooth) / rope["factor"])


def _refused(path: Path, wanted: str, got: str, fix: str) -> ArgumentError:
    return ArgumentError(
        "the model cannot be loaded", where=str(path), wanted=wanted, got=got, fix=fix
    )
