"""The names of a model's tensors in safetensors files, and where each belongs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from etc_dist.functions.routing import GATED
from etc_dist.functions.scaled_weights import scales_name
from etc_dist.models.config import ModelConfig
from etc_dist.models.experts import DENSE_WEIGHTS, EXPERT_BIASES, SHARED_WEIGHTS
from etc_dist.models.families import FAMILIES
from etc_dist.models.family import MLP_NAMES
from etc_dist.models.float8 import LAYER, SCALES
from etc_dist.models.part import Part, of_blocks
from etc_dist.models.sizes import MLP_WEIGHTS, scaled_weights, weight_of

IN_LAYER = re.compile(r"model\.layers\.(0|[1-9][0-9]{0,8})\.(.+)")
PREDICTING = "model.mtp_"
"""Of tensors that predict further tokens."""
OF_ROUTERS = "router", "router_bias", "correction"
OF_MIXTURES = frozenset({*MLP_WEIGHTS, *EXPERT_BIASES, *SHARED_WEIGHTS, *OF_ROUTERS})
"""Arrays that dense layers before those with experts are not in."""


class WeightPlaces:
    """Where each tensor of the files belongs in a part: an array, and an index into it,
    which is None for an expert that another part has.
    Takes the time and the memory of one layer, however many config.json has."""

    def __init__(self, config: ModelConfig, part: Part) -> None:
        ids, vocabulary = part.ids(config.vocabulary), config.vocabulary
        family = FAMILIES[config.architecture]
        self._may_predict = family.may_predict
        self._layers, self._dense = config.layers, config.dense_layers
        self._of_layer = _of_layer(part.config(config), part.rank)
        self._of_dense = _of_layer(part.config(config), part.rank, is_dense=True)
        self._outer_places: dict[str, tuple[str, Any]] = {
            "model.embed_tokens.weight": ("embedding", slice(vocabulary)),
            "model.norm.weight": ("norm", config.layers * config.features.pre_norm),
        }
        if not config.is_tied:
            own_rows = slice(ids.stop - ids.start)
            self._outer_places["lm_head.weight"] = "w_head", own_rows

    def __len__(self) -> int:
        dense = self._dense * len(self._of_dense)
        num_others = (self._layers - self._dense) * len(self._of_layer)
        return dense + num_others + len(self._outer_places)

    def __iter__(self) -> Iterator[str]:
        """The names of all tensors."""
        yield from self._outer_places
        for layer in range(self._layers):
            names = self._of_dense if layer < self._dense else self._of_layer
            yield from (LAYER.format(layer, name) for name in names)

    def find(self, name: str) -> tuple[str, Any] | None:
        """The place of a tensor; None for one that the model does not have."""
        match = IN_LAYER.fullmatch(name)
        if match is None:
            return self._outer_places.get(name)
        layer = int(match[1])
        place_by_name = self._of_dense if layer < self._dense else self._of_layer
        if match[2] not in place_by_name or layer >= self._layers:
            return self._outer_places.get(name)
        target, index = place_by_name[match[2]]
        if index is None:
            return target, None
        of_layer = layer - self._dense * (weight_of(target) in OF_MIXTURES)
        return target, (of_layer, *(index if isinstance(index, tuple) else (index,)))

    def is_beyond(self, name: str) -> bool:
        """Whether a tensor predicts further tokens, as the layers after the last one
        do, and so has no influence, if the family may have such."""
        match = IN_LAYER.fullmatch(name)
        is_layer = match is not None and int(match[1]) >= self._layers
        return self._may_predict and (is_layer or name.startswith(PREDICTING))

    def is_scaled(self, name: str) -> bool:
        """Whether a tensor is a matrix of float8 with scales of its own."""
        return self.find(self.full_name(name) + SCALES) is not None

    def full_name(self, name: str) -> str:
        """The name of a tensor in a file of the whole model. Files of the base model,
        which has no output head, lack the prefix."""
        prefixed = f"model.{name}"
        return name if self.find(prefixed) is None else prefixed


def _of_layer(
    config: ModelConfig, rank: int, is_dense: bool = False
) -> dict[str, tuple[str, Any]]:
    """The tensors of a layer: an array, and an index into its part of the layer.
    is_dense: of one before those with experts."""
    heads, width = (n * config.head_dim for n in (config.heads, config.kv_heads))
    targets_by_name: dict[str, tuple[str, Any]] = {
        "self_attn.q_proj": ("w_qkv", slice(0, heads)),
        "self_attn.k_proj": ("w_qkv", slice(heads, heads + width)),
        "self_attn.v_proj": ("w_qkv", slice(heads + width, None)),
        "self_attn.o_proj": ("w_o", ...),
    }
    family = FAMILIES[config.architecture]
    targets_by_name |= {name: (to, ...) for name, to in family.norms.items()}
    mixture, biases = ({}, {}) if is_dense else _of_mixture(config, rank)
    targets = DENSE_WEIGHTS if is_dense else MLP_WEIGHTS
    targets_by_name |= mixture or {
        f"mlp.{name}": (to, ...) for name, to in zip(MLP_NAMES, targets, strict=True)
    }
    if config.normalizes_heads:
        for to, name in zip(("q_norm", "k_norm"), family.head_norms, strict=True):
            targets_by_name[f"self_attn.{name}"] = to, ...
    if family.normalizes_all:
        targets_by_name |= {f"self_attn.{n}_norm": (f"{n}_all_norm", ...) for n in "qk"}
    places = {f"{name}.weight": place for name, place in targets_by_name.items()}
    scaled = scaled_weights(config.float8)
    places |= {
        f"{name}.weight{SCALES}": (
            scales_name(to),
            of_blocks(index) if isinstance(index, slice) else index,
        )
        for name, (to, index) in targets_by_name.items()
        if to in scaled
    }
    places |= {f"{name}.bias": place for name, place in biases.items()}
    if config.features.has_sinks:
        places["self_attn.sinks"] = "sinks", ...
    if mixture and family.mixture is not None and family.mixture.correction:
        name = f"{family.mixture.block}.{family.mixture.correction}"
        places[name] = "correction", ...
    for to, of in (("qkv", "qkv"), ("o", "o")):
        if getattr(config.features, f"{to}_bias"):
            for projection in of:
                name = f"self_attn.{projection}_proj"
                places[f"{name}.bias"] = f"{to}_bias", targets_by_name[name][1]
    return places


def _of_mixture(
    config: ModelConfig, rank: int
) -> tuple[dict[str, tuple[str, Any]], dict[str, tuple[str, Any]]]:
    """Those of the router and of experts, if there are any, and their biases."""
    form, mixture = FAMILIES[config.architecture].mixture, config.mixture
    if form is None or mixture is None:
        return {}, {}
    targets_by_name: dict[str, tuple[str, Any]] = {
        f"{form.block}.{form.gate}": ("router", slice(mixture.experts))
    }
    targets_by_name |= {
        f"{form.block}.experts.{expert}.{name}": (to, mixture.index(expert, rank))
        for expert in range(mixture.experts)
        for name, to in zip(form.names, MLP_WEIGHTS, strict=True)
    }
    if mixture.shared:
        of_shared = zip(MLP_NAMES, SHARED_WEIGHTS, strict=True)
        targets_by_name |= {
            f"{form.block}.{form.shared}.{n}": (to, ...) for n, to in of_shared
        }
    if mixture.shared == GATED:
        targets_by_name[f"{form.block}.{form.shared_gate}"] = (
            "router",
            slice(mixture.experts, None),
        )
    if not mixture.has_biases:
        return targets_by_name, {}
    bias_of = dict(zip(MLP_WEIGHTS, EXPERT_BIASES, strict=True)) | {
        "router": "router_bias"
    }
    return targets_by_name, {
        name: (bias_of[to], index)
        for name, (to, index) in targets_by_name.items()
        if to in bias_of
    }


def of_experts(
    tensors: Iterable[tuple[str, Any]], config: ModelConfig
) -> Iterator[tuple[str, Any]]:
    """Those of all experts of a layer, [experts, rows, columns], one by one. Rows of
    gate_up_proj are those of gate, then those of up; with biases the two alternate, and
    matrices are [experts, columns, rows]. A correction [1, experts] has one axis."""
    form = FAMILIES[config.architecture].mixture
    if form is None:
        yield from tensors
        return
    block, (gate, up, down) = form.block, form.names
    for stored_name, array in tensors:
        name = stored_name.replace(".mlp.", f".{block}.")  # as Mixtral in transformers
        if form.correction and name.endswith(form.correction) and len(array) == 1:
            array = array.reshape(-1)
        head, _, kind = name.rpartition(f".{block}.experts.")
        is_bias = form.has_biases and kind.endswith("_bias")
        stack = kind.removesuffix("_bias") if is_bias else kind
        is_stack = stack in ("gate_up_proj", "down_proj")
        if not head or not is_stack or array.ndim != 3 - is_bias:
            yield name, array
            continue
        for expert, expert_part in enumerate(array):
            matrix = expert_part.T if form.has_biases else expert_part
            half = len(matrix) // 2
            first, second = slice(half), slice(half, None)
            if form.has_biases:
                first, second = slice(0, None, 2), slice(1, None, 2)
            parts = {down: matrix}
            if stack == "gate_up_proj":
                parts = {gate: matrix[first], up: matrix[second]}
            for part, rows in parts.items():
                suffix = "bias" if is_bias else "weight"
                yield f"{head}.{block}.experts.{expert}.{part}.{suffix}", rows
