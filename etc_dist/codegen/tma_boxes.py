"""The tensor maps of the bulk copies of a call's operands."""

from __future__ import annotations

from etc_dist.codegen.layout import Arguments
from etc_dist.errors import CodegenError
from etc_dist.ir.call import Call
from etc_dist.ir.expr import Const


def bulk_maps(call: Call, n: int, arguments: Arguments) -> list[str]:
    """The names of the maps that copy operand n, the large one second, if any do.
    Raises CodegenError for a region that is not a part of a matrix, or of one of a
    stack."""
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
    return [arguments.map_of(region.tensor, b) for b in box.small_and_large]
