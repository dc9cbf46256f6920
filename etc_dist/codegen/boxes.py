"""The origins of the bulk copies of a call's operands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations

from etc_dist.codegen.expression import linear, text
from etc_dist.codegen.layout import Arguments
from etc_dist.errors import CodegenError
from etc_dist.ir.call import Call
from etc_dist.ir.expr import Const, Expr, Op
from etc_dist.ir.tensor import Region


def boxes(call: Call, arguments: Arguments, large: bool = False) -> Iterator[str]:
    """The box, or the large box, of each operand as CUDA text; empty if none."""
    for n, region in enumerate((*call.reads, *call.writes)):
        box = call.function.boxes.get(n)
        if box is None or (large and not box.large):
            yield ""
            continue
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
        *stack, y, x = region.start
        z = linear(stack, region.tensor.shape[: len(stack)])
        name = arguments.map_of(region.tensor, box.small_and_large[large])
        yield f"{{&g.{name}, {text(x)}, {text(y)}, {z}}}"


def _is_other_half(region: Region, following: Sequence[Region]) -> bool:
    if not following:
        return False
    other = following[0]
    *outer, rows, columns = region.start
    *other_outer, other_rows, other_columns = other.start
    return (
        (region.tensor, region.size) == (other.tensor, other.size)
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
