"""Where index expressions load from runtime tensors: what loads when, and where none
may."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from etc_dist.errors import GraphError
from etc_dist.ir.expr import Expr, Load

if TYPE_CHECKING:
    from etc_dist.ir.event import EventRef
    from etc_dist.ir.graph import Call, GraphFunction
    from etc_dist.ir.tensor import Tensor

BOUND = (
    "use an upper bound; a task of which nothing is left writes a region of size 0, "
    "span(first.load(i), size.load(i)), and then does nothing but wait and notify"
)


def waiting_loads(call: Call) -> tuple[Load, ...]:
    """What a task of `call` loads to know what else it waits for, once the waits that
    load nothing are met."""
    return _loads(e for w in call.loaded_waits for e in (*w.parts, w.expects))


def working_loads(call: Call) -> tuple[Load, ...]:
    """What a task of `call` loads, once all its waits are met, to know what it touches
    and notifies."""
    regions = (*call.reads, *call.writes)
    touched = [e for region in regions for e in region.parts]
    notified = [e for ref in call.notifies for e in (*ref.parts, *counted(ref))]
    return _loads((*touched, *notified))


def loaded_tensors(graph: GraphFunction) -> tuple[Tensor, ...]:
    """The tensors that index expressions of `graph` load from, in its own order."""
    loads = [*_loads(event.expects for event in graph.events)]
    for call in graph.calls:
        loads += (*waiting_loads(call), *working_loads(call))
    names = {load.tensor for load in loads}
    return tuple(tensor for tensor in graph.tensors if tensor.name in names)


def counted(ref: EventRef) -> tuple[Expr, ...]:
    """The expected count that a task which notifies `ref` may have to know: a dynamic
    schedule asks whether it was the last. That of a cross-rank element is known only to
    those who wait."""
    return () if ref.events.cross_rank else (ref.expects,)


def refuse_loads(what: str, where: str, exprs: Iterable[Expr], fix: str) -> None:
    """Raise GraphError if `exprs`, needed before a program runs, hold loads."""
    loads = _loads(exprs)
    if loads:
        raise GraphError(
            f"{what} depends on a runtime tensor",
            where=where,
            wanted="a number that follows from the dims",
            got=", ".join(map(str, loads)),
            fix=fix,
        )


def _loads(exprs: Iterable[Expr]) -> tuple[Load, ...]:
    """The loads in `exprs`, the inner ones too, each once."""
    return tuple(dict.fromkeys(load for e in exprs for load in e.loads()))
