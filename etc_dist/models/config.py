"""The configuration of a model, from the config.json of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from etc_dist.files import read_object
from etc_dist.functions.activation import GELU_TANH, SWIGLU, Activation
from etc_dist.functions.append_kv import EVERY_POSITION
from etc_dist.functions.plan_shares import MOST_ROWS
from etc_dist.functions.rotary import HEAD_DIMS
from etc_dist.models.experts import DecoderMixture
from etc_dist.models.families import FAMILIES, MODEL_TYPES, OWN_FIELDS
from etc_dist.models.family import Family
from etc_dist.models.fields import VARIANT_FIX, refuse_fields, refused
from etc_dist.models.heads import HeadLayout
from etc_dist.models.mixture_fields import (
    counts,
    neutral_values,
    num_dense,
    read_mixture,
    read_shared_inner,
)
from etc_dist.models.quantized import check_field, float8_matmuls
from etc_dist.models.rope import (
    BETA,
    MOST_NUMBER,
    PARTIAL,
    UNROTATED,
    fits_factors,
    head_tables,
    is_number,
    query_scale,
    read_ropes,
)
from etc_dist.models.sizes import PLAIN, DecoderSizes, Features
from etc_dist.models.tokenizer_config import end_tokens
from etc_dist.models.weight_files import refuse_adapter
from etc_dist.models.windows import (
    check_unrotated,
    layer_windows,
    unrotated_layers,
)

ACTIVATIONS = {"silu": SWIGLU, "gelu_pytorch_tanh": Activation(GELU_TANH)}
"""Of `Features`, by the names in config.json."""
OTHER_NAMES = {"silu": ("swish",)}
MOST_LAYERS, MOST_SIZE, MOST_HEAD = 4096, 2**24, HEAD_DIMS[-1]


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of a model; made by `read_config`.

    architecture: as in config.json. hidden: the width of a row. inner: of an MLP, or of
    each expert. vocabulary: number of ids. heads, kv_heads: of queries, and of keys and
    values. head_dim: of the program; `head` describes those in the files. positions:
    the longest text. rope_base, rope: of the rotary embedding, its
    theta and its scaling as config.json has it. is_tied: the embedding is the output
    head. stop_tokens: the ids that end a text. mixture: its experts. shared_inner: the
    inner size of a shared one. dense_layers: the first layers, with an MLP of inner
    size dense_inner in place of experts. has_optional_norms: each query and key is
    normalized, in a family where this is a field. features: of its layers. windows: of
    each layer, as `layer_windows`. local_rope: theta and scaling of layers with a
    window; None: those of all layers. unrotated: as `unrotated_layers`. float8: as of
    `DecoderSizes`."""

    architecture: str
    layers: int
    hidden: int
    inner: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int
    head: HeadLayout
    positions: int
    norm_eps: float
    rope_base: float
    rope: Mapping[str, Any]
    is_tied: bool
    stop_tokens: tuple[int, ...]
    mixture: DecoderMixture | None = None
    shared_inner: int = 0
    dense_layers: int = 0
    dense_inner: int = 0
    has_optional_norms: bool = False
    features: Features = PLAIN
    windows: tuple[int, ...] = ()
    local_rope: Mapping[str, Any] | None = None
    unrotated: tuple[bool, ...] = ()
    float8: tuple[str, ...] = ()

    def sizes(self, page_size: int, dtype: str = "bfloat16") -> DecoderSizes:
        """The sizes that `decoder_graph` takes."""
        return DecoderSizes(
            self.heads,
            self.kv_heads,
            self.head_dim,
            self.norm_eps,
            self.normalizes_heads,
            page_size,
            dtype,
            self.mixture,
            self.features,
            self.float8,
        )

    @property
    def normalizes_heads(self) -> bool:
        """Internal: whether each query and key is normalized."""
        is_required = FAMILIES[self.architecture].normalizes_heads is True
        return is_required or self.has_optional_norms

    def tables(self, positions: int) -> dict[str, Any]:
        """Internal: the inputs of `decoder_graph` that follow from the configuration,
        for so many positions of a request."""
        tables = {"cos_sin": self.cos_sin(positions)}
        scale = query_scale(self.rope, positions)
        if scale is not None:
            tables["q_cos_sin"] = tables["cos_sin"] * scale[:, None]
        if self.features.tables > 1:
            rope = self.local_rope or UNROTATED
            local_tables = head_tables(
                rope, self.head, self.head_dim, rope["rope_theta"], positions
            )
            tables["cos_sin"] = np.concatenate([tables["cos_sin"], local_tables])
        if self.features.has_span:
            windows = np.array(self.windows or (0,) * self.layers)
            has_other = np.array(self.unrotated) if self.unrotated else windows > 0
            table_offset = positions * (self.features.tables - 1)
            spans = np.where(windows, windows, EVERY_POSITION), table_offset * has_other
            tables["spans"] = np.stack(spans, axis=1).astype(np.int32)
        if self.dense_layers:
            tables["no_rows"] = np.full((1, MOST_ROWS), -1, np.int32)
        return tables

    def table_shapes(self, positions: int) -> dict[str, tuple[int, ...]]:
        """Internal: the shapes of `tables`."""
        rows = positions * self.features.tables
        shapes: dict[str, tuple[int, ...]] = {"cos_sin": (rows, self.head_dim)}
        if self.features.scales_queries:
            shapes["q_cos_sin"] = shapes["cos_sin"]
        if self.features.has_span:
            shapes["spans"] = self.layers, 2
        if self.dense_layers:
            shapes["no_rows"] = 1, MOST_ROWS
        return shapes

    def cos_sin(self, positions: int) -> Any:
        """The table of the rotary embedding, [positions, head_dim]."""
        return head_tables(
            self.rope, self.head, self.head_dim, self.rope_base, positions
        )


