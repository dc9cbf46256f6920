"""The configuration of a model, from the config.json of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from etc_dist.errors import ArgumentError
from etc_dist.files import read_object
from etc_dist.functions.rotary import HEAD_DIMS, frequencies, rotary_table
from etc_dist.models.experts import MOST_CHOICES, MOST_EXPERTS, Mixture
from etc_dist.models.sizes import DecoderSizes

QWEN_MOE, MIXTRAL = "Qwen3MoeForCausalLM", "MixtralForCausalLM"
LLAMA = "LlamaForCausalLM"
ARCHITECTURES = {
    LLAMA: False,
    "Qwen3ForCausalLM": True,
    QWEN_MOE: True,
    MIXTRAL: False,
}
"""The models, and whether they normalize each query and key."""
STOPS = {LLAMA: 2, MIXTRAL: 2}
"""The defaults of eos_token_id in transformers, of models that have one."""
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
MOST_LAYERS, MOST_SIZE, MOST_NUMBER = 4096, 2**24, 1e12


VARIANT_FIX = "use a model of which each variant is implemented"


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of a model; made by `read_config`.

    architecture: as in config.json. hidden: the width of a row. inner: of an MLP, or of
    each expert. vocabulary: number of ids. heads, kv_heads: of queries, and of keys and
    values. positions: the longest text. rope_base, rope: of the rotary embedding, its
    theta and its scaling as config.json has it. is_tied: the embedding is the output
    head. stop_tokens: the ids that end a text. mixture: its experts."""

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
    mixture: Mixture | None = None

    def sizes(self, page_size: int, dtype: str = "bfloat16") -> DecoderSizes:
        return DecoderSizes(
            self.heads,
            self.kv_heads,
            self.head_dim,
            self.norm_eps,
            ARCHITECTURES[self.architecture],
            page_size,
            dtype,
            self.mixture,
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
    """The configuration of the model in `folder`, from its config.json and the stop
    tokens of its generation_config.json.

    Raises ArgumentError for a folder without a model, and for a model of another
    architecture or with a variant that is not implemented."""
    path = Path(folder) / "config.json"
    try:
        given = read_object(path)
    except (OSError, ValueError) as error:
        fix = "give the folder of a Hugging Face model, with config.json"
        raise _refused(path, "a readable config.json", str(error), fix) from error
    return replace(parse_config(given, path), **_generation(path))


def _generation(path: Path) -> dict[str, Any]:
    """What generation_config.json changes."""
    path = path.with_name("generation_config.json")
    try:
        given = read_object(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        fix = "correct the file, or remove it"
        raise _refused(path, "a JSON object", str(error), fix) from error
    if "eos_token_id" not in given:
        return {}
    return {"stop_tokens": _stop_tokens(given["eos_token_id"], path)}


def _stop_tokens(stop: Any, path: Path) -> tuple[int, ...]:
    found = stop if isinstance(stop, list) else [] if stop is None else [stop]
    if not all(type(token) is int and token >= 0 for token in found):
        raise _refused(path, "eos_token_id: ids of tokens", repr(stop), "correct it")
    return tuple(found)


def _rope(given: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The scaling of the rotary embedding, checked."""
    rope = given.get("rope_scaling") or given.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise _refused(path, "rope_scaling: an object", repr(rope), "correct it")
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise _refused(path, "one scaling for all layers", repr(rope), VARIANT_FIX)
    rope = dict(rope)
    rope["rope_type"] = kind = rope.get("rope_type", rope.pop("type", "default"))
    if kind not in ROPES:
        wanted = f"rope_type {' or '.join(ROPES)}"
        raise _refused(path, wanted, repr(kind), VARIANT_FIX)
    keys = ROPE_KEYS.get(kind, ())
    wrong = {key: rope.get(key) for key in keys if not _is_number(rope.get(key))}
    if wrong:
        wanted = f"rope_scaling with {', '.join(wrong)}: positive numbers"
        raise _refused(path, wanted, repr(wrong), "correct it")
    if kind == "llama3" and rope["low_freq_factor"] >= rope["high_freq_factor"]:
        wanted = "low_freq_factor below high_freq_factor"
        raise _refused(path, wanted, repr(rope), "correct it")
    length = "original_max_position_embeddings"
    if kind == "llama3" and (given.get(length) or rope[length]) != rope[length]:
        got = f"{given[length]!r}, and {rope[length]} of rope_scaling"
        raise _refused(path, f"one {length}", got, "correct it")
    return rope


def _is_number(value: Any) -> bool:
    """Whether `value` is a number above 0 that float32 can hold; NaN is not."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and 0 < value <= MOST_NUMBER


def parse_config(given: Mapping[str, Any], path: Path) -> ModelConfig:
    named = given.get("architectures")
    name = ", ".join(map(str, named)) if isinstance(named, list) else str(named)

    def number(key: str, default: Any = None) -> Any:
        value = default if given.get(key) is None else given[key]
        if not _is_number(value):
            wanted = f"{key}: a positive number of at most {MOST_NUMBER:g}"
            raise _refused(path, wanted, repr(value), "correct it")
        return value

    def size(key: str, default: Any = None, most: int = MOST_SIZE) -> int:
        value = default if given.get(key) is None else given[key]
        if type(value) is not int or not 1 <= value <= most:
            wanted = f"{key}: an integer from 1 to {most}"
            raise _refused(path, wanted, repr(value), "correct it")
        return value

    if name not in ARCHITECTURES:
        fix = "use a model of one of these architectures"
        raise _refused(path, " or ".join(ARCHITECTURES), repr(name), fix)
    heads = size("num_attention_heads")
    rope = _rope(given, path)
    bases = {"rope_theta": given.get("rope_theta"), "of rope": rope.get("rope_theta")}
    first, second = bases.values()
    if None not in (first, second) and first != second:
        raise _refused(path, "one rope_theta", repr(bases), "correct it")
    base = 1e6 if name == MIXTRAL else 1e4  # the defaults of transformers
    found = ModelConfig(
        architecture=name,
        layers=size("num_hidden_layers", most=MOST_LAYERS),
        hidden=size("hidden_size"),
        inner=size(
            "moe_intermediate_size" if name == QWEN_MOE else "intermediate_size"
        ),
        vocabulary=size("vocab_size"),
        heads=heads,
        kv_heads=size("num_key_value_heads", heads),
        head_dim=size("head_dim", size("hidden_size") // heads),
        positions=size("max_position_embeddings"),
        norm_eps=number("rms_norm_eps"),
        rope_base=number("rope_theta", rope.get("rope_theta", base)),
        rope=rope,
        is_tied=given.get("tie_word_embeddings") is True,
        stop_tokens=_stop_tokens(given.get("eos_token_id", STOPS.get(name)), path),
        mixture=_mixture(name, given, size),
    )
    _check_variants(given, found, path)
    return found


def _mixture(
    architecture: str, given: Mapping[str, Any], size: Callable[..., int]
) -> Mixture | None:
    """size(key, default, most): a number of config.json, checked."""
    if architecture not in (QWEN_MOE, MIXTRAL):
        return None
    keys = ["num_local_experts", "num_experts"]
    if architecture == QWEN_MOE and given.get("num_experts") is not None:
        keys.reverse()
    experts = size(keys[0], most=MOST_EXPERTS)
    top_k = size("num_experts_per_tok", most=min(experts, MOST_CHOICES))
    normalizes = architecture == MIXTRAL or given.get("norm_topk_prob") is True
    return Mixture(experts, top_k, normalizes)


def _expert_variants(
    given: Mapping[str, Any], found: ModelConfig, mixture: Mixture
) -> dict[str, bool]:
    """The variants of experts, and whether this model's is implemented."""
    shared = ("shared_expert_intermediate_size", "n_shared_experts")
    window = given.get("sliding_window") if found.architecture == MIXTRAL else None
    normalizes = given.get("norm_topk_prob")
    return {
        "experts in a multiple of 8": mixture.experts % 8 == 0,
        "no shared experts": not any(given.get(key) for key in shared),
        "no mlp_only_layers": not given.get("mlp_only_layers"),
        "decoder_sparse_step 1": given.get("decoder_sparse_step") in (None, 1),
        "norm_topk_prob true or false": normalizes is None
        or isinstance(normalizes, bool),
        "scoring_func softmax": given.get("scoring_func") in (None, "softmax"),
        "no groups of experts": given.get("n_group") in (None, 1),
        "routed_scaling_factor 1": given.get("routed_scaling_factor") in (None, 1),
        "sliding_window null": window is None,
    }


def _check_variants(given: Mapping[str, Any], found: ModelConfig, path: Path) -> None:
    full = ["full_attention"] * found.layers
    partial = {**found.rope, **given}.get("partial_rotary_factor")
    tied = given.get("tie_word_embeddings")
    variants = {
        "head_dim 64 or 128": found.head_dim in HEAD_DIMS,
        "a multiple of num_key_value_heads heads": found.heads % found.kv_heads == 0,
        "hidden_act silu": given.get("hidden_act", "silu") == "silu",
        "no attention_bias": not given.get("attention_bias"),
        "no mlp_bias": not given.get("mlp_bias"),
        "no sliding window": not given.get("use_sliding_window"),
        "layer_types full_attention": given.get("layer_types") in (None, full),
        "tie_word_embeddings true or false": tied is None or isinstance(tied, bool),
        "factors of head_dim / 2 pairs": _fits_factors(found.rope, found.head_dim // 2),
        "partial_rotary_factor 1": partial in (None, 1),
        "sizes that are multiples of 8": not any(
            size % 8 for size in (found.hidden, found.inner, found.vocabulary)
        ),
    }
    if found.mixture is not None:
        variants |= _expert_variants(given, found, found.mixture)
    missing = [wanted for wanted, holds in variants.items() if not holds]
    if missing:
        raise _refused(path, "; ".join(missing), "another variant", VARIANT_FIX)


def _fits_factors(rope: Mapping[str, Any], count: int) -> bool:
    """Whether the factors of a GGUF file, if any, are `count` positive numbers."""
    if rope["rope_type"] != "factors":
        return True
    given = rope.get("factors")
    if not isinstance(given, np.ndarray) or given.shape != (count,):
        return False
    return all(map(_is_number, given.tolist()))


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
