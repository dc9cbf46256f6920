"""The smallest program that still shows something."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.verify.fuzz.change import PARTS, edited_call, is_built, with_call
from tests.verify.fuzz.program import Function, Program


def shrink(program: Program, shows: Callable[[Program], bool]) -> Program:
    """`program` with parts left out, as long as it `shows` what it did."""
    for candidate in smaller(program):
        if is_built(candidate) and shows(candidate):
            return shrink(candidate, shows)
    return program


def smaller(program: Program) -> Iterator[Program]:
    """Programs with one part less."""
    for call in program.calls if len(program.calls) > 1 else ():
        yield with_call(program, call)
    yield from smaller_calls(program)
    yield from without_unused(program)
    if program.world > 1 and program.local == program.world:
        world = program.world - 1
        values = {name: ranks[:world] for name, ranks in program.values.items()}
        yield replace(program, world=world, local=world, values=values)
    if program.workers > 1:
        yield replace(program, workers=1)


def smaller_calls(program: Program) -> Iterator[Program]:
    """Programs with one part of a call less."""
    for call in program.calls:
        for verb in PARTS:
            for n in range(len(getattr(call, verb))):
                yield edited_call(program, call, verb, n)
        for k, (name, extent) in enumerate(call.axes):
            if extent not in ("0", "1"):
                axes = (*call.axes[:k], (name, "1"), *call.axes[k + 1 :])
                yield with_call(program, call, replace(call, axes=axes))
        for plain in (
            replace(call, order=()),
            replace(call, queued=True),
            replace(call, even=False),
            replace(call, function=Function()),
            replace(call, loops=()),
        ):
            if plain != call:
                yield with_call(program, call, plain)


def without_unused(program: Program) -> Iterator[Program]:
    """Programs without one tensor, or one event, that no call uses."""
    used_names = {p.name for c in program.calls for v in PARTS for p in getattr(c, v)}
    texts = repr((program.calls, program.events))
    for tensor in program.tensors:
        if tensor.name not in used_names and f"{tensor.name}.load" not in texts:
            tensors = tuple(t for t in program.tensors if t is not tensor)
            values = {n: v for n, v in program.values.items() if n != tensor.name}
            inputs = tuple(n for n in program.given if n != tensor.name)
            yield replace(program, tensors=tensors, values=values, given=inputs)
    for event in program.events:
        if event.name not in used_names:
            events = tuple(e for e in program.events if e is not event)
            yield replace(program, events=events)
