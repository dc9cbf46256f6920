"""Flagged tensors, and the events that they carry: data that have their epoch.

A word has 4 bytes of data and the number of the run in which they were written. One
store brings both, and one load sees both or neither. So the reader of a word polls it,
without a fence, a counter or a second load, as in NCCL's protocol LL.

What a task writes into flagged tensors is its notification of the events that these
carry: nothing else that it does is ordered before the tasks that wait for them."""

from __future__ import annotations

from collections.abc import Sequence

from etc_dist.errors import GraphError
from etc_dist.ir.call import Call
from etc_dist.ir.event import EventRef
from etc_dist.ir.function import TENSOR
from etc_dist.ir.tensor import Tensor


def counted(refs: Sequence[EventRef]) -> tuple[EventRef, ...]:
    """The elements that are counters."""
    return tuple(ref for ref in refs if not ref.events.carried_by)


def carried(refs: Sequence[EventRef]) -> tuple[EventRef, ...]:
    """The elements that flagged tensors carry."""
    return tuple(ref for ref in refs if ref.events.carried_by)


def has_flags(call: Call) -> bool:
    """Whether the call accesses flagged tensors."""
    return any(region.tensor.flagged for region in (*call.reads, *call.writes))


def refuse_carrier(
    where: str, tensor: Tensor | None, tensors: Sequence[Tensor], cross_rank: bool
) -> None:
    """Raise GraphError for events carried by anything but a flagged tensor."""
    if tensor is None or (tensor in tensors and tensor.flagged and cross_rank):
        return
    raise GraphError(
        "events cannot be carried by this tensor",
        where=where,
        wanted="cross_rank=True, and carried_by= a tensor made by g.flagged(...)",
        got=f"cross_rank={cross_rank}, {tensor}",
        fix="declare the tensor by g.flagged(...), or omit carried_by=",
    )


def check_flags(call: Call, where: str) -> None:
    """Raise GraphError for a call that accesses flagged tensors without a function for
    them, or without their events."""
    function, regions = call.function, (*call.reads, *call.writes)
    for n, region in enumerate(regions):
        operand = function.tile.get(n)
        if region.tensor.flagged != (operand is not None and operand.flagged):
            kind = "a flagged tensor" if region.tensor.flagged else "plain memory"
            raise GraphError(
                f"call {call.name} has {kind} as an operand of another kind",
                where=f"{where}: operand {n}, {region}",
                wanted="flagged tensors where the function has Operand(flagged=True), "
                "and only there",
                got=f"{region.tensor}",
                fix="use functions of etc_dist/functions/flags.py for flagged tensors",
            )
    read_names = {r.tensor.name for r in call.reads if r.tensor.flagged}
    written_names = {r.tensor.name for r in call.writes if r.tensor.flagged}
    waited_names = {ref.events.carried_by for ref in carried(call.waits)}
    notified_names = {ref.events.carried_by for ref in carried(call.notifies)}
    is_simple = not any(
        ref.guards or ref.is_loaded for ref in carried((*call.waits, *call.notifies))
    )
    is_simple &= function.lane == TENSOR and not call.is_loaded and not call.loops
    if not (read_names or written_names or waited_names or notified_names):
        return
    if (read_names, written_names) != (waited_names, notified_names) or not is_simple:
        raise GraphError(
            f"call {call.name} does not name the events of its flagged tensors",
            where=where,
            wanted="a wait for events carried by each flagged tensor that it reads, a "
            "notification of those of each that it writes, and no others; without "
            "conditions, loads and loops, on the tensor lane",
            got=f"reads {sorted(read_names)}, waits for events of "
            f"{sorted(waited_names)}; writes {sorted(written_names)}, notifies those "
            f"of {sorted(notified_names)}; {function.lane} lane",
            fix="use g.events(..., carried_by=tensor) in waits= and notifies=",
        )
