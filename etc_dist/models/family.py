"""What describes a family of models: how its layers differ from those of others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

NORMS = {"input_layernorm": "norm", "post_attention_layernorm": "mlp_norm"}
"""Before attention, and before the MLP."""
MLP_NAMES = ("gate_proj", "up_proj", "down_proj")
"""Gate, up and down of an MLP."""


def no_layer(number: int, fields: Mapping[str, Any]) -> bool:
    """The layers of a family without sliding windows."""
    return False


def every_layer(number: int, fields: Mapping[str, Any]) -> bool:
    """Those of a family whose layers are alike."""
    return True


def three_of_four(number: int, fields: Mapping[str, Any]) -> bool:
    """All layers but each fourth."""
    return (number + 1) % 4 != 0


def all_but_each_last(number: int, fields: Mapping[str, Any]) -> bool:
    """All layers but the last of each sliding_window_pattern."""
    pattern = fields["sliding_window_pattern"]
    return type(pattern) is int and pattern > 0 and (number + 1) % pattern != 0


def alternate_layers(number: int, fields: Mapping[str, Any]) -> bool:
    """The first of each two layers."""
    return number % 2 == 0


def last_layers(number: int, fields: Mapping[str, Any]) -> bool:
    """Those from max_window_layers on."""
    first = fields["max_window_layers"]
    return type(first) is int and number >= first


def every_other(number: int, fields: Mapping[str, Any]) -> bool:
    """The first of each two layers, before max_window_layers."""
    first = fields["max_window_layers"]
    return number % 2 == 0 and type(first) is int and number < first


def none_unrotated(number: int, fields: Mapping[str, Any], window: int | None) -> bool:
    """The layers of a family whose queries and keys are all rotated."""
    return False


def full_unrotated(number: int, fields: Mapping[str, Any], window: int | None) -> bool:
    """Those without a sliding window, if the model has one."""
    return window == 0


def listed_unrotated(
    number: int, fields: Mapping[str, Any], window: int | None
) -> bool:
    """Those with a 0 in no_rope_layers, or else each no_rope_layer_interval-th."""
    layer_flags = fields.get("no_rope_layers")
    interval = fields["no_rope_layer_interval"]
    return not layer_flags[number] if layer_flags else (number + 1) % interval == 0


def listed_slide(number: int, fields: Mapping[str, Any]) -> bool:
    """Those that listed_unrotated gives."""
    return listed_unrotated(number, fields, None)


@dataclass(frozen=True)
class MixtureForm:
    """The mixture of experts of a family, as its files have it.

    inner: the field with the inner size of an expert. block: its name in a layer; in
    the block, gate: the router. names: of gate, up and down of an expert. normalizes:
    the weights of a row are divided by their sum: whether, or the field that says it.

    score: as of `Router`. correction: of scores, for the choice: the name of the array
    in the block. scale: the field with a factor of the weights. is_grouped: the fields
    n_group and topk_group are those of `Router`.

    shared: the MLP in the block that every row takes, if there is one; shared_gate: the
    matrix of one row whose product, by a sigmoid, is its weight. shared_inner: the
    field with its inner size; shared_count: that with a factor of it, 0 for none.

    dense: the field with the number of first layers that have an MLP in place of
    experts, or with a list of "dense" and "sparse" for each layer. last: the field with
    the number of the last layer with experts, or -1.

    has_biases: the router and the experts have biases, and stacks of experts are
    transposed, with gate and up interleaved; the activation is that of gpt-oss."""

    inner: str = "moe_intermediate_size"
    block: str = "mlp"
    gate: str = "gate"
    names: tuple[str, str, str] = MLP_NAMES
    normalizes: bool | str = "norm_topk_prob"
    score: str = "softmax"
    correction: str = ""
    scale: str = ""
    is_grouped: bool = False
    shared: str = ""
    shared_gate: str = ""
    shared_inner: str = ""
    shared_count: str = ""
    dense: str = ""
    last: str = ""
    has_biases: bool = False

    def normalizes_weights(self, fields: Mapping[str, Any]) -> bool:
        """fields: those of config.json."""
        of = self.normalizes
        return fields.get(of) is True if isinstance(of, str) else of


@dataclass(frozen=True)
class Family:
    """Models of one architecture, which is a name in config.json.

    model_type: its other name there. defaults: the values of fields that a file does
    not have, as in transformers. theta: the default of rope_theta. normalizes_heads:
    each query and key is normalized: whether, or the field that says it.
    normalizes_all: all of a row together;
    normalizes_rotated: after they are rotated. head_norms: the names of these norms in
    the files. biases: of the matmuls `qkv` and `o`: True, or the field that says
    whether there are any. mixture: in place of an MLP. partial: the default of
    partial_rotary_factor; None: it is 1. is_paired: neighbours are rotated together.
    rope_names: other names of kinds of rotary embeddings. is_fused: q, k and v are one
    matrix in the files, as are gate and up. rope: the default of rope_parameters.
    has_alpha: "dynamic" may have alpha. local_theta: the default of rope_theta in
    layers with a sliding window, which have a rotary embedding of their own; None: they
    have not.

    norms: the array of each norm of a layer, by its name in the files. gain_offset: is
    added to their gains. activation: of the MLP, as hidden_activation has it.
    scales_embeddings: by the root of their size.

    reads: those of OWN_FIELDS that change results.

    slides: whether a layer has a sliding window, if the model has one: by its number
    and the fields of config.json. reads_layer_types: layer_types decides, if it is
    given. window_switch: the field without which no layer has one.

    is_unrotated: whether a layer has no rotary embedding: by its number, the fields of
    config.json, and its sliding window: 0 for none, None if the model has none.

    has_sinks: each query head has an attention sink.

    gguf: general.architecture of its GGUF files. layers: what they have, for users."""

    architecture: str
    model_type: str
    defaults: Mapping[str, Any]
    theta: float = 1e4
    normalizes_heads: bool | str = False
    normalizes_all: bool = False
    normalizes_rotated: bool = False
    head_norms: tuple[str, str] = ("q_norm", "k_norm")
    biases: Mapping[str, str | bool] = field(default_factory=dict)
    mixture: MixtureForm | None = None
    partial: float | None = None
    is_paired: bool = False
    rope_names: Mapping[str, str] = field(default_factory=dict)
    is_fused: bool = False
    rope: Mapping[str, Any] = field(default_factory=dict)
    has_alpha: bool = False
    local_theta: float | None = None
    gain_offset: int = 0
    activation: str = "silu"
    scales_embeddings: bool = False
    reads: frozenset[str] = frozenset()
    norms: Mapping[str, str] = field(default_factory=lambda: NORMS)
    slides: Callable[[int, Mapping[str, Any]], bool] = no_layer
    reads_layer_types: bool = False
    window_switch: str = ""
    is_unrotated: Callable[[int, Mapping[str, Any], int | None], bool] = none_unrotated
    has_sinks: bool = False
    gguf: str = ""
    layers: str = "plain"

    @property
    def may_predict(self) -> bool:
        """Whether files may have layers that predict further tokens."""
        return "num_nextn_predict_layers" in self.reads

    def has_optional_norms(self, fields: Mapping[str, Any]) -> bool:
        """Whether a field says that each query and key is normalized. fields: those
        of config.json."""
        of = self.normalizes_heads
        return isinstance(of, str) and fields.get(of) is True

    def has_bias(self, matmul: str, fields: Mapping[str, Any]) -> bool:
        """Whether a matmul has a bias. fields: those of config.json."""
        bias = self.biases.get(matmul, False)
        return fields.get(bias) is True if isinstance(bias, str) else bias
