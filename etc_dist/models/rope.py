"""The rotary embedding of a model: its theta and its scaling, from config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from etc_dist.functions.rotary import frequencies
from etc_dist.models.fields import VARIANT_FIX, refused

LENGTH = "original_max_position_embeddings"
ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", LENGTH),
    "factors": ("factors",),
}
"""The kinds of rotary embeddings, and the fields of each. "factors": of a GGUF file."""
ROPE_FIELDS = ("rope_theta", LENGTH)
"""Fields of rope_scaling and rope_parameters, or of the whole configuration."""
MOST_NUMBER = 1e12


def read_rope(given: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The theta and the scaling of the rotary embedding, checked."""
    outer = {key: given[key] for key in ROPE_FIELDS if given.get(key) is not None}
    names = [key for key in ("rope_scaling", "rope_parameters") if given.get(key)]
    ropes = [_merged(given[name], name, outer, path) for name in names]
    if len(ropes) == 2 and ropes[0] != ropes[1]:
        got = f"{given['rope_scaling']!r} and {given['rope_parameters']!r}"
        raise refused(path, "equal rope_scaling, rope_parameters", got, "correct it")
    rope = ropes[0] if ropes else {**outer, "rope_type": "default"}
    kind = rope["rope_type"]
    if kind == "llama3":
        rope.setdefault(LENGTH, given.get("max_position_embeddings"))
    keys = [key for key in ROPE_KEYS[kind] if key != "factors"]
    wrong = {key: rope.get(key) for key in keys if not is_number(rope.get(key))}
    if wrong:
        wanted = f"rope_scaling with {', '.join(wrong)}: positive numbers"
        raise refused(path, wanted, repr(wrong), "correct it")
    if kind == "llama3" and rope["low_freq_factor"] >= rope["high_freq_factor"]:
        wanted = "low_freq_factor below high_freq_factor"
        raise refused(path, wanted, repr(rope), "correct it")
    used = "rope_type", "rope_theta", *ROPE_KEYS[kind]
    return {key: rope[key] for key in used if key in rope}


def _merged(
    given: Any, name: str, outer: Mapping[str, Any], path: Path
) -> dict[str, Any]:
    """The object `given` of the field `name`, with `outer` fields of the file."""
    if not isinstance(given, Mapping):
        raise refused(path, f"{name}: an object", repr(given), "correct it")
    if any(isinstance(value, Mapping) for value in given.values()):
        raise refused(path, "one scaling for all layers", repr(given), VARIANT_FIX)
    rope = {key: value for key, value in given.items() if value is not None}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in tuple(ROPE_KEYS):
        wanted = f"rope_type {' or '.join(ROPE_KEYS)}"
        raise refused(path, wanted, repr(kind), VARIANT_FIX)
    if rope.pop("type", kind) != kind:
        raise refused(path, f"one type of {name}", repr(given), "correct it")
    if kind == "default" and rope.get("factor") == 1:
        del rope["factor"]  # nothing is scaled
    if rope.pop("partial_rotary_factor", 1) != 1:
        raise refused(path, "partial_rotary_factor 1", repr(given), VARIANT_FIX)
    for key in outer.keys() & rope.keys():
        if outer[key] != rope[key]:
            got = f"{outer[key]!r}, and {rope[key]!r} of {name}"
            raise refused(path, f"one {key}", got, "correct it")
    unknown = rope.keys() - {"rope_type", *ROPE_FIELDS, *ROPE_KEYS[kind]}
    if unknown:
        wanted = f"{name} of type {kind} without {', '.join(sorted(unknown))}"
        raise refused(path, wanted, repr(given), VARIANT_FIX)
    return {**outer, **rope, "rope_type": kind}


def is_number(value: Any) -> bool:
    """Whether `value` is a number above 0 that float32 can hold; NaN is not."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and 0 < value <= MOST_NUMBER


def rope_rates(rope: Mapping[str, Any], head_dim: int, base: float) -> Any:
    """The rotation of each pair of elements per position, radians, [head_dim / 2]."""
    plain = frequencies(head_dim, base)
    match rope.get("rope_type"):
        case "linear":
            return plain / rope["factor"]
        case "llama3":
            return _llama3(plain, rope)
        case "factors":
            return plain / np.asarray(rope["factors"], np.float64)
    return plain


def fits_factors(rope: Mapping[str, Any], head_dim: int) -> bool:
    """Whether the factors of a GGUF file, if any, are head_dim / 2 positive numbers."""
    if rope["rope_type"] != "factors":
        return True
    factors = rope.get("factors")
    if not isinstance(factors, np.ndarray) or factors.shape != (head_dim // 2,):
        return False
    return all(map(is_number, factors.tolist()))


def _llama3(rates: Any, rope: Mapping[str, Any]) -> Any:
    """Slow rates divided by a factor, with a smooth transition to fast ones."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * rates / (2 * np.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return rates * (smooth + (1 - smooth) / rope["factor"])
