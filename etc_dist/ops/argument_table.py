"""The arguments of an operation as a table of names and shapes: "w [n, k]"."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from etc_dist.errors import ArgumentError
from etc_dist.functions.scaled_weights import E4M3, PER_BLOCK, Scaling, scales_name
from etc_dist.ir import GraphFunction
from etc_dist.ops.scaled_weight import ScaledWeight, inspect_scaled, scalings_of
from etc_dist.runtime.array_checks import Expected, check_arrays
from etc_dist.runtime.arrays import Array, described, empty_like, inspect

DTYPES = ("bfloat16", "float16")
_AXIS = re.compile(r"(?:(\w+) \* )?(\w+)")


@dataclass(frozen=True)
class ArrayAxis:
    """`factor` times a dim: an axis of an array has so many elements. A dim may be a
    number."""

    factor: int
    dim: str

    def extent(self, dims: Mapping[str, int]) -> int:
        """The number of elements for these dims."""
        return self.factor * (int(self.dim) if self.dim.isdigit() else dims[self.dim])

    def show(self, dims: Mapping[str, int]) -> str:
        """The extent for these dims; of another dim, its name and factor."""
        if self.dim in dims:
            return str(self.factor * dims[self.dim])
        return self.dim if self.factor == 1 else f"{self.factor} * {self.dim}"


@dataclass(frozen=True)
class Shape:
    """The axes of the array `name`. dtype: if it is not that of the operation; GPUs
    read single elements of such an array."""

    name: str
    axes: tuple[ArrayAxis, ...]
    dtype: str = ""

    @classmethod
    def parse(cls, text: str, ranks: int) -> Shape:
        """ "x [ranks * rows, k]": each axis is a dim, or a multiple of one. A dtype may
        follow."""
        name, _, suffix = text.partition(" [")
        axes, _, dtype = suffix.partition("]")
        factors = {"ranks": ranks, "": 1}
        parsed = []
        for factor, dim in _AXIS.findall(axes):
            parsed.append(ArrayAxis(factors.get(factor) or int(factor), dim))
        return cls(name, tuple(parsed), dtype.strip())

    def bind(self, shape: Sequence[int], dims: dict[str, int]) -> bool:
        """Add to `dims` those that are not known yet; False if `shape` has another
        number of axes, or an axis that is not a multiple of its factor."""
        if len(shape) != len(self.axes):
            return False
        for axis, extent in zip(self.axes, shape, strict=True):
            # NOTE: torch.compile keeps each remainder of a symbolic extent as a guard.
            if axis.factor > 1 and extent % axis.factor:
                return False
            if not axis.dim.isdigit():
                dims.setdefault(axis.dim, extent // axis.factor)
        return True

    def at(self, dims: Mapping[str, int]) -> tuple[int, ...]:
        """The extents for these dims, which are all of the array's."""
        return tuple(axis.extent(dims) for axis in self.axes)

    def show(self, dims: Mapping[str, int]) -> str:
        """As `parse` reads it, with numbers in place of these dims."""
        axes = ", ".join(axis.show(dims) for axis in self.axes)
        return f"{self.name} [{axes}]" + f" {self.dtype}" * bool(self.dtype)


@dataclass(frozen=True)
class Known:
    """Dims, dtype and layout of weights that are known from held arrays. If all of
    these are scaled, no dtype is."""

    dims: Mapping[str, int] = field(default_factory=dict)
    dtype: str = ""
    w_layout: str = "nk"


@dataclass(frozen=True)
class CallArguments:
    """The checked arrays of one call. `w_layout` is "kn" if w is a transposed view, so
    that its memory is [k, n]; of scaled weights, that of their scaling. `outs` are the
    caller's outputs, or those made for it."""

    arrays: Mapping[str, Array]
    dims: Mapping[str, int]
    dtype: str
    w_layout: str
    outs: tuple[Any, ...]
    is_empty: bool

    def tensors(self, graph: GraphFunction, rank: int) -> dict[str, Array]:
        """The same memory as the tensors of `graph`, which calls the output `out` y."""
        env = graph.environment(self.graph_dims(graph), rank)
        tensors = {}
        for tensor in (*graph.inputs(), *graph.outputs()):
            is_out = tensor.kind == "output" and tensor.name not in self.arrays
            name = "out" if is_out else tensor.name
            shape = tuple(int(extent.evaluate(env)) for extent in tensor.shape)
            tensors[tensor.name] = self.arrays[name].in_shape(shape)
        return tensors

    def graph_dims(self, graph: GraphFunction) -> dict[str, int]:
        """The values of the dims of `graph`, by name."""
        return {dim.name: self.dims[dim.name] for dim in graph.dims}


