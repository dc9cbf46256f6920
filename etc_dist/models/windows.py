"""The positions that the layers of a model attend to, from config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etc_dist.models.family import Family, no_layer
from etc_dist.models.fields import VARIANT_FIX, refused
from etc_dist.models.rope import FULL, SLIDING


def layer_windows(
    given: Mapping[str, Any], family: Family, layers: int, positions: int, path: Path
) -> tuple[int, ...]:
    """For each layer, the number of positions up to its own that a row attends to; 0
    for all. Empty if no layer has a window below the `positions` of the model, unless
    layers with one have another rotary embedding. given: the fields of config.json,
    with defaults."""
    window, listed = given.get("sliding_window"), given.get("layer_types")
    if family.window_switch and not given.get(family.window_switch):
        window = None
    if window is not None and (type(window) is not int or window < 1):
        wanted = "sliding_window: an integer from 1"
        raise refused(path, wanted, repr(window), "correct it")
    own = [family.slides(n, given) and window is not None for n in range(layers)]
    types = [SLIDING if slides else FULL for slides in own]
    if family.reads_layer_types and isinstance(listed, list):
        types = listed
    is_long = window is not None and window >= positions
    is_refused = family.slides is no_layer and window is not None
    faults = {
        "no sliding window": is_refused and not is_long and listed is None,
        f"layer_types {FULL} or {SLIDING} of each layer, as the model has": (
            len(types) != layers
            or not {*map(str, types)} <= {FULL, SLIDING}
            or listed not in (None, types)
        ),
        f"a sliding_window for {SLIDING}": window is None and SLIDING in types,
    }
    if wanted := "; ".join(name for name, is_fault in faults.items() if is_fault):
        got = f"sliding_window = {window}, layer_types = {listed}"[:120]
        raise refused(path, wanted, got, VARIANT_FIX)
    is_long = is_long and family.local_theta is None
    if window is None or is_long or SLIDING not in types:
        return ()
    return tuple(window if name == SLIDING else 0 for name in types)
