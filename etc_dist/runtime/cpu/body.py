"""A task's NumPy body, run on the task's regions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from etc_dist.errors import GraphError
from etc_dist.runtime.cpu.arrays import Array, still_poisoned
from etc_dist.runtime.cpu.task import Access, Task
from etc_dist.world.processes import is_forked
from etc_dist.world.rank_errors import forked


def run_body(task: Task, views: Sequence[Array]) -> None:
    """Run the body on the arrays of its reads and writes. Raises GraphError where it
    returns a value, or leaves elements of an output as they were.

    Outputs are poisoned before the body. An element that still looks poisoned may be a
    result with the same bits. So the body runs again on copies of what it had, with
    zeros in its outputs: a result has the same bits again."""
    reads, writes = views[: len(task.reads)], views[len(task.reads) :]
    for view in reads:
        view.flags.writeable = False
    outputs = [
        (access, view)
        for access, view in zip(task.writes, writes, strict=True)
        if access.tensor.kind == "output"
        and not any(np.may_share_memory(view, read) for read in reads)
    ]
    for _, view in outputs:
        _bits(view).fill(np.iinfo(_bits(view).dtype).max)
    before = _copies(reads, writes) if outputs else []
    _call(task, views)
    if not any(still_poisoned(view).any() for _, view in outputs):
        return
    checked = [(a, view, before[_position(views, view)]) for a, view in outputs]
    for _, _, copy in checked:
        _bits(copy).fill(0)
    _call(task, before)
    for access, view, copy in checked:
        left = np.argwhere(still_poisoned(view) & ~still_poisoned(copy))
        if len(left):
            raise _unwritten(task, access, left)


def _copies(reads: Sequence[Array], writes: Sequence[Array]) -> list[Array]:
    """The operands of another call with the same values: reads that no write changes
    are not copied. Memory that operands share is not shared by their copies."""
    changed = [any(np.may_share_memory(r, w) for w in writes) for r in reads]
    kept = [r.copy() if c else r for r, c in zip(reads, changed, strict=True)]
    return [*kept, *(view.copy() for view in writes)]


def _position(views: Sequence[Array], view: Array) -> int:
    return next(n for n, other in enumerate(views) if other is view)


def _bits(view: Array) -> Array:
    return view.view(np.dtype(f"u{view.itemsize}"))


def _call(task: Task, views: Sequence[Array]) -> None:
    body: Callable[..., object] = task.call.function.body
    named = {name: task.env[name] for name in task.call.function.keywords}
    try:
        # As on GPUs, NaN and infinity pass through without a warning.
        with np.errstate(all="ignore"):
            returned = body(*views, **named)
    except Exception as fault:
        fault.add_note(f"in {task.where}")
        raise
    if is_forked():
        raise forked()  # a child of the body, which has no part in the run
    if returned is not None:
        raise _returned(task, returned)


def _returned(task: Task, returned: object) -> GraphError:
    call = task.call
    return GraphError(
        f"the body of call {call.name} returned a value, which nothing uses",
        where=task.where,
        wanted="None: a body fills the arrays that it writes",
        got=type(returned).__name__,
        fix=f"in {call.function.name}, assign to y[...] instead of returning",
    )


def _unwritten(task: Task, access: Access, left: Array) -> GraphError:
    call, name = task.call, access.tensor.name
    inside = iter(left[0].tolist())
    index = [
        i.start + next(inside) if isinstance(i, slice) else i for i in access.index
    ]
    region, place = call.writes[task.writes.index(access)], ", ".join(map(str, index))
    return GraphError(
        f"the body of call {call.name} leaves elements of an output unwritten",
        where=task.where,
        wanted=f"a value for each element of {region}, independent of its old value",
        got=f"{name}[{place}] is unwritten, the first of {len(left)}",
        fix=f"in {call.function.name}, assign to all of it: y[...] = ...",
    )
