"""The tensor maps of the bulk copies of a call's operands."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

from etc_dist.codegen.layout import Arguments
from etc_dist.errors import CodegenError
from etc_dist.ir.call import Call
from etc_dist.ir.expr import Const, Expr, Op
from etc_dist.ir.tensor import Region


def bulk_maps(call: Call, n: int, arguments: Arguments) -> list[str]:
    """The names of the maps that copy operand n, the large one second, if any do."""
    box = call.function.boxes.get(n)
    if box is None:
        return []
    region = (*call.reads, *call.writes)[n]
    if len(region.start) < 2 or any(size != Const(1) for size in region.size[:-2]):
        raise CodegenError(
            f"call {call.name}: operand {n} cannot be copied in bulk",
            where=f"call {call.name}: operand {n}",
            wanted="a part of a matrix, or of one matrix of a stack",
            got=f"{region}",
            fix="index all axes but the last two by one number each",
        )
    if box.halves and not _is_other_half(region, call.reads[n + 1 :]):
        raise CodegenError(
            f"call {call.name}: operand {n + 1} is not the other half of {n}",
            where=f"{region} and the next operand",
            wanted=f"in a tensor of 2 * h rows, the rows h after {region}",
            got=f"a tensor of {region.tensor.shape[-2]} rows",
            fix="stack both matrices in one tensor; write the row as h + start",
        )
    return [arguments.map_of(region.tensor, b) for b in box.small_and_large]


def _is_other_half(region: Region, following: Sequence[Region]) -> bool:
    if not following:
        return False
    neighbour = following[0]
    *outer, rows, columns = region.start
    *other_outer, other_rows, other_columns = neighbour.start
    return (
        (region.tensor, region.size) == (neighbour.tensor, neighbour.size)
        and (outer, columns) == (other_outer, other_columns)
        and any(
            other_rows in (half + rows, rows + half)
            for half in _halves(region.tensor.shape[-2])
        )
    )


def _halves(extent: Expr) -> list[Expr]:
    """The halves of `extent`, if its expression shows them."""
    if isinstance(extent, Const):
        return [Const(extent.value // 2)] * (extent.value % 2 == 0)
    if isinstance(extent, Op) and extent.name == "*":
        return [b for a, b in permutations(extent.children()) if a == Const(2)]
    return []
