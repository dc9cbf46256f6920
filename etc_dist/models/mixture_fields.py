"""The mixture of experts of a model, from the fields of its config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from etc_dist.functions.combine_rows import PLAIN, SCORED
from etc_dist.functions.router import MOST_CHOICES, MOST_EXPERTS, Router
from etc_dist.models.experts import Mixture
from etc_dist.models.family import Family
from etc_dist.models.fields import refused

Size = Callable[..., int]
"""size(key, default, most): a number of config.json, checked."""


def num_experts(given: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """num_experts, which is num_local_experts by another name."""
    both = {k: given[k] for k in ("num_experts", "num_local_experts") if k in given}
    counts = [count for count in both.values() if count is not None]
    if len(counts) == 2 and counts[0] != counts[1]:
        raise refused(path, "one number of experts", repr(both), "correct it")
    return {"num_experts": counts[0] if counts else None} if both else {}


def read_mixture(
    given: Mapping[str, Any], family: Family, size: Size
) -> Mixture | None:
    """The experts of a layer; None for a dense MLP."""
    form = family.mixture
    if form is None:
        return None
    experts = size("num_experts", most=MOST_EXPERTS)
    top_k = size("num_experts_per_tok", most=min(experts, MOST_CHOICES))
    shared = "" if not form.shared else SCORED if form.shared_gate else PLAIN
    return Mixture(experts, Router(top_k, form.normalizes_weights(given)), shared)


def read_shared_inner(given: Mapping[str, Any], family: Family, size: Size) -> int:
    """The inner size of the shared expert; 0 if there is none."""
    form = family.mixture
    return size(form.shared_inner) if form is not None and form.shared else 0
