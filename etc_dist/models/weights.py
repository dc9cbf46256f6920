"""The weights of a model: the safetensors files of a Hugging Face folder, stacked by
layer as `decoder_graph` reads them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from etc_dist.errors import ArgumentError
from etc_dist.ir.tensor import numpy_dtype
from etc_dist.models.config import ModelConfig
from etc_dist.models.expert_biases import with_bias
from etc_dist.models.experts import DENSE_WEIGHTS, SHARED_WEIGHTS
from etc_dist.models.families import FAMILIES
from etc_dist.models.heads import arranged, split_fused
from etc_dist.models.part import WHOLE, Part
from etc_dist.models.quantized import read_widened
from etc_dist.models.safetensors_file import MOST_LISTED, listed, weights_error
from etc_dist.models.weight_places import WeightPlaces, of_experts
from etc_dist.runtime.arrays import Array, inspect

IGNORED = (".rotary_emb.inv_freq",)
"""The ends of names of tensors that follow from the configuration."""
FLOAT32 = {"correction": "float32", "sinks": "float32"}
"""The dtype of arrays that have another one than the model."""
EXPONENTS = {"bfloat16": 0x7F80, "float16": 0x7C00}
AT_ONCE = 1 << 26
"""Numbers that are examined at once: each takes two bytes meanwhile."""


def load_weights(
    folder: str | Path, config: ModelConfig, dtype: str, part: Part = WHOLE
) -> dict[str, Any]:
    """The weights in `folder` as arrays of `dtype` by the names of `decoder_graph`.
    part: of a model that is split over ranks.

    Raises ArgumentError that names the tensors that are missing, unknown, stored more
    than once, of another shape or dtype, or with numbers that are not finite."""
    path = Path(folder)
    tensors = read_widened(path, FAMILIES[config.architecture])
    return stack_weights(tensors, config, dtype, path, part)


def stack_weights(
    tensors: Iterable[tuple[str, Any]],
    config: ModelConfig,
    dtype: str,
    path: Path,
    part: Part = WHOLE,
) -> dict[str, Any]:
    """As `load_weights`, of `tensors` by their names in safetensors files. They are in
    `path`."""
    whole, places = weight_shapes(config), WeightPlaces(config, WHOLE)
    own_places = WeightPlaces(config, part)
    try:
        held = {
            name: np.empty(shape, numpy_dtype(FLOAT32.get(name, dtype)))
            for name, shape in weight_shapes(config, part).items()
        }
    except (MemoryError, ValueError) as error:
        raise weights_error(path, "weights that fit in memory", str(error)) from error
    seen: set[str] = set()
    faults = []
    rows = part.ids(config.vocabulary)
    head: Any = None
    for stored_name, stored in _in_order(tensors, config):
        name = places.full_name(stored_name)
        if name.endswith(IGNORED):
            continue
        if config.is_tied and name == "lm_head.weight":
            with np.errstate(invalid="ignore", over="ignore"):
                head = np.atleast_1d(stored)[rows].astype(numpy_dtype(dtype))
            continue
        if places.is_beyond(name):
            continue
        place, own_place = places.find(name), own_places.find(name)
        if place is None or own_place is None:
            faults.append(f"{name}: unknown")
            continue
        if name in seen:
            faults.append(f"{name}: stored more than once")
            continue
        seen.add(name)
        target, index = place
        shape = np.broadcast_to(0, whole[target])[index].shape
        if shape != stored.shape:
            faults.append(f"{name}: {list(stored.shape)} instead of {list(shape)}")
            continue
        if own_place[1] is None:  # an expert of another rank
            continue
        to = held[target][own_place[1]]
        with np.errstate(invalid="ignore", over="ignore"):
            to[...] = stored[_cut(part, target, shape, to.shape)]
        if not np.isfinite(to.astype(np.float32)).all():
            faults.append(f"{name}: numbers that are not finite")
    # NOTE: config.json may have far more layers than the files.
    num_faults = len(faults) + len(places) - len(seen)
    missing = (f"{name}: missing" for name in places if name not in seen)
    faults += islice(missing, MOST_LISTED)
    _clear_padding(held, config, part)
    if config.is_tied:
        held["w_head"] = tied_head(held["embedding"], part)
        if head is not None and not np.array_equal(head, held["embedding"][rows]):
            faults.insert(0, "lm_head.weight: not the embedding, to which it is tied")
            num_faults += 1
    if faults:
        got = listed(faults, num_faults)
        raise weights_error(path, "the tensors of config.json", got)
    return held


def _in_order(
    tensors: Iterable[tuple[str, Any]], config: ModelConfig
) -> Iterator[tuple[str, Any]]:
    """Those of the program: parts of fused matrices, each expert, and heads whose
    elements are in its order. Single numbers, which no model has, have an axis."""
    tensors = (
        (name, stored if stored.ndim else stored[None]) for name, stored in tensors
    )
    tensors = of_experts(tensors, config)
    if FAMILIES[config.architecture].is_fused:
        tensors = split_fused(tensors, config.heads, config.kv_heads)
    return arranged(tensors, config.head, config.head_dim)


def _clear_padding(weights: Mapping[str, Any], config: ModelConfig, part: Part) -> None:
    """Set the rows of ids that do not exist to 0, columns after biases, and biases of
    down that another rank adds."""
    rows, own = part.ids(config.vocabulary), part.config(config)
    weights["embedding"][config.vocabulary :] = 0
    if not config.is_tied:
        weights["w_head"][rows.stop - rows.start :] = 0
    if config.mixture is not None and config.mixture.has_biases:
        for name in ("router", "w_gate", "w_up"):
            weights[name][..., own.hidden + 1 :] = 0
        adds = part.rank == 0 or part.holds_whole
        weights["w_down"][..., own.inner + adds :] = 0


def tied_head(embedding: Any, part: Part) -> Any:
    """The output head of a part: rows of the embedding, in one memory."""
    rows = len(embedding) // part.count
    return embedding[part.rank * rows : (part.rank + 1) * rows]


def _cut(
    part: Part, target: str, shape: tuple[int, ...], own: tuple[int, ...]
) -> tuple[slice, ...]:
    """What `own` elements of a matrix of `shape` belong to a part."""
    if target == "w_head":
        return (part.ids(shape[0]),)
    axis = part.split_axis(target)
    return tuple(
        part.span(size, mine) if n == axis else slice(None)
        for n, (size, mine) in enumerate(zip(shape, own, strict=True))
    )


def weight_shapes(
    config: ModelConfig, part: Part = WHOLE
) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's weights by name: those of all layers stacked, matrices
    [.., out, in] as in `torch.nn.Linear`. A tied model has no w_head: it uses rows of
    the embedding. part: of a rank, `Part(rank, ranks)`; default: the whole model.

    The rows of the embedding, and of w_head, are padded to an equal multiple of 8 on
    each rank. Numbers of the padding have no effect. Matrices of experts with biases
    have columns more: the bias, which of w_down is 0 on all ranks but the first unless
    ranks have whole experts, and others without effect."""
    config = part.config(config)
    layers, hidden, inner = config.layers, config.hidden, config.inner
    heads = config.heads * config.head_dim
    width = heads + 2 * config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "embedding": (part.count * config.vocabulary, hidden),
        "norm": (layers + 1 if config.features.pre_norm else 1, hidden),
        "w_qkv": (layers, width, hidden),
        "w_o": (layers, hidden, heads),
    }
    stack: tuple[int, ...] = (layers,)
    columns = hidden, inner
    if config.mixture is not None:
        count = layers - config.dense_layers
        stack = count, config.mixture.held
        if config.mixture.has_biases:
            columns = with_bias(hidden), with_bias(inner)
        shapes["router"] = count, config.mixture.scored, columns[0]
        of_router = count, config.mixture.experts
        shapes |= dict.fromkeys(config.mixture.router.bias_names, of_router)
        for names, of, size in (
            (SHARED_WEIGHTS, count, config.shared_inner),
            (DENSE_WEIGHTS, config.dense_layers, config.dense_inner),
        ):
            each = (of, size, hidden), (of, size, hidden), (of, hidden, size)
            shapes |= dict(zip(names, each, strict=True)) if size else {}
    shapes |= {
        "w_gate": (*stack, inner, columns[0]),
        "w_up": (*stack, inner, columns[0]),
        "w_down": (*stack, hidden, columns[1]),
    }
    if not config.is_tied:
        shapes["w_head"] = (config.vocabulary, hidden)
    for name in FAMILIES[config.architecture].norms.values():
        if name != "norm":
            shapes[name] = layers, hidden
    if config.features.normalizes_all:
        shapes |= {
            "q_all_norm": (layers, heads),
            "k_all_norm": (layers, (width - heads) // 2),
        }
    if config.features.qkv_bias:
        shapes["qkv_bias"] = layers, width
    if config.features.o_bias:
        shapes["o_bias"] = layers, hidden
    if config.features.has_sinks:
        shapes["sinks"] = layers, config.heads
    if config.normalizes_heads:
        shapes |= {name: (layers, config.head_dim) for name in ("q_norm", "k_norm")}
    return shapes


def check_weights(
    weights: Any, config: ModelConfig, part: Part, are_finite: bool
) -> str:
    """The dtype of a model's weights; ArgumentError that names what does not fit.
    are_finite: the numbers are not examined."""
    wanted = weight_shapes(config, part)
    faults = [f"{name}: missing" for name in wanted if name not in weights]
    found = {n: inspect(n, weights[n]) for n in wanted if n in weights}
    own = {name: FLOAT32.get(name, array.dtype) for name, array in found.items()}
    odd = [name for name, array in found.items() if array.dtype != own[name]]
    faults += [f"{name}: dtype {found[name].dtype}" for name in odd]
    dtypes = sorted({a.dtype for name, a in found.items() if name not in FLOAT32})
    for name, array in found.items():
        if array.shape != wanted[name] or array.order != "C":
            faults.append(f"{name}: {array} instead of {list(wanted[name])}")
    if len(dtypes) > 1 or not {*dtypes} <= {"bfloat16", "float16"}:
        faults.append(f"dtypes {', '.join(dtypes)}")
    faults = faults or [
        f"{name}: numbers that are not finite"
        for name, array in found.items()
        if not are_finite and name not in FLOAT32 and not _is_finite(array)
    ]
    if faults:
        raise ArgumentError(
            "the weights do not fit the model",
            where="argument weights of a model",
            wanted="contiguous arrays of finite numbers by the names and of the shapes "
            "of weight_shapes(config), all bfloat16 or all float16",
            got=listed(faults),
            fix="make the arrays as weight_shapes(config) lists them, or load the "
            "model by load()",
        )
    return dtypes[0]


def _is_finite(array: Array) -> bool:
    """Whether no exponent has all its bits, as those of NaN and infinity have."""
    bits, exponent = array.words(), EXPONENTS[array.dtype]
    parts = range(0, len(bits), AT_ONCE)
    return all((bits[n : n + AT_ONCE] & exponent).max() < exponent for n in parts)
