"""The positions that the layers of a model attend to, from config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etc_dist.models.family import Family, full_unrotated, no_layer, none_unrotated
from etc_dist.models.fields import VARIANT_FIX, refused
from etc_dist.models.rope import FULL, SLIDING


def layer_windows(
    fields: Mapping[str, Any], family: Family, layers: int, positions: int, path: Path
) -> tuple[int, ...]:
    """For each layer, the number of positions up to its own that a row attends to; 0
    for all. Empty if no layer has a window below the `positions` of the model, unless
    the rotary embedding depends on windows. fields: those of config.json, with
    defaults."""
    window, layer_types = fields.get("sliding_window"), fields.get("layer_types")
    if family.window_switch and not fields.get(family.window_switch):
        window = None
    if window is not None and (type(window) is not int or window < 1):
        wanted = "sliding_window: an integer from 1"
        raise refused(path, wanted, repr(window), "correct it")
    is_sliding = [
        family.slides(n, fields) and window is not None for n in range(layers)
    ]
    types = [SLIDING if slides else FULL for slides in is_sliding]
    if family.reads_layer_types and isinstance(layer_types, list):
        types = layer_types
    is_long = window is not None and window >= positions
    is_refused = family.slides is no_layer and window is not None
    pattern = fields.get("sliding_window_pattern")
    has_pattern = layer_types is None and "sliding_window_pattern" in family.reads
    is_counted = window is None or (type(pattern) is int and pattern > 0)
    faults = {
        "no sliding window": is_refused and not is_long and layer_types is None,
        f"layer_types {FULL} or {SLIDING} of each layer, as the model has": (
            len(types) != layers
            or not {*map(str, types)} <= {FULL, SLIDING}
            or layer_types not in (None, types)
        ),
        f"a sliding_window for {SLIDING}": window is None and SLIDING in types,
        "layer_types, or sliding_window_pattern as an integer from 1": (
            has_pattern and not is_counted
        ),
    }
    if wanted := "; ".join(name for name, is_fault in faults.items() if is_fault):
        got = f"sliding_window = {window}, layer_types = {layer_types}"[:120]
        got += f", sliding_window_pattern = {pattern}"[:60] * has_pattern
        raise refused(path, wanted, got, VARIANT_FIX)
    is_alike = family.local_theta is None and family.is_unrotated is none_unrotated
    is_long = is_long and is_alike
    if window is None or is_long:
        return ()
    if SLIDING not in types and family.is_unrotated is not full_unrotated:
        return ()
    return tuple(window if name == SLIDING else 0 for name in types)


def unrotated_layers(
    fields: Mapping[str, Any], family: Family, layers: int, windows: tuple[int, ...]
) -> tuple[bool, ...]:
    """For each layer, whether it has no rotary embedding; empty if all have one.
    windows: as `layer_windows`."""
    window_by_layer = windows or (None,) * layers
    is_unrotated = tuple(
        family.is_unrotated(n, fields, window_by_layer[n]) for n in range(layers)
    )
    return is_unrotated if any(is_unrotated) else ()


def check_unrotated(
    fields: Mapping[str, Any], family: Family, layers: int, path: Path
) -> None:
    """Raise ArgumentError unless fields that the family reads say which layers have no
    rotary embedding."""
    layer_flags = fields.get("no_rope_layers")
    interval = fields.get("no_rope_layer_interval")
    if "no_rope_layers" not in family.reads:
        return
    numbers = [*map(str, layer_flags)] if isinstance(layer_flags, list) else []
    is_list = len(numbers) >= layers and {*numbers} <= {"0", "1"}
    is_interval = type(interval) is int and interval > 0
    if not (is_list if layer_flags else is_interval):
        wanted = "no_rope_layers: 0 or 1 for each layer, or no_rope_layer_interval"
        got = f"no_rope_layers = {layer_flags}, no_rope_layer_interval = {interval}"
        got = got[:120]
        raise refused(path, f"{wanted}: an integer from 1", got, "correct it")
