"""Check that calls fit the tiles that their device functions declare.

Regions are symbolic: a requirement must be provable for all dims, else it is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import lcm

from etc_dist.codegen.ranges import alternatives, is_multiple
from etc_dist.errors import CodegenError
from etc_dist.ir.call import RANK, Call
from etc_dist.ir.expr import Const, Expr, Symbol, op, substitute
from etc_dist.ir.graph import GraphFunction
from etc_dist.ir.interval import interval
from etc_dist.ir.operand import WORLD, Extent, Operand
from etc_dist.ir.tensor import Region, Tensor

ONE = Const(1)


@dataclass(frozen=True)
class Axis:
    """A region along one axis: its first index, its size, the tensor's extent.
    `is_kept`: the axis was not indexed by one number."""

    is_kept: bool
    start: Expr
    size: Expr
    extent: Expr

    @property
    def is_one(self) -> bool:
        """Whether the region has one index along the axis."""
        return self.size == ONE

    @property
    def is_whole(self) -> bool:
        """Whether the region covers the axis."""
        return self.start == Const(0) and self.size == self.extent

    @property
    def reaches_end(self) -> bool:
        """Whether the region ends where the axis ends."""
        end = op("+", self.start, self.size)
        return end == self.extent or self.size == op("-", self.extent, self.start)


def row_multiples(graph: GraphFunction) -> dict[Tensor, int]:
    """Tensors whose rows CUDA bodies access in units of several elements, with the
    number that the row length must be a multiple of; to be checked at given dims."""
    unit_by_tensor: dict[Tensor, int] = {}
    for call in graph.calls:
        regions = (*call.reads, *call.writes)
        for n, operand in call.function.tile.items():
            unit = operand.extents[-1].begins if operand.extents else 1
            if isinstance(unit, int) and unit > 1:
                tensor = regions[n].tensor
                unit_by_tensor[tensor] = lcm(unit, unit_by_tensor.get(tensor, 1))
    return unit_by_tensor


def tile_errors(graph: GraphFunction) -> Iterator[CodegenError]:
    """An error for each call with regions that its CUDA body does not support."""
    derived: dict[str, Expr] = {}
    for symbol, value in graph.derived:
        derived[symbol.name] = substitute(value, derived)
    for call in graph.calls:
        regions = (*call.reads, *call.writes)
        axes = [_axes(region, derived) for region in regions]
        names = {**_names(call, axes), WORLD: Const(graph.world_size)}
        for n, operand in call.function.tile.items():
            faults = list(_faults(operand, n, regions, axes, names))
            if faults:
                yield _refused(call, n, regions[n], operand, faults)
                break


def _names(call: Call, axes: list[list[Axis]]) -> dict[str, Expr]:
    """The sizes of extents by name: of each, the first one."""
    names: dict[str, Expr] = {}
    for n, operand in call.function.tile.items():
        extents = operand.extents or ()
        front = max(len(axes[n]) - len(extents), 0)
        for extent, axis in zip(extents, axes[n][front:], strict=False):
            if not extent.is_scaled:
                names.setdefault(extent.name, axis.size)
    return names


def _axes(region: Region, derived: Mapping[str, Expr]) -> list[Axis]:
    parts = zip(region.start, region.size, region.tensor.shape, strict=True)
    return [
        Axis(is_kept, *(substitute(e, derived) for e in part))
        for part, is_kept in zip(parts, region.kept_axes, strict=True)
    ]


def _faults(
    operand: Operand,
    n: int,
    regions: tuple[Region, ...],
    axes: list[list[Axis]],
    names: dict[str, Expr],
) -> Iterator[str]:
    dtype = regions[n].tensor.dtype
    if operand.dtype and dtype not in operand.dtype:
        yield dtype
    if operand.contiguous and not _is_contiguous(axes[n]):
        yield "rows that are not provably contiguous"
    if operand.like is not None:
        yield from _unlike(operand.like, n, regions, axes)
    if operand.mirrors is not None:
        yield from _elsewhere(regions[operand.mirrors], regions[n])
    if operand.extents is None:
        return
    front = len(axes[n]) - len(operand.extents)
    if front < 0 or (front and not operand.leading):
        yield f"{len(axes[n])} axes"
        return
    for axis_idx, axis in enumerate(axes[n]):
        if axis_idx >= front:
            extent = operand.extents[axis_idx - front]
            texts = _extent_faults(extent, axis, names)
        else:
            texts = _cut_off(axis) if axis.is_one else iter([f"size {axis.size}"])
        yield from (f"axis {axis_idx}: {text}" for text in texts)


def _is_contiguous(axes: list[Axis]) -> bool:
    axis_iterator = iter(axes)
    for axis in axis_iterator:
        if not axis.is_one:
            break
    return all(axis.is_whole for axis in axis_iterator)


def _unlike(
    like: int, n: int, regions: tuple[Region, ...], axes: list[list[Axis]]
) -> Iterator[str]:
    own_dtype, like_dtype = regions[n].tensor.dtype, regions[like].tensor.dtype
    if own_dtype != like_dtype:
        yield f"{own_dtype}, where operand {like} is {like_dtype}"
    own_sizes, sizes = (
        [str(axis.size) for axis in axes[k] if not axis.is_one] for k in (n, like)
    )
    if own_sizes != sizes:
        yield f"[{', '.join(own_sizes)}], where operand {like} is [{', '.join(sizes)}]"


def _elsewhere(first: Region, second: Region) -> Iterator[str]:
    """The faults of a region that is to be the place of `first` on another rank."""
    same = (first.tensor.name, first.start, first.size)
    if (second.tensor.name, second.start, second.size) != same:
        yield f"{second}, where the other is {first}"
    if first.tensor.kind != "symmetric" or second.rank in (None, RANK):
        yield f"{second}, which is on the own rank"


def _extent_faults(extent: Extent, axis: Axis, names: dict[str, Expr]) -> Iterator[str]:
    most = extent.size if extent.size is not None else extent.most
    is_fitting = not isinstance(most, int) or interval(axis.size, {})[1] <= most
    if extent.size is not None:
        is_fitting = is_fitting and all(
            interval(size, {}) == (extent.size, extent.size)
            or (extent.clipped and replace(axis, size=size).reaches_end)
            for size in alternatives(axis.size)
        )
    expected_size = axis.size
    if extent.name and extent.per is None:
        base, times = names.get(extent.name, ONE), Const(extent.times)
        expected_size = op("*", base, times)
        is_fitting = is_fitting and axis.size in (expected_size, op("*", times, base))
    is_fitting = is_fitting and all(
        is_multiple(size, extent.multiple) or replace(axis, size=size).reaches_end
        for size in alternatives(axis.size)
    )
    if not is_fitting or (extent.whole and not axis.is_whole):
        factor = f"{extent.times} *" if extent.times > 1 else "another"
        relation = f", where {factor} {extent.name} is {expected_size}"
        yield f"size {axis.size}{relation if expected_size != axis.size else ''}"
    elif extent.is_exact:
        yield from _cut_off(axis)
    if extent.not_empty and (axis.start.is_loaded or axis.size.is_loaded):
        yield f"from {axis.start}, which may be empty, as its place is loaded"
    begins = extent.begins if isinstance(extent.begins, int) else 1
    if not is_multiple(axis.start, begins):
        yield f"from {axis.start}"


def _cut_off(axis: Axis) -> Iterator[str]:
    """The faults of a region that its tensor must not clip: at given dims the proof
    finds them, unless places are loaded."""
    surplus = op("-", op("+", axis.start, axis.size), axis.extent)
    if axis.start.is_loaded and axis.is_kept:
        yield f"from {axis.start}, where it may be clipped, as its place is loaded"
    elif isinstance(axis.extent, Symbol) and axis.extent.kind == "own":
        yield f"size {axis.size}, where it may be clipped at {axis.extent}"
    elif interval(surplus, {})[0] > 0:
        yield f"size {axis.size} from {axis.start}, clipped at {axis.extent}"


def _refused(
    call: Call, n: int, region: Region, operand: Operand, faults: list[str]
) -> CodegenError:
    name = call.function.name
    kind = "reads" if n < len(call.reads) else "writes"
    return CodegenError(
        f"call {call.name}: operand {n} does not fit the tile of {name} on a GPU",
        where=f"call {call.name} {kind} {region}",
        wanted=f"operand {n}: {operand}",
        got="; ".join(faults),
        fix=f"use a region of that shape, or another device function than {name}; only "
        "the CPU backend supports other tile sizes",
    )
