"""The weights of a model: the safetensors files of a Hugging Face folder, stacked by
layer as `decoder_graph` reads them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from etc_dist.errors import ArgumentError
from etc_dist.functions.scaled_weights import BLOCK, BLOCKS, E4M3, scales_name
from etc_dist.ir.tensor import numpy_dtype
from etc_dist.models.config import ModelConfig
from etc_dist.models.experts import DENSE_WEIGHTS, EXPERT_BIASES, SHARED_WEIGHTS
from etc_dist.models.families import FAMILIES
from etc_dist.models.float8 import UNCONVERTED
from etc_dist.models.heads import arranged, split_fused
from etc_dist.models.held_weights import HeldWeights, are_finite
from etc_dist.models.part import INNER, WHOLE, Part, has_blocks, of_blocks
from etc_dist.models.quantized import read_widened
from etc_dist.models.safetensors_file import MOST_LISTED, listed, weights_error
from etc_dist.models.sizes import scaled_weights, weight_of
from etc_dist.models.weight_places import WeightPlaces, of_experts
from etc_dist.runtime.arrays import inspect

IGNORED = (".rotary_emb.inv_freq",)
"""The ends of names of tensors that follow from the configuration."""
FLOAT32 = {"correction": "float32", "router_bias": "float32", "sinks": "float32"}
"""The dtype of arrays that have another one than the model."""
ALL: list[tuple[Any, Any]] = [(..., ...)]
"""The only piece of a whole matrix."""


def load_weights(
    folder: str | Path,
    config: ModelConfig,
    dtype: str,
    part: Part = WHOLE,
    backend: str = "cpu",
) -> dict[str, Any]:
    """The weights in `folder` as arrays of `dtype` by the names of `decoder_graph`, and
    those of `own_dtypes`. part: of a model that is split over ranks. backend: "cpu" for
    arrays of NumPy, "cuda" for those of CuPy.

    Raises ArgumentError that names the tensors that are missing, unknown, stored more
    than once, of another shape or dtype, or with numbers that are not finite."""
    path, places = Path(folder), WeightPlaces(config, part)
    family = FAMILIES[config.architecture]
    tensors = read_widened(path, family, places.is_scaled)
    return stack_weights(tensors, config, dtype, path, part, backend)


def stack_weights(
    tensors: Iterable[tuple[str, Any]],
    config: ModelConfig,
    dtype: str,
    path: Path,
    part: Part = WHOLE,
    backend: str = "cpu",
) -> dict[str, Any]:
    """As `load_weights`, of `tensors` by their names in safetensors files. They are in
    `path`."""
    shapes, dtype_by_name = weight_shapes(config, part), own_dtypes(config, part)
    try:
        dtypes = {name: dtype_by_name.get(name, dtype) for name in shapes}
        weights = HeldWeights(shapes, dtypes, backend)
    except (MemoryError, ValueError) as error:
        raise _no_memory(path, error) from error
    stack = _Stack(config, part, weights, dtypes)
    rows = part.ids(config.vocabulary)
    head: Any = None
    try:
        for stored_name, array in _in_order(tensors, config):
            name = stack.places.full_name(stored_name)
            if config.is_tied and name == "lm_head.weight":
                head = np.atleast_1d(array)[rows]
            elif not (name.endswith(IGNORED) or stack.places.is_beyond(name)):
                stack.take(name, array)
    except MemoryError as error:
        raise _no_memory(path, error) from error
    # NOTE: config.json may have far more layers than the files.
    faults, num_faults = stack.faults, stack.num_faults()
    if head is not None and not weights.has_rows("embedding", rows, head):
        faults.insert(0, "lm_head.weight: not the embedding, to which it is tied")
        num_faults += 1
    if faults:
        got = listed(faults, num_faults)
        raise weights_error(path, "the tensors of config.json", got)
    arrays = weights.arrays()
    if config.is_tied:
        arrays["w_head"] = tied_head(arrays["embedding"], part)
    return arrays


def _no_memory(path: Path, error: Exception) -> ArgumentError:
    fix = "load it on more ranks, or a smaller model"
    return weights_error(path, "weights that fit in memory", str(error), fix)


class _Stack:
    """Stores tensors in the arrays of a part, and notes what does not fit."""

    def __init__(
        self,
        config: ModelConfig,
        part: Part,
        weights: HeldWeights,
        dtypes: Mapping[str, str],
    ) -> None:
        # Files have the scales of what stays in float8 on these ranks.
        kept_config = replace(config, float8=part.config(config).float8)
        self.places = WeightPlaces(kept_config, WHOLE)
        self._own_places = WeightPlaces(kept_config, part)
        self._part, self._arrays, self._dtypes = part, weights, dtypes
        self._whole, self._by_blocks = weight_shapes(kept_config), has_blocks(config)
        self._shapes = weight_shapes(config, part)
        self._read_names: set[str] = set()
        self.faults: list[str] = []

    def num_faults(self) -> int:
        """With those of missing tensors, of which the first are added."""
        missing = len(self.places) - len(self._read_names)
        names = (name for name in self.places if name not in self._read_names)
        count = len(self.faults) + missing
        self.faults += [f"{name}: missing" for name in islice(names, MOST_LISTED)]
        return count

    def take(self, name: str, array: Any) -> None:
        """Store the part of a tensor."""
        place, own_place = self.places.find(name), self._own_places.find(name)
        fault = ""
        if place is None or own_place is None:
            fault = "unknown"
        elif name in self._read_names:
            fault = "stored more than once"
        else:
            self._read_names.add(name)
            target, index = place
            shape = np.broadcast_to(0, self._whole[target])[index].shape
            if shape != array.shape:
                fault = f"{list(array.shape)} instead of {list(shape)}"
            elif self._dtypes[target] == E4M3 != array.dtype.name:
                fault = f"{array.dtype} instead of {E4M3}: add it to {UNCONVERTED}"
            elif not self._store(target, own_place[1], array):
                fault = "numbers that are not finite"
        if fault:
            self.faults.append(f"{name}: {fault}")

    def _store(self, target: str, index: Any, array: Any) -> bool:
        """Whether all numbers are finite. index: None for an expert of another rank."""
        part = self._part
        adds_bias = part.rank == 0 or part.holds_whole
        if index is None or (target == EXPERT_BIASES[-1] and not adds_bias):
            return True
        own_shape = self._arrays.shape(target, index)
        pieces = self._pieces(target, array.shape, own_shape)
        every = [self._arrays.store(target, index, to, array[of]) for to, of in pieces]
        return all(every)

    def _pieces(
        self, target: str, shape: tuple[int, ...], own_shape: tuple[int, ...]
    ) -> list[tuple[Any, Any]]:
        """Where the pieces of a matrix of `shape` that belong to a part are: in
        `own_shape` there, and in the matrix."""
        part = self._part
        if target == "w_head":
            return [(..., part.ids(shape[0]))]
        weight = weight_of(target)
        axis = part.split_axis(weight)
        if axis is None:
            return ALL
        pieces = [(slice(None), part.span(shape[axis], own_shape[axis]))]
        if self._by_blocks and weight in INNER:
            widths = (
                stack_shapes[weight][axis - 2]
                for stack_shapes in (self._whole, self._shapes)
            )
            pieces = part.blocks(*widths)
            if weight != target:
                pieces = [(of_blocks(to), of_blocks(of)) for to, of in pieces]
        before = (slice(None),) * axis
        return [((*before, to), (*before, of)) for to, of in pieces]


def _in_order(
    tensors: Iterable[tuple[str, Any]], config: ModelConfig
) -> Iterator[tuple[str, Any]]:
    """Those of the program: parts of fused matrices, each expert, and heads whose
    elements are in its order. Single numbers, which no model has, have an axis."""
    tensors = ((name, array if array.ndim else array[None]) for name, array in tensors)
    tensors = of_experts(tensors, config)
    if FAMILIES[config.architecture].is_fused:
        tensors = split_fused(tensors, config.heads, config.kv_heads)
    return arranged(tensors, config.head, config.head_dim)


def tied_head(embedding: Any, part: Part) -> Any:
    """The output head of a part: rows of the embedding, in one memory."""
    rows = len(embedding) // part.count
    return embedding[part.rank * rows : (part.rank + 1) * rows]


def weight_shapes(
    config: ModelConfig, part: Part = WHOLE
) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's weights by name: those of all layers stacked, matrices
    [.., out, in] as in `torch.nn.Linear`. A tied model has no w_head: it uses rows of
    the embedding. part: of a rank, `Part(rank, ranks)`; default: the whole model.

    The rows of the embedding, and of w_head, are padded to an equal multiple of 8 on
    each rank. Numbers of the padding have no effect. Weights of float8 have scales, by
    the name of the weight and "_scales". down_bias is 0 on all ranks but the first
    unless ranks have whole experts."""
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
    if config.mixture is not None:
        count = layers - config.dense_layers
        stack = count, config.mixture.held
        if config.mixture.has_biases:
            sizes = zip(EXPERT_BIASES, (inner, inner, hidden), strict=True)
            shapes |= {name: (*stack, size) for name, size in sizes}
        shapes["router"] = count, config.mixture.scored, hidden
        of_router = count, config.mixture.experts
        shapes |= dict.fromkeys(config.mixture.router.bias_names, of_router)
        for names, of, size in (
            (SHARED_WEIGHTS, count, config.shared_inner),
            (DENSE_WEIGHTS, config.dense_layers, config.dense_inner),
        ):
            matrix_shapes = (of, size, hidden), (of, size, hidden), (of, hidden, size)
            shapes |= dict(zip(names, matrix_shapes, strict=True)) if size else {}
    shapes |= {
        "w_gate": (*stack, inner, hidden),
        "w_up": (*stack, inner, hidden),
        "w_down": (*stack, hidden, inner),
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
    for name in scaled_weights(config.float8):
        *of_stack, n, k = shapes[name]
        shapes[scales_name(name)] = *of_stack, *(-(-size // BLOCK) for size in (n, k))
    return shapes


def own_dtypes(config: ModelConfig, part: Part = WHOLE) -> dict[str, str]:
    """The dtypes of the arrays that have another one than the model, and of some that
    it may not have."""
    scaled = scaled_weights(part.config(config).float8)
    dtypes = {**FLOAT32, **dict.fromkeys(scaled, E4M3)}
    return dtypes | {scales_name(name): BLOCKS.dtype for name in scaled}


def weight_bytes(config: ModelConfig, part: Part = WHOLE) -> dict[str, int]:
    """The bytes of each array, in a model of 16 bits."""
    dtype_by_name = own_dtypes(config, part)
    return {
        name: prod(shape) * numpy_dtype(dtype_by_name.get(name, "bfloat16")).itemsize
        for name, shape in weight_shapes(config, part).items()
    }


def check_weights(
    weights: Any, config: ModelConfig, part: Part, is_checked: bool
) -> str:
    """The dtype of a model's weights; ArgumentError that names what does not fit.
    is_checked: the numbers are not examined."""
    shapes, dtype_by_name = weight_shapes(config, part), own_dtypes(config, part)
    faults = [f"{name}: missing" for name in shapes if name not in weights]
    arrays = {
        name: inspect(name, weights[name]).of_dtype(dtype_by_name.get(name, ""))
        for name in shapes
        if name in weights
    }
    odd = [
        n
        for n, array in arrays.items()
        if array.dtype != dtype_by_name.get(n, array.dtype)
    ]
    faults += [f"{name}: dtype {arrays[name].dtype}" for name in odd]
    dtypes = sorted(
        {a.dtype for name, a in arrays.items() if name not in dtype_by_name}
    )
    for name, array in arrays.items():
        if array.shape != shapes[name] or array.order != "C":
            faults.append(f"{name}: {array} instead of {list(shapes[name])}")
    if len(dtypes) > 1 or not {*dtypes} <= {"bfloat16", "float16"}:
        faults.append(f"dtypes {', '.join(dtypes)}")
    faults = faults or [
        f"{name}: numbers that are not finite"
        for name, array in arrays.items()
        if not is_checked and name not in FLOAT32
        if not are_finite(array.words(), array.dtype)
    ]
    if faults:
        raise ArgumentError(
            "the weights do not fit the model",
            where="argument weights of a model",
            wanted="contiguous arrays of finite numbers by the names and of the shapes "
            "of weight_shapes(config), all bfloat16 or all float16, but for codes and "
            "scales",
            got=listed(faults),
            fix="make the arrays as weight_shapes(config) lists them, or load the "
            "model by load()",
        )
    return dtypes[0]
