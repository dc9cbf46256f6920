"""A task's NumPy body, run on the task's regions."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

import numpy as np

from etc_dist.errors import GraphError
from etc_dist.runtime.cpu.storage import Array, still_poisoned
from etc_dist.runtime.cpu.task import ArrayAccess, Task
from etc_dist.world.processes import is_forked
from etc_dist.world.rank_errors import forked


def run_body(task: Task, views: Sequence[Array]) -> None:
    """Run the body on the arrays of its reads and writes. Raises GraphError if it
    returns a value, or leaves elements of an output unwritten.

    Outputs are poisoned before the body. A result may have the bits of the poison. If
    there are such elements, the body runs again on copies of its operands, with zeros
    in the outputs: a result has the same bits again."""
    reads, writes = views[: len(task.reads)], views[len(task.reads) :]
    for view in reads:
        view.flags.writeable = False
    num_reads = len(reads)
    outputs = {
        num_reads + n: access
        for n, (access, view) in enumerate(zip(task.writes, writes, strict=True))
        if access.tensor.kind == "output" and not _is_shared(view, reads)
    }
    for n in outputs:
        _bits(views[n]).fill(np.iinfo(_bits(views[n]).dtype).max)
    again = _operands_again(views, num_reads, outputs) if outputs else []
    _call(task, views)
    if not any(still_poisoned(views[n]).any() for n in outputs):
        return
    for n in outputs:
        again[n] = np.zeros_like(views[n])
    _call(task, again)
    for n, access in outputs.items():
        places = np.argwhere(still_poisoned(views[n]) & ~still_poisoned(again[n]))
        if len(places):
            raise _unwritten(task, access, places)


def _operands_again(
    views: Sequence[Array], first: int, outputs: Container[int]
) -> list[Array]:
    """The operands of a second call: copies of the writes (from index `first`) that are
    not in `outputs`, and of the reads that overlap any write."""
    writes = views[first:]
    return [
        view.copy()
        if (n not in outputs if n >= first else _is_shared(view, writes))
        else view
        for n, view in enumerate(views)
    ]


def _is_shared(view: Array, arrays: Sequence[Array]) -> bool:
    return any(np.may_share_memory(view, array) for array in arrays)


def _bits(view: Array) -> Array:
    return view.view(np.dtype(f"u{view.itemsize}"))


def _call(task: Task, views: Sequence[Array]) -> None:
    body: Callable[..., object] = task.call.function.body
    keywords = task.call.keywords(task.env)
    try:
        # As on GPUs, NaN and infinity pass through without a warning.
        with np.errstate(all="ignore"):
            value = body(*views, **keywords)
    except Exception as fault:
        fault.add_note(f"in {task.where}")
        raise
    if is_forked():
        raise forked()  # a child process that the body forked
    if value is not None:
        raise _returned(task, value)


def _returned(task: Task, value: object) -> GraphError:
    call = task.call
    return GraphError(
        f"the body of call {call.name} returned a value, which nothing uses",
        where=task.where,
        wanted="None: a body fills the arrays that it writes",
        got=type(value).__name__,
        fix=f"in {call.function.name}, assign to y[...] instead of returning",
    )


def _unwritten(task: Task, access: ArrayAccess, places: Array) -> GraphError:
    call, name = task.call, access.tensor.name
    inside = iter(places[0].tolist())
    index = [i.start + next(inside) if type(i) is slice else i for i in access.index]
    region, place = call.writes[task.writes.index(access)], ", ".join(map(str, index))
    return GraphError(
        f"the body of call {call.name} leaves elements of an output unwritten",
        where=task.where,
        wanted=f"a value for each element of {region}, independent of its old value",
        got=f"{name}[{place}] is unwritten, the first of {len(places)}",
        fix=f"in {call.function.name}, assign to all of it: y[...] = ...",
    )
