"""Tensors of a program and the regions of them that a task accesses."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from etc_dist.errors import GraphError
from etc_dist.ir.expr import Const, Expr, Load, Symbol, wrap

DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4, "int32": 4, "float8_e4m3fn": 1}
"""Element types and their sizes in bytes."""


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of an element type; some come from ml_dtypes."""
    if name in ("bfloat16", "float8_e4m3fn"):
        import ml_dtypes

        dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return dtype
    return np.dtype(name)


@dataclass(frozen=True)
class Tile:
    """`size` indices from `start`, cut off at the tensor's edge."""

    start: Expr
    size: Expr


def tile(index: Expr | int, size: Expr | int) -> Tile:
    """The index-th tile of `size`: [index * size, (index + 1) * size)."""
    return Tile(wrap(index) * wrap(size), wrap(size))


def span(start: Expr | int, size: Expr | int) -> Tile:
    """`size` indices from `start`."""
    return Tile(wrap(start), wrap(size))


LOADABLE = ("input", "state", "local")
"""The kinds of tensors that index expressions may load from."""

Index = "Expr | int | Tile | slice"


@dataclass(frozen=True)
class Tensor:
    """A dense row-major array with a symbolic shape.

    `kind`: "input", "state" and "output" are the caller's arrays, "local" is scratch of
    one rank, "symmetric" exists on every rank at the same place and may be written by
    peers through `on(rank)`. `over`: the input whose memory an output may have.
    `flagged`: on GPUs its memory has words of 8 bytes, 4 of data and the epoch."""

    name: str
    shape: tuple[Expr, ...]
    dtype: str
    kind: str
    over: str = ""
    flagged: bool = False

    __iter__ = None  # else Python would index without end

    def __getitem__(self, index: Any) -> Region:
        return _region(self, None, index)

    def on(self, rank: Expr | int) -> RemoteTensor:
        """The same tensor in `rank`'s memory. Raises GraphError unless it is
        symmetric."""
        if self.kind != "symmetric":
            raise GraphError(
                f"tensor {self.name} has no copy on other ranks",
                where=f"{self.name}.on({rank})",
                wanted="a tensor made by g.symmetric(...)",
                got=f"a tensor of kind {self.kind!r}",
                fix="declare it symmetric, or drop .on(...)",
            )
        return RemoteTensor(self, wrap(rank, f"{self.name}.on(...)"))

    def load(self, *index: Expr | int) -> Load:
        """An element as a symbolic integer, read when the program runs (int32). Raises
        GraphError for a tensor of another dtype or kind, and another number of
        indices."""
        if self.dtype != "int32" or self.kind not in LOADABLE:
            raise GraphError(
                f"tensor {self.name} cannot be part of an index expression",
                where=f"{self.name}.load({', '.join(map(str, index))})",
                wanted=f"an int32 tensor of kind {', '.join(LOADABLE)}",
                got=f"{self.dtype}, {self.kind}",
                fix="pass indices and counts as int32 tensors",
            )
        if len(index) != len(self.shape):
            raise GraphError(
                f"an element of tensor {self.name} has the wrong number of axes",
                where=f"{self.name}.load({', '.join(map(str, index))})",
                wanted=f"{len(self.shape)} indices",
                got=f"{len(index)}",
                fix="index every axis",
            )
        where = f"{self.name}.load(...)"
        at = tuple(wrap(i, where) for i in index)
        return Load(self.name, self.shape, at, self.is_given)

    @property
    def has_own_rows(self) -> bool:
        """Internal: whether ranks may have different numbers of rows."""
        first = self.shape[0] if self.shape else None
        return isinstance(first, Symbol) and first.kind == "own"

    @property
    def is_given(self) -> bool:
        """Internal: whether it has values before a run: the caller's inputs and
        states."""
        return self.kind in ("input", "state")

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype]

    def nbytes(self, env: dict[str, int]) -> int:
        """Bytes of the tensor on one rank, with the dims of `env`."""
        return prod(int(d.evaluate(env)) for d in self.shape) * self.itemsize

    def __str__(self) -> str:
        shape = ", ".join(map(str, self.shape))
        kind = f"flagged {self.kind}" if self.flagged else self.kind
        text = f"{kind} {self.name} [{shape}] {self.dtype}"
        return f"{text}, may be {self.over}" if self.over else text

    def may_be(self, other: Tensor) -> bool:
        """Internal: whether both may have the same memory."""
        return self == other or self.over == other.name or other.over == self.name