def read_config(folder: str | Path) -> ModelConfig:
    """The configuration of the model in `folder`, from its config.json, and the stop
    tokens of its generation_config.json and its tokenizer.

    Raises ArgumentError for a folder without a model, and for a model of another
    architecture or with a variant that is not implemented."""
    path = Path(folder) / "config.json"
    try:
        fields = read_object(path)
    except (OSError, ValueError) as error:
        if isinstance(error, FileNotFoundError):
            refuse_adapter(path.parent)
        fix = "give the folder of a Hugging Face model, with config.json"
        raise refused(path, "a readable config.json", str(error), fix) from error
    config = replace(parse_config(fields, path), **_generation(path))
    return replace(config, stop_tokens=_with_end_tokens(config, path.parent))


def _generation(path: Path) -> dict[str, Any]:
    """What generation_config.json changes."""
    path = path.with_name("generation_config.json")
    try:
        fields = read_object(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        fix = "correct the file, or remove it"
        raise refused(path, "a JSON object", str(error), fix) from error
    refuse_fields(fields, path)
    stops = _stop_tokens(fields.get("eos_token_id"), path)
    return {"stop_tokens": stops} if stops else {}


def _with_end_tokens(config: ModelConfig, folder: Path) -> tuple[int, ...]:
    """The stop tokens, and what ends a text by the files of the tokenizer."""
    ends = end_tokens(folder)
    if any(end >= config.vocabulary for end in ends):
        wanted = f"an eos_token below {config.vocabulary}, as the model has"
        fix = "use the tokenizer of this model"
        raise refused(folder / "tokenizer_config.json", wanted, f"id {ends}", fix)
    return tuple(dict.fromkeys((*config.stop_tokens, *ends)))


def _stop_tokens(stop: Any, path: Path) -> tuple[int, ...]:
    """Files have -1 or null for none."""
    tokens = stop if isinstance(stop, list) else [] if stop is None else [stop]
    if not all(type(token) is int for token in tokens):
        raise refused(path, "eos_token_id: ids of tokens", repr(stop), "correct it")
    return tuple(token for token in tokens if token >= 0)


def _architecture(fields: Mapping[str, Any], path: Path) -> str:
    """From architectures and model_type, which do not contradict each other."""
    names, kind = fields.get("architectures"), fields.get("model_type")
    if not names:
        names = [name for name, model_type in MODEL_TYPES.items() if model_type == kind]
    name = ", ".join(map(str, names)) if isinstance(names, list) else str(names)
    if name not in FAMILIES:
        fix = "use a model of one of these architectures"
        got = repr(name) if name else f"no name, and model_type {kind!r}"
        raise refused(path, " or ".join(FAMILIES), got, fix)
    if kind not in (None, MODEL_TYPES[name]):
        wanted = f"model_type {MODEL_TYPES[name]!r} of {name}"
        raise refused(path, wanted, repr(kind), VARIANT_FIX)
    return name


def parse_config(fields: Mapping[str, Any], path: Path) -> ModelConfig:
    """The configuration of a model with `fields` of the file `path`. A field
    that is not given has the default of its architecture.

    Raises ArgumentError as `read_config`."""

    def number(key: str, value: Any) -> Any:
        if not is_number(value):
            wanted = f"{key}: a positive number of at most {MOST_NUMBER:g}"
            raise refused(path, wanted, repr(value), "correct it")
        return value

    def size(key: str, default: Any = None, most: int = MOST_SIZE) -> int:
        value = default if fields.get(key) is None else fields[key]
        if type(value) is not int or not 1 <= value <= most:
            wanted = f"{key}: an integer from 1 to {most}"
            raise refused(path, wanted, repr(value), "correct it")
        return value

    name = _architecture(fields, path)
    refuse_fields(fields, path)
    family = FAMILIES[name]
    check_field(fields, family, path)
    fields = {**family.defaults, **fields, **counts(fields, path)}
    if "rotary_dim" in family.reads and fields.get("rotary_dim") is not None:
        share = number("rotary_dim", fields["rotary_dim"]) / size("head_dim")
        fields = {PARTIAL: share, **fields}
    rope, local = read_ropes(fields, family, path)
    partial = rope.pop(PARTIAL, 1)
    base = rope.pop("rope_theta", family.theta)
    heads = size("num_attention_heads")
    hidden = size("hidden_size")
    head_size = size("head_dim", hidden // heads, most=MOST_HEAD)
    head = HeadLayout(head_size, int(head_size * partial), family.is_paired)
    dense = num_dense(fields, family, path)
    head_dim = min((n for n in HEAD_DIMS if n >= head_size), default=MOST_HEAD)
    score_scale = _score_scale(fields, head_size, head_dim, number)
    config = ModelConfig(
        architecture=name,
        layers=size("num_hidden_layers", most=MOST_LAYERS),
        hidden=hidden,
        inner=size(family.mixture.inner if family.mixture else "intermediate_size"),
        vocabulary=size("vocab_size"),
        heads=heads,
        kv_heads=size("num_key_value_heads", heads),
        head_dim=head_dim,
        head=head,
        positions=size("max_position_embeddings"),
        norm_eps=number("rms_norm_eps", fields["rms_norm_eps"]),
        rope_base=number("rope_theta", base),
        rope=rope,
        is_tied=fields.get("tie_word_embeddings") is True,
        stop_tokens=_stop_tokens(fields.get("eos_token_id"), path),
        mixture=read_mixture(fields, family, size, path),
        shared_inner=read_shared_inner(fields, family, size),
        dense_layers=dense,
        dense_inner=size("intermediate_size") if dense else 0,
        has_optional_norms=family.has_optional_norms(fields),
        features=_features(fields, family, hidden, score_scale),
    )
    _check_variants(fields, config, path)
    return _with_layers(config, fields, family, local, path)


def _features(
    fields: Mapping[str, Any],
    family: Family,
    hidden: int,
    score_scale: float | None,
) -> Features:
    """What the layers have, but for what differs between them."""
    return Features(
        qkv_bias=family.has_bias("qkv", fields),
        o_bias=family.has_bias("o", fields),
        pre_norm="norm" in family.norms.values(),
        post_norm="post_norm" in family.norms.values(),
        normalizes_all=family.normalizes_all,
        score_scale=score_scale,
        gain_offset=family.gain_offset,
        normalizes_rotated=family.normalizes_rotated,
        has_sinks=family.has_sinks,
        score_cap=fields.get("attn_logit_softcapping"),
        embedding_scale=hidden**0.5 if family.scales_embeddings else 1.0,
        activation=ACTIVATIONS[family.activation],
        logit_cap=fields.get("final_logit_softcapping"),
    )


def _with_layers(
    config: ModelConfig,
    fields: Mapping[str, Any],
    family: Family,
    local: Mapping[str, Any] | None,
    path: Path,
) -> ModelConfig:
    """`config` with what differs between layers. local: the rope of those with a
    window, if it is another one."""
    check_unrotated(fields, family, config.layers, path)
    windows = layer_windows(fields, family, config.layers, config.positions, path)
    unrotated = unrotated_layers(fields, family, config.layers, windows)
    local = local if windows else None
    features = replace(
        config.features,
        has_span=bool(windows or unrotated),
        scales_queries=BETA in config.rope,
        tables=2 if local is not None or unrotated else 1,
    )
    return replace(
        config,
        windows=windows,
        local_rope=local,
        unrotated=unrotated,
        features=features,
        float8=float8_matmuls(fields, config),
    )


def _score_scale(
    fields: Mapping[str, Any],
    head_size: int,
    head_dim: int,
    number: Callable[[str, Any], Any],
) -> float | None:
    """number(key, value): of config.json, checked."""
    scalar = fields.get("query_pre_attn_scalar")
    if scalar is not None:
        scalar = number("query_pre_attn_scalar", scalar)
    return (
        None
        if scalar in (None, head_dim) and head_size == head_dim
        else ((scalar or head_size) ** -0.5)
    )


def _check_variants(fields: Mapping[str, Any], config: ModelConfig, path: Path) -> None:
    tied, mixture = fields.get("tie_word_embeddings"), config.mixture
    features, family = config.features, FAMILIES[config.architecture]
    head, words = config.head, " or ".join(map(str, HEAD_DIMS))
    has_norm = config.normalizes_heads
    variants = {
        "an even head_dim, of which an even number of elements is rotated": (
            head.size % 2 == head.rotated % 2 == 0 and head.rotated > 0
        ),
        f"head_dim {words}": not has_norm or head.size in HEAD_DIMS,
        "a multiple of num_key_value_heads heads": config.heads % config.kv_heads == 0,
        "attention_bias false": not (
            features.normalizes_all and fields.get("attention_bias")
        ),
        **{
            f"no {name}": name in family.reads or fields.get(name) in (None, *neutral)
            for name, neutral in {**OWN_FIELDS, **neutral_values(family)}.items()
        },
        f"hidden_activation {family.activation}": fields.get("hidden_activation")
        in (None, family.activation),
        f"hidden_act {family.activation}": fields.get("hidden_act")
        in (None, family.activation, *OTHER_NAMES.get(family.activation, ())),
        **{
            f"{name}_logit_softcapping null or a positive number": (
                cap is None or is_number(cap)
            )
            for name, cap in (
                ("final", features.logit_cap),
                ("attn", features.score_cap),
            )
        },
        "tie_word_embeddings true or false": tied is None or isinstance(tied, bool),
        **{
            f"{name} true or false": isinstance(fields.get(name), bool | None)
            for name in ("attention_bias", "attention_out_bias", "qkv_bias")
        },
        f"use_qk_norm {str(has_norm).lower()}": fields.get("use_qk_norm")
        in (None, has_norm or features.normalizes_all),
        "a factor of each pair that is rotated": fits_factors(
            config.rope, head.rotated
        ),
        "sizes that are multiples of 8": not any(
            size % 8
            for size in (
                *(config.hidden, config.inner),
                *(config.shared_inner, config.dense_inner),
            )
        ),
    }
    if mixture is None:
        variants["no num_experts"] = fields.get("num_experts") in (None, 0)
    else:
        normalizes = fields.get("norm_topk_prob")
        assert family.mixture is not None
        choices = (True,) if family.mixture.normalizes is True else (True, False)
        texts = " or ".join(str(choice).lower() for choice in choices)
        variants[f"norm_topk_prob {texts}"] = normalizes in (None, *choices)
    missing = [rule for rule, holds in variants.items() if not holds]
    if missing:
        raise refused(path, "; ".join(missing), "another variant", VARIANT_FIX)
