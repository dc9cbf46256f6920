"""Operand: the requirements of a device function's CUDA body on one region of a call.

NumPy bodies take regions of any shape; a CUDA body is written for a tile. Code
generation checks the declaration (`codegen/tiles.py`), the CPU backend does not: it can
run the same graph with small tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from etc_dist.errors import GraphError, expect_range
from etc_dist.ir.expr import Expr
from etc_dist.ir.tensor import DTYPES

WORLD = "world"
"""The name of an extent that is the number of ranks."""


@dataclass(frozen=True)
class Extent:
    """The size of a region along one axis. All given conditions must hold.

    size: exactly this many elements.
    clipped: or fewer than `size`, where the tensor ends.
    most: at most this many. An expression of numbers of the graph is checked at the
    dims of a run.
    multiple: a multiple of this, or up to the tensor's end.
    begins: the region begins at a multiple of this; 0: at the tensor's first element.
    An expression of numbers of the graph is checked at the dims of a run.
    name: equal to all extents of this name in the call; "world": the number of ranks.
    times: this many times the extents of the name without it.
    per: one element, or `times`, for each `per` of theirs, or fewer at the end. This is
    checked at the dims of a run.
    whole: the region covers the axis.
    not_empty: the region has elements, unless the task writes nothing. This is checked
    at the dims of a run."""

    size: int | None = None
    most: Expr | int | None = None
    multiple: int = 1
    begins: Expr | int = 1
    name: str = ""
    whole: bool = False
    not_empty: bool = False
    clipped: bool = False
    times: int = 1
    per: Expr | int | None = None

    def __post_init__(self) -> None:
        least = {"size": 1, "most": 1, "multiple": 1, "begins": 0, "times": 1, "per": 1}
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, Expr):
                expect_range(value, low, None, name)
        if self.name and not self.name.isidentifier():
            raise GraphError(
                "an extent of an operand does not have a name",
                where="Operand(...)",
                wanted="an identifier",
                got=repr(self.name),
                fix="write, for example, Operand((64, 'k'))",
            )

    @property
    def is_exact(self) -> bool:
        """Internal: whether the size is a number that the tensor's edge must not
        clip."""
        return self.name == WORLD or (self.size is not None and not self.clipped)

    @property
    def is_scaled(self) -> bool:
        """Internal: whether the size is that of its name times or divided by a
        number."""
        return self.times != 1 or self.per is not None

    def __str__(self) -> str:
        terms = [] if self.size is None else [str(self.size)]
        factor = f"{self.times} * " if self.times > 1 else ""
        divisor = "" if self.per is None else f" / ({self.per})"
        terms += [f"{factor}{self.name}{divisor}"] * bool(self.name)
        terms += [] if self.most is None else [f"at most {self.most}"]
        terms += [f"a multiple of {self.multiple}"] * (self.multiple > 1)
        if isinstance(self.begins, Expr) or self.begins != 1:
            is_first = isinstance(self.begins, int) and not self.begins
            place = "0" if is_first else f"a multiple of {self.begins}"
            terms.append(f"from {place}")
        terms += ["the whole axis"] * self.whole
        terms += ["not empty"] * self.not_empty
        terms += ["clipped at the edge"] * self.clipped
        return " ".join(terms) or "any"


@dataclass(frozen=True)
class Operand:
    """The region that a CUDA body supports as one operand.

    size: an extent for each axis: an `Extent`, or short for one: a number (its size),
    a name, or None (any). Without sizes, a region of any shape.
    dtype: the accepted element types; empty: all.
    leading: the tensor may have further axes in front, with one index each.
    contiguous: the region is contiguous in memory.
    like: the operand, by position, whose dtype and sizes the region must have, except
    for axes with one index.
    apart: no region that the task writes shares memory with this one.
    flagged: the tensor is one of `Graph.flagged`.
    mirrors: the operand, by position, of whose region this one is the same place in the
    memory of another rank.
    by_element: the CUDA body accesses single elements, so that rows of the tensor may
    have any number of bytes."""

    size: Sequence[Extent | int | str | None] | None = None
    dtype: str | Sequence[str] = ()
    leading: bool = False
    contiguous: bool = False
    like: int | None = None
    apart: bool = False
    mirrors: int | None = None
    by_element: bool = False
    flagged: bool = False

    def __post_init__(self) -> None:
        dtypes = (self.dtype,) if isinstance(self.dtype, str) else tuple(self.dtype)
        sizes = None if self.size is None else tuple(map(_extent, self.size))
        unknown_dtypes = [d for d in dtypes if d not in DTYPES]
        if unknown_dtypes:
            raise GraphError(
                "an operand is declared with an unknown dtype",
                where="Operand(...)",
                wanted=f"dtypes among {', '.join(DTYPES)}",
                got=", ".join(map(repr, unknown_dtypes)),
                fix="correct dtype=",
            )
        object.__setattr__(self, "dtype", dtypes)
        object.__setattr__(self, "size", sizes)

    @property
    def extents(self) -> tuple[Extent, ...] | None:
        """Internal: `size` as `Extent`s."""
        return cast("tuple[Extent, ...] | None", self.size)

    def __str__(self) -> str:
        sizes = self.extents
        terms = []
        if sizes is not None:
            front = ["one index each"] * self.leading
            terms.append(f"[{', '.join([*front, *map(str, sizes)])}]")
        terms += [" or ".join(self.dtype)] * bool(self.dtype)
        terms += ["contiguous in memory"] * self.contiguous
        if self.like is not None:
            terms.append(f"the dtype and sizes of operand {self.like}")
        terms += ["apart from what the task writes"] * self.apart
        if self.mirrors is not None:
            terms.append(f"the place of operand {self.mirrors} on another rank")
        terms += ["flagged"] * self.flagged
        return ", ".join(terms) or "any region"


def _extent(extent: Extent | int | str | None) -> Extent:
    if isinstance(extent, Extent):
        return extent
    if isinstance(extent, str):
        return Extent(name=extent)
    return Extent(size=extent)