class ArgumentTable:
    """The inputs of the operation `name` on `ranks` ranks and its outputs, by shape.

    transposable: the input that may be a transposed view. scalable: the inputs that may
    be a ScaledWeight each; with `quantizes`, they are, and x is quantized. empty: the
    dim that may be 0. own_dim: the dim that may differ between ranks. over: of outputs,
    the input that may be the same array."""

    def __init__(
        self,
        name: str,
        ranks: int,
        inputs: Sequence[str],
        output: str,
        *,
        transposable: str = "",
        scalable: Sequence[str] = (),
        quantizes: bool = False,
        empty: str = "",
        own_dim: str = "",
        over: Mapping[str, str] | None = None,
    ):
        self.name, self.ranks = name, ranks
        self.inputs = [Shape.parse(text, ranks) for text in inputs]
        texts = re.findall(r"\w+ \[.*?\]", output)
        self.outputs = [Shape.parse(text, ranks) for text in texts]
        self.transposable, self.own_dim = transposable, own_dim
        self._empty, self._over = empty, over or {}
        self._scalable, self._quantizes = scalable, quantizes

    def output_shapes(self, shapes: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
        """The shapes of the outputs for inputs of these shapes. ArgumentError for other
        numbers of axes, and for an axis that is not a multiple of its factor."""
        dims: dict[str, int] = {}
        if not all([e.bind(s, dims) for e, s in zip(self.inputs, shapes, strict=True)]):
            wanted = ", ".join(shape.show({}) for shape in self.inputs)
            raise self.error(wanted, ", ".join(str(list(shape)) for shape in shapes))
        return [shape.at(dims) for shape in self.outputs]

    def hold(self, values: Sequence[Any], device: int | str) -> Known:
        """Check the last inputs, which stay the same in every call."""
        shapes = self.inputs[-len(values) :]
        arrays = self._inspect(shapes, values)
        dims: dict[str, int] = {}
        self._bind(shapes, arrays, dims)
        scaling = self._scaling(arrays)
        scaled = () if scaling is None else self._scalable
        typed = (s.name for s in shapes if not s.dtype and s.name not in scaled)
        first = next(typed, None)
        dtype = "" if first is None else self._dtype(arrays[first])
        self._check(shapes, arrays, dims, dtype, device, scaling=scaling)
        return Known(dims, dtype, "nk" if scaling is None else scaling.w_layout)

    def bind(
        self,
        values: Sequence[Any],
        outs: Sequence[Any],
        known_dims: Known,
        stream: Any,
        device: int | str,
    ) -> CallArguments:
        """Inspect and check the arrays of a call, and make its outputs where `outs` is
        None. Local."""
        arrays = self._inspect(self.inputs, values)
        dims = dict(known_dims.dims)
        self._bind(self.inputs, arrays, dims)
        scaling = self._scaling(arrays)
        first = arrays[self.inputs[0].name]
        dtype = known_dims.dtype or self._dtype(first)
        results = []
        for shape, out in zip(self.outputs, outs, strict=True):
            if out is None and first.dtype == dtype:
                out = empty_like(first.owner, shape.at(dims), stream)
            if out is not None:
                arrays[shape.name] = inspect(shape.name, out)
            results.append(out)
        is_empty = dims.get(self._empty) == 0
        shapes = [*self.inputs, *self.outputs]
        self._check(shapes, arrays, dims, dtype, device, is_empty, scaling)
        w = arrays.get(self.transposable)
        layout = "kn" if w is not None and w.order == "F" else "nk"
        if scaling is not None:
            layout = scaling.w_layout
        return CallArguments(arrays, dims, dtype, layout, tuple(results), is_empty)

    def check_dims(self, dims: Mapping[str, int]) -> None:
        """ArgumentError unless there is a number above 0 for each dim of the inputs."""
        axes = [axis for shape in self.inputs for axis in shape.axes]
        names = {axis.dim: None for axis in axes if not axis.dim.isdigit()}
        is_complete = dims.keys() == names.keys()
        if not is_complete or not all(type(n) is int and n > 0 for n in dims.values()):
            got = ", ".join(f"{name}={value}" for name, value in dims.items())
            raise self.error(f"the dims {', '.join(names)}, of at least 1", got)

    def error(self, wanted: str, got: str) -> ArgumentError:
        """The error for arguments of the operation that do not fit."""
        return ArgumentError(
            f"the arguments do not fit {self.name}",
            where=f"{self.name} on {self.ranks} ranks",
            wanted=wanted,
            got=got,
            fix="correct the arguments; nothing was launched on any rank",
        )

    def _inspect(
        self, shapes: Sequence[Shape], values: Sequence[Any]
    ) -> dict[str, Array]:
        """The arrays by name, and the scales of those that are scaled."""
        arrays: dict[str, Array] = {}
        for shape, value in zip(shapes, values, strict=True):
            if not isinstance(value, ScaledWeight):
                arrays[shape.name] = inspect(shape.name, value)
            elif shape.name in self._scalable:
                arrays |= inspect_scaled(shape.name, value)
            else:
                wanted = f"{shape.name} of {' or '.join(DTYPES)}"
                raise self.error(wanted, f"a ScaledWeight {shape.name}")
        return arrays

    def _scaling(self, arrays: Mapping[str, Array]) -> Scaling | None:
        """How the weights are scaled, all alike; None if they are not."""
        pairs = list[tuple[Array, Array | None]]()
        for name in self._scalable:
            codes, scales = arrays[name], arrays.get(scales_name(name))
            if scales is None and codes.dtype.startswith("float8"):
                wanted = f"{name} of {' or '.join(DTYPES)}, or a ScaledWeight"
                raise self.error(wanted, f"{described(codes)}, without scales")
            pairs.append((codes, scales))
        scalings = scalings_of(pairs, has_blocks=self._quantizes)
        if len(scalings) > 1:
            kinds = [
                scaling.w_layout if scaling else "no scales" for scaling in scalings
            ]
            wanted = "weights with scales of one kind and dtype, or all without"
            raise self.error(wanted, ", ".join(sorted(kinds)))
        scaling = next(iter(scalings), None)
        if not self._quantizes:
            return scaling
        if scaling is None or scaling.per != PER_BLOCK:
            wanted = (
                "weights with scales of blocks of 128 x 128, for float8 activations"
            )
            raise self.error(wanted, described(*arrays.values()))
        return replace(scaling, quantizes=True)

    def _bind(
        self,
        shapes: Sequence[Shape],
        arrays: Mapping[str, Array],
        dims: dict[str, int],
    ) -> None:
        known_dims = dict(dims)
        if not all([shape.bind(arrays[shape.name].shape, dims) for shape in shapes]):
            wanted = ", ".join(shape.show(known_dims) for shape in shapes)
            raise self.error(wanted, described(*arrays.values()))

    def _dtype(self, array: Array) -> str:
        if array.dtype not in DTYPES:
            raise self.error(f"{array.name} of {' or '.join(DTYPES)}", described(array))
        return array.dtype

    def _check(
        self,
        shapes: Sequence[Shape],
        arrays: Mapping[str, Array],
        dims: Mapping[str, int],
        dtype: str,
        device: int | str,
        may_be_empty: bool = False,
        scaling: Scaling | None = None,
    ) -> None:
        scaled = () if scaling is None else self._scalable
        expected = [
            Expected(scales.name, scales.shape, scales.dtype, by_element=True)
            for scales in map(arrays.__getitem__, map(scales_name, scaled))
        ]
        expected += [
            Expected(
                shape.name,
                shape.at(dims),
                E4M3 if shape.name in scaled else shape.dtype or dtype,
                is_written=shape in self.outputs,
                orders="CF" if shape.name == self.transposable and not scaled else "C",
                axes=tuple(axis.show({}) for axis in shape.axes),
                over=self._over.get(shape.name, ""),
                by_element=bool(shape.dtype),
            )
            for shape in shapes
        ]
        check_arrays(self.name, expected, arrays, device, may_be_empty=may_be_empty)