@dataclass(frozen=True)
class RemoteTensor:
    """A symmetric tensor in the memory of `rank`; index it to get a region."""

    tensor: Tensor
    rank: Expr

    __iter__ = None  # else Python would index without end

    def __getitem__(self, index: Any) -> Region:
        return _region(self.tensor, self.rank, index)


@dataclass(frozen=True)
class Region:
    """A box of a tensor: per axis a start and a size, cut off at the edge.

    `rank` is None for the running rank's own memory. `kept_axes[axis]` is False where
    the axis was indexed by one integer; such an axis is dropped from the NumPy view."""

    tensor: Tensor
    rank: Expr | None
    start: tuple[Expr, ...]
    size: tuple[Expr, ...]
    kept_axes: tuple[bool, ...]

    @cached_property
    def parts(self) -> tuple[Expr, ...]:
        """Internal: the expressions that select the region."""
        rank = () if self.rank is None else (self.rank,)
        return (*self.start, *self.size, *rank)

    @cached_property
    def ends(self) -> tuple[Expr, ...]:
        """Internal: where it ends on each axis, if the tensor is large enough."""
        return tuple(s + e for s, e in zip(self.start, self.size, strict=True))

    @cached_property
    def is_loaded(self) -> bool:
        """Internal: whether the selected region depends on a runtime tensor."""
        return any(e.is_loaded for e in self.parts)

    def bounds(self, env: dict[str, Any]) -> list[tuple[Any, Any]]:
        """Internal: per axis (low, high), clipped to the tensor, for numbers or
        arrays."""
        out = []
        for start, size, extent in zip(
            self.start, self.size, self.tensor.shape, strict=True
        ):
            low = start.evaluate(env)
            end = extent.evaluate(env)
            high = np.minimum(low + size.evaluate(env), end)
            out.append((np.minimum(low, end), high))
        return out

    def view(self, array: Any, env: dict[str, Any]) -> Any:
        """The region of `array` (the tensor's storage on the right rank)."""
        index = tuple(
            slice(int(low), max(int(low), int(high))) if is_kept else int(low)
            for is_kept, (low, high) in zip(
                self.kept_axes, self.bounds(env), strict=True
            )
        )
        return array[index]

    def __str__(self) -> str:
        where = "" if self.rank is None else f".on({self.rank})"
        parts = []
        for start, size, extent, is_kept in zip(
            self.start, self.size, self.tensor.shape, self.kept_axes, strict=True
        ):
            if not is_kept:
                parts.append(str(start))
            elif size == extent and str(start) == "0":
                parts.append(":")
            else:
                parts.append(f"{start} +: {size}")
        return f"{self.tensor.name}{where}[{', '.join(parts)}]"


def _is_negative(value: Expr) -> bool:
    return isinstance(value, Const) and value.value < 0


def _region(tensor: Tensor, rank: Expr | None, index: Any) -> Region:
    parts = index if isinstance(index, tuple) else (index,)
    if len(parts) != len(tensor.shape):
        raise GraphError(
            f"a region of tensor {tensor.name} has the wrong number of axes",
            where=f"{tensor.name}[...]",
            wanted=f"{len(tensor.shape)} indices",
            got=f"{len(parts)}",
            fix="index every axis; use : for a whole one",
        )
    starts, sizes, keeps_axis = [], [], []
    for part, extent in zip(parts, tensor.shape, strict=True):
        if isinstance(part, Tile):
            starts.append(part.start)
            sizes.append(part.size)
        elif isinstance(part, slice):
            if part.step is not None:
                raise GraphError(
                    f"a region of tensor {tensor.name} has a step",
                    where=f"{tensor.name}[...]",
                    wanted="start:stop, : or tile(i, size)",
                    got=f"step {part.step}",
                    fix="write start:stop without a step",
                )
            start = wrap(0 if part.start is None else part.start)
            stop = extent if part.stop is None else wrap(part.stop)
            size = stop - start
            if (isinstance(size, Const) and size.value < 0) or _is_negative(stop):
                raise GraphError(
                    f"a region of tensor {tensor.name} ends before it begins",
                    where=f"{tensor.name}[{start}:{stop}]",
                    wanted="start and stop counted from the beginning",
                    got=f"{start}:{stop}",
                    fix="write n - 2 instead of -2, where n is the extent of the axis",
                )
            starts.append(start)
            sizes.append(size)
        else:
            starts.append(wrap(part))
            sizes.append(wrap(1))
        keeps_axis.append(isinstance(part, (Tile, slice)))
    where = f"{tensor.name}[...]"
    return Region(
        tensor,
        rank,
        tuple(wrap(part, where) for part in starts),
        tuple(wrap(part, where) for part in sizes),
        tuple(keeps_axis),
    )
