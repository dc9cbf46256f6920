"""A task's NumPy body, run on the task's regions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from etc_dist.errors import GraphError
from etc_dist.runtime.cpu.arrays import Array, still_poisoned
from etc_dist.runtime.cpu.task import Access, Task


def run_body(task: Task, views: Sequence[Array]) -> None:
    """Run the body on the arrays of its reads and writes. Raises GraphError where it
    returns a value, or leaves elements of an output as they were.

    Outputs are poisoned before the body. An element that still looks poisoned may be a
    result with the same bits, so the body runs again on zeros: a result stays."""
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
    _call(task, views)
    doubtful = [(a, view, still_poisoned(view)) for a, view in outputs]
    doubtful = [found for found in doubtful if found[2].any()]
    if not doubtful:
        return
    for _, view, _ in doubtful:
        _bits(view).fill(0)
    _call(task, views)
    for access, view, before in doubtful:
        left = np.argwhere(before & ~still_poisoned(view))
        if len(left):
            raise _unwritten(task, access, left)


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
    if returned is not None:
        raise _returned(task, returned)


def _returned(task: Task, returned: object) -> GraphError:
    call = task.call
    return GraphError(
        f"the body of call {call.name} returned a value, which nobody takes",
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
        wanted=f"a value for each element of {region}, whatever was there before",
        got=f"{name}[{place}] is unwritten, the first of {len(left)}",
        fix=f"in {call.function.name}, assign to all of it: y[...] = ...",
    )
