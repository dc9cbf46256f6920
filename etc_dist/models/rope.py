"""The rotary embedding of a model: its theta and its scaling, from config.json.
`longrope` is of Ding et al., LongRoPE, 2024."""

from __future__ import annotations

from collections.abc import Mapping
from math import log, pi, sqrt
from pathlib import Path
from typing import Any

import numpy as np

from etc_dist.functions.rotary import frequencies, rotary_table
from etc_dist.models.family import Family
from etc_dist.models.fields import VARIANT_FIX, refused
from etc_dist.models.heads import HeadLayout

LENGTH = "original_max_position_embeddings"
BETA = "llama_4_scaling_beta"
LOCAL = "rope_local_base_freq"
SCALINGS = "rope_scaling", "rope_parameters"
FULL, SLIDING = "full_attention", "sliding_attention"
PARTIAL = "partial_rotary_factor"
UNROTATED: Mapping[str, Any] = {"rope_type": "none", "rope_theta": 1.0}
"""Of layers without a rotary embedding: no angle grows with the position."""
ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", LENGTH),
    "yarn": ("factor", LENGTH),
    "longrope": ("factor", LENGTH),
    "factors": (),
}
"""The kinds of rotary embeddings, and the numbers that each needs. "factors": of a GGUF
file. "dynamic" scales nothing up to the length of the model, as in transformers."""
OPTIONAL_KEYS = {
    "dynamic": ("alpha",),
    "yarn": (
        *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
        BETA,
    ),
    "longrope": ("attention_factor",),
}
"""Numbers that it may have."""
LIST_KEYS = {"longrope": ("short_factor", "long_factor"), "factors": ("factors",)}
"""Lists with a positive number for each pair of elements."""
OTHER_KEYS = {
    "dynamic": ("beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    "yarn": ("truncate", "max_position_embeddings"),
}
"""A Boolean, and numbers without influence."""
ROPE_FIELDS = ("rope_theta", LENGTH, PARTIAL)
"""Fields of rope_scaling and rope_parameters, or of the whole configuration."""
MOST_NUMBER = 1e12


def read_rope(fields: Mapping[str, Any], family: Family, path: Path) -> dict[str, Any]:
    """The theta, the share of elements and the scaling of the rotary embedding,
    checked. fields: those of config.json, with defaults."""
    outer = {key: fields[key] for key in ROPE_FIELDS if fields.get(key) is not None}
    names = [key for key in SCALINGS if fields.get(key)]
    if not names and family.rope:
        fields, names = {**fields, "rope_parameters": family.rope}, ["rope_parameters"]
    ropes = [_merged(fields[name], name, outer, family, path) for name in names]
    if len(ropes) == 2 and ropes[0] != ropes[1]:
        got = f"{fields['rope_scaling']!r} and {fields['rope_parameters']!r}"
        raise refused(path, "equal rope_scaling, rope_parameters", got, "correct it")
    rope = ropes[0] if ropes else {**outer, "rope_type": "default"}
    kind = rope["rope_type"]
    _add_defaults(rope, fields)
    if family.partial is not None:
        rope.setdefault(PARTIAL, family.partial)
    optional = [key for key in OPTIONAL_KEYS.get(kind, ()) if key in rope]
    keys = [*ROPE_KEYS[kind], *optional]
    wrong = {key: rope.get(key) for key in keys if not is_number(rope.get(key))}
    if wrong:
        wanted = f"rope_scaling with {', '.join(wrong)}: positive numbers"
        raise refused(path, wanted, repr(wrong), "correct it")
    _check_values(rope, family, path)
    result_keys = "rope_type", "rope_theta", PARTIAL, "truncate", *keys
    result_keys += LIST_KEYS.get(kind, ())
    return {key: rope[key] for key in result_keys if key in rope}


def read_ropes(
    fields: Mapping[str, Any], family: Family, path: Path
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """As `read_rope`: that of all layers, and that of layers with a sliding window, if
    it is another one."""
    if family.local_theta is None:
        return read_rope(fields, family, path), None
    nested = fields.get("rope_parameters")
    nested = {} if nested is None else nested
    if not isinstance(nested, Mapping) or nested.keys() - {FULL, SLIDING}:
        wanted = f"rope_parameters with {FULL} and {SLIDING}"
        raise refused(path, wanted, repr(nested), VARIANT_FIX)
    local = {key: of for key, of in fields.items() if key not in SCALINGS}
    local |= {"rope_theta": fields.get(LOCAL), "rope_parameters": nested.get(SLIDING)}
    whole = {**fields, "rope_parameters": nested.get(FULL)}
    rope, of_local = (read_rope(of, family, path) for of in (whole, local))
    of_local.setdefault("rope_theta", family.local_theta)
    if of_local == {"rope_theta": family.theta, **rope}:
        return rope, None
    return rope, of_local


def _add_defaults(rope: dict[str, Any], fields: Mapping[str, Any]) -> None:
    """Those that follow from the longest text of the model."""
    kind, positions = rope["rope_type"], fields.get("max_position_embeddings")
    if LENGTH in ROPE_KEYS[kind]:
        rope.setdefault(LENGTH, positions)
    is_ratio = kind in ("yarn", "longrope") and "factor" not in rope
    if is_ratio and is_number(rope[LENGTH]) and is_number(positions):
        assert positions is not None
        rope["factor"] = positions / rope[LENGTH]


def _check_values(rope: Mapping[str, Any], family: Family, path: Path) -> None:
    kind, partial = rope["rope_type"], rope.get(PARTIAL, 1)
    low, high = rope.get("low_freq_factor", 0), rope.get("high_freq_factor", 1)
    is_partial = family.partial is not None
    share = "from 0, at most 1" if is_partial else "1"
    is_share = is_number(partial) and (partial <= 1 if is_partial else partial == 1)
    faults = {
        f"no {BETA}": BETA in rope and BETA not in family.rope,
        "no alpha": "alpha" in rope and not family.has_alpha,
        "low_freq_factor below high_freq_factor": kind == "llama3" and low >= high,
        f"{PARTIAL} {share}": not is_share,
        "truncate true or false": not isinstance(rope.get("truncate", True), bool),
    }
    if wanted := "; ".join(name for name, is_fault in faults.items() if is_fault):
        is_variant = any(name in wanted for name in (PARTIAL, BETA, "alpha"))
        fix = VARIANT_FIX if is_variant else "correct it"
        raise refused(path, wanted, repr(dict(rope)), fix)


def _merged(
    rope_fields: Any, name: str, outer: Mapping[str, Any], family: Family, path: Path
) -> dict[str, Any]:
    """The object `rope_fields` of the field `name`, with `outer` fields of the file."""
    if not isinstance(rope_fields, Mapping):
        raise refused(path, f"{name}: an object", repr(rope_fields), "correct it")
    if any(isinstance(value, Mapping) for value in rope_fields.values()):
        raise refused(
            path, "one scaling for all layers", repr(rope_fields), VARIANT_FIX
        )
    rope = {key: value for key, value in rope_fields.items() if value is not None}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.pop("type", kind) != kind:
        raise refused(path, f"one type of {name}", repr(rope_fields), "correct it")
    kind = family.rope_names.get(kind, kind) if isinstance(kind, str) else kind
    if kind not in tuple(ROPE_KEYS):
        wanted = f"rope_type {' or '.join(ROPE_KEYS)}"
        raise refused(path, wanted, repr(kind), VARIANT_FIX)
    if kind == "default" and rope.get("factor") == 1:
        del rope["factor"]  # nothing is scaled
    for key in outer.keys() & rope.keys():
        if outer[key] != rope[key]:
            got = f"{outer[key]!r}, and {rope[key]!r} of {name}"
            raise refused(path, f"one {key}", got, "correct it")
    known_keys = {"rope_type", *ROPE_FIELDS, *ROPE_KEYS[kind]}
    for keys in (OPTIONAL_KEYS, LIST_KEYS, OTHER_KEYS):
        known_keys |= {*keys.get(kind, ())}
    if unknown_keys := rope.keys() - known_keys:
        wanted = f"{name} of type {kind} without {', '.join(sorted(unknown_keys))}"
        raise refused(path, wanted, repr(rope_fields), VARIANT_FIX)
    return {**outer, **rope, "rope_type": kind}


def is_number(value: Any) -> bool:
    """Whether `value` is a number above 0 that float32 can hold; NaN is not."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and 0 < value <= MOST_NUMBER


def head_tables(
    rope: Mapping[str, Any], head: HeadLayout, head_dim: int, base: float, count: int
) -> Any:
    """Cosines, then sines, of all pairs of a head, [count, head_dim], fp32. Pairs that
    are not rotated are at the end. count: positions of a request."""
    half, rotated = head_dim // 2, head.rotated // 2
    rates = np.zeros(half)
    rates[:rotated] = rope_rates(rope, head.rotated, base, count)
    table = rotary_table(count, rates).reshape(count, 2, half)
    table[..., :rotated] *= np.float32(rope_scale(rope))
    return table.reshape(count, head_dim)


def query_scale(rope: Mapping[str, Any], count: int) -> Any:
    """By which the queries of each of `count` positions are multiplied, in addition, as
    in Llama 4; None for 1."""
    if BETA not in rope:
        return None
    turns = np.floor(np.arange(count) / rope[LENGTH])
    return (1 + rope[BETA] * np.log1p(turns)).astype(np.float32)


def rope_rates(rope: Mapping[str, Any], width: int, base: float, count: int) -> Any:
    """The rotation of each pair of `width` elements per position, radians, [width / 2].
    count: positions of a request: if they are more than the original ones, `longrope`
    has long factors for all texts."""
    plain = frequencies(width, base)
    match rope.get("rope_type"):
        case "linear":
            return plain / rope["factor"]
        case "dynamic" if "alpha" in rope:
            return frequencies(width, base * rope["alpha"] ** (width / (width - 2)))
        case "llama3":
            return _llama3(plain, rope)
        case "yarn":
            return _yarn(plain, rope, base)
        case "longrope":
            name = "long_factor" if count > rope[LENGTH] else "short_factor"
            return plain / np.asarray(rope[name], np.float64)
        case "factors":
            return plain / np.asarray(rope["factors"], np.float64)
        case "none":
            return np.zeros_like(plain)
    return plain


def rope_scale(rope: Mapping[str, Any]) -> float:
    """By which queries and keys are multiplied when they are rotated."""
    kind, scale = rope.get("rope_type"), rope.get("attention_factor")
    if scale is not None or kind not in ("yarn", "longrope"):
        return float(scale or 1)
    factor = rope["factor"]
    if kind == "longrope":
        return sqrt(1 + log(factor) / log(rope[LENGTH])) if factor > 1 else 1.0
    if {"mscale", "mscale_all_dim"} <= rope.keys():
        return _magnitude(factor, rope["mscale"]) / _magnitude(
            factor, rope["mscale_all_dim"]
        )
    return _magnitude(factor)


def _magnitude(factor: float, weight: float = 1.0) -> float:
    return 1 + 0.1 * weight * log(factor) if factor > 1 else 1.0


def fits_factors(rope: Mapping[str, Any], width: int) -> bool:
    """Whether each list of factors has width / 2 positive numbers."""
    for key in LIST_KEYS.get(rope["rope_type"], ()):
        factors = rope.get(key)
        if not isinstance(factors, (list, np.ndarray)) or len(factors) != width // 2:
            return False
        if not all(map(is_number, np.asarray(factors, object).tolist())):
            return False
    return True


def _llama3(rates: Any, rope: Mapping[str, Any]) -> Any:
    """Slow rates divided by a factor, with a smooth transition to fast ones (Llama 3.1,
    Meta, 2024)."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope[LENGTH] * rates / (2 * np.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return rates * (smooth + (1 - smooth) / rope["factor"])


def _yarn(rates: Any, rope: Mapping[str, Any], base: float) -> Any:
    """Slow rates divided by a factor, by their number (Peng et al., YaRN, 2023)."""
    num_pairs = len(rates)
    fast, slow = rope.get("beta_fast", 32), rope.get("beta_slow", 1)
    low, high = (
        num_pairs * log(rope[LENGTH] / (turns * 2 * pi)) / log(base)
        for turns in (fast, slow)
    )
    if rope.get("truncate", True):
        low, high = np.floor(low), np.ceil(high)
    low, high = max(low, 0), min(high, 2 * num_pairs - 1)
    high += 0.001 if low == high else 0
    slowed = np.clip((np.arange(num_pairs) - low) / (high - low), 0, 1)
    return rates * (1 - slowed) + rates / rope["factor"] * slowed
