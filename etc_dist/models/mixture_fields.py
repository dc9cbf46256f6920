"""The mixture of experts of a model, from the fields of its config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from etc_dist.errors import ArgumentError
from etc_dist.functions.activation import SWIGLU, Activation
from etc_dist.functions.router import MOST_CHOICES, MOST_EXPERTS, Router
from etc_dist.functions.routing import GATED, PLAIN
from etc_dist.models.experts import DecoderMixture
from etc_dist.models.family import Family, MixtureForm
from etc_dist.models.fields import VARIANT_FIX, refused
from etc_dist.models.rope import MOST_NUMBER, is_number

COUNTS: Mapping[str, tuple[str, ...]] = {
    "num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": ("moe_topk", "moe_k", "experts_per_token"),
}
"""Numbers, with their other names."""
Size = Callable[..., int]
"""size(key, default, most): a number of config.json, checked."""


def counts(fields: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """COUNTS, by their first names."""
    values_by_name = {}
    for name, other_names in COUNTS.items():
        all_names = {key: fields[key] for key in (name, *other_names) if key in fields}
        values = [value for value in all_names.values() if value is not None]
        if any(value != values[0] for value in values[1:]):
            wanted = f"one number for {' and '.join(all_names)}"
            raise refused(path, wanted, repr(all_names), "correct it")
        if all_names:
            values_by_name[name] = values[0] if values else None
    return values_by_name


def neutral_values(family: Family) -> dict[str, tuple[Any, ...]]:
    """The values of fields for what all models of the family do."""
    form = family.mixture or MixtureForm()
    method = "noaux_tc" if form.correction else "greedy"
    scores = (form.score, method) if form.score == "sigmoid" else (form.score,)
    return {"scoring_func": scores, "topk_method": (method,)}


def read_mixture(
    fields: Mapping[str, Any], family: Family, size: Size, path: Path
) -> DecoderMixture | None:
    """The experts of a layer; None for a dense MLP."""
    form = family.mixture
    if form is None:
        return None
    experts = size("num_experts", most=MOST_EXPERTS)
    top_k = size("num_experts_per_tok", most=min(experts, MOST_CHOICES))
    has_shared = num_shared(fields, form, size) > 0
    shared = "" if not has_shared else GATED if form.shared_gate else PLAIN
    router = Router(top_k, form.normalizes_weights(fields), form.score)
    if form.scale:
        router = replace(router, scale=fields.get(form.scale, 1.0))
    if form.is_grouped:
        num_groups, best = size("n_group", 1), size("topk_group", 1)
        router = replace(router, num_groups=num_groups, topk_group=best)
    router = replace(
        router, has_bias=form.has_biases, has_correction=bool(form.correction)
    )
    mixture = DecoderMixture(
        experts,
        router,
        shared,
        _read_activation(fields, form, path),
        has_biases=form.has_biases,
        has_dense=num_dense(fields, family, path) > 0,
    )
    try:
        mixture.check()
    except (ArgumentError, TypeError) as error:
        wanted = getattr(error, "wanted", str(error))
        raise refused(path, wanted, getattr(error, "got", ""), "correct it") from error
    return mixture


def _read_activation(
    fields: Mapping[str, Any], form: MixtureForm, path: Path
) -> Activation:
    """Of the experts."""
    if not form.has_biases:
        return SWIGLU
    alpha, limit = (fields[f"swiglu_{name}"] for name in ("alpha", "limit"))
    if not (is_number(alpha) and is_number(limit)):
        wanted = f"swiglu_alpha and swiglu_limit: from 0 to {MOST_NUMBER:g}, but not 0"
        raise refused(path, wanted, repr((alpha, limit)), "correct it")
    return Activation(alpha=alpha, limit=limit, shift=1.0)


def num_shared(fields: Mapping[str, Any], form: MixtureForm, size: Size) -> int:
    """The number of shared experts, which are one MLP."""
    if not form.shared_count:
        return 1 if form.shared else 0
    return size(form.shared_count) if fields.get(form.shared_count) != 0 else 0


def read_shared_inner(fields: Mapping[str, Any], family: Family, size: Size) -> int:
    """The inner size of the shared expert; 0 if there is none."""
    form = family.mixture or MixtureForm()
    count = num_shared(fields, form, size)
    return count and count * size(form.shared_inner)


def num_dense(fields: Mapping[str, Any], family: Family, path: Path) -> int:
    """The number of first layers without experts, of a model whose others have some."""
    form = family.mixture
    if form is None or not form.dense:
        return 0
    count, layers = fields.get(form.dense), fields.get("num_hidden_layers")
    if count is None:
        count = family.defaults[form.dense]
    if isinstance(count, list):
        number = count.count("dense")
        kinds = number * ["dense"] + (len(count) - number) * ["sparse"]
        count = number if count == kinds and len(count) == layers else None
    if type(count) is not int or type(layers) is not int or not 0 <= count < layers:
        wanted = f"{form.dense}: dense layers before all others, fewer than all"
        raise refused(path, wanted, repr(fields.get(form.dense))[:120], VARIANT_FIX)
    last = fields.get(form.last)
    if last not in (None, -1, layers - 1):
        wanted = f"{form.last}: the last layer, {layers - 1} or -1"
        raise refused(path, wanted, repr(last)[:120], VARIANT_FIX)
    return count
