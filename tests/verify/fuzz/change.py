"""Random changes of a program, most of which make it wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

from etc_dist.errors import EtcDistError
from etc_dist.ir.dims import checked_dims
from tests.verify.fuzz.program import Call, Function, Place, Program, build

ATTEMPTS = 8


def change(program: Program, random: Random) -> Program:
    """`program` with one change that the language allows."""
    for _ in range(ATTEMPTS):
        candidate = random.choice(CHANGES)(program, random)
        if candidate is not None and is_built(candidate):
            return candidate
    return program


def is_built(program: Program) -> bool:
    """Whether the language takes the program, at its dims."""
    try:
        checked_dims(build(program), program.dims)
    except (EtcDistError, NameError):
        return False
    return True


Change = Callable[[Program, Random], Program | None]
PARTS = ("reads", "writes", "waits", "notifies")


def with_call(program: Program, old: Call, *new: Call) -> Program:
    calls = [c for call in program.calls for c in (new if call is old else (call,))]
    return replace(program, calls=tuple(calls))


def _some(
    random: Random, program: Program, *verbs: str
) -> tuple[Call, str, int] | None:
    """A call, and one of its places."""
    every = [
        (call, verb, n)
        for call in program.calls
        for verb in verbs
        for n in range(len(getattr(call, verb)))
    ]
    return random.choice(every) if every else None


def edited_call(
    program: Program, call: Call, verb: str, n: int, *new: Place
) -> Program:
    places = getattr(call, verb)
    new_call = replace(call, **{verb: (*places[:n], *new, *places[n + 1 :])})
    return with_call(program, call, new_call)


def drop_reference(program: Program, random: Random) -> Program | None:
    reference = _some(random, program, "waits", "notifies")
    return reference and edited_call(program, *reference)


def repeat_reference(program: Program, random: Random) -> Program | None:
    reference = _some(random, program, "waits", "notifies")
    if reference is None:
        return None
    call, verb, n = reference
    place = getattr(call, verb)[n]
    return edited_call(program, *reference, place, place)


def drop_event(program: Program, random: Random) -> Program | None:
    """Drop all waits and notifications of an event tensor."""
    if not program.events:
        return None
    name = random.choice(program.events).name

    def rest(places: tuple[Place, ...]) -> tuple[Place, ...]:
        return tuple(place for place in places if place.name != name)

    calls = [
        replace(call, waits=rest(call.waits), notifies=rest(call.notifies))
        for call in program.calls
    ]
    return replace(program, calls=tuple(calls))


def edit_index(program: Program, random: Random) -> Program | None:
    reference = _some(random, program, *PARTS)
    if reference is None:
        return None
    call, verb, n = reference
    place = getattr(call, verb)[n]
    k = random.randrange(len(place.index))
    names = [name for name, _ in (*call.loops, *call.axes)]
    index = [*place.index]
    index[k] = edited(index[k], names, random)
    return edited_call(program, *reference, replace(place, index=tuple(index)))


def edited(text: str, names: list[str], random: Random) -> str:
    """Another expression in place of an index."""
    if text == ":":
        return random.choice(("span(0, 1)", "span(1, 4)", "tile(0, 2)", "0"))
    for function in ("tile", "span"):
        if text.startswith(f"{function}("):
            first, _, size = text[len(function) + 1 : -1].rpartition(", ")
            choice = random.random()
            if choice < 0.4:
                return f"{function}({edited(first, names, random)}, {size})"
            if choice < 0.9:
                return f"{function}({first}, {size} {random.choice('+-')} 1)"
            return ":"
    choices = [
        f"{text} + 1",
        f"{text} - 1",
        "0",
        "1",
        f"({text}) // 2",
        f"({text}) % 2",
    ]
    choices += [*names, "rank", f"maximum({text} - 1, 0)"]
    return random.choice(choices)


def edit_rank(program: Program, random: Random) -> Program | None:
    places = _some(random, program, "writes", "notifies")
    if places is None:
        return None
    call, verb, n = places
    place = getattr(call, verb)[n]
    names = [name for name, _ in (*call.loops, *call.axes)]
    choices = ["rank", "0", "1", "(rank + 1) % world", "world - 1 - rank", *names]
    return edited_call(program, *places, replace(place, rank=random.choice(choices)))


def edit_ranks(program: Program, random: Random) -> Program | None:
    """Another rank in all places of a call that name one."""
    calls = [c for c in program.calls if any(p.rank for p in (*c.writes, *c.notifies))]
    if not calls:
        return None
    call = random.choice(calls)
    rank = random.choice(("rank", "0", "(rank + 1) % world", "world - 1 - rank"))

    def moved(places: tuple[Place, ...]) -> tuple[Place, ...]:
        return tuple(replace(p, rank=rank) if p.rank else p for p in places)

    new_call = replace(call, writes=moved(call.writes), notifies=moved(call.notifies))
    return with_call(program, call, new_call)


def edit_expects(program: Program, random: Random) -> Program | None:
    if not program.events:
        return None
    event = random.choice(program.events)
    expects = f"{event.expects} {random.choice('+-')} 1"
    events = [replace(e, expects=expects) if e is event else e for e in program.events]
    return replace(program, events=tuple(events))


def edit_shape(program: Program, random: Random) -> Program | None:
    tensor = random.choice(program.tensors)
    if tensor.dtype == "int32":
        return None
    k = random.randrange(len(tensor.shape))
    shape = [*tensor.shape]
    shape[k] = f"{shape[k]} {random.choice('++-')} 1"
    tensors = [
        replace(t, shape=tuple(shape)) if t is tensor else t for t in program.tensors
    ]
    return replace(program, tensors=tuple(tensors))


def edit_extent(program: Program, random: Random) -> Program | None:
    call = random.choice(program.calls)
    if random.random() < 0.2 and call.loops:
        name, extent = call.loops[0]
        turns = random.choice(("0", f"{extent} + 1"))
        calls = [
            replace(c, loops=((name, turns), *c.loops[1:]))
            if c.loops[:1] == call.loops[:1]
            else c
            for c in program.calls
        ]
        return replace(program, calls=tuple(calls))
    axes = [*call.axes]
    k = random.randrange(len(axes))
    name, extent = axes[k]
    axes[k] = name, random.choice((f"{extent} + 1", "1", "0", "2", f"{extent} - 1"))
    return with_call(program, call, replace(call, axes=tuple(axes)))


def edit_dim(program: Program, random: Random) -> Program | None:
    if not program.dims:
        return None
    name = random.choice([*program.dims])
    return replace(program, dims={**program.dims, name: random.randrange(5)})


def edit_function(program: Program, random: Random) -> Program | None:
    call = random.choice(program.calls)
    old = call.function
    new = random.choice(
        (
            replace(old, lane="tensor"),
            replace(old, lane="transfer"),
            replace(old, roles=not old.roles),
            replace(old, gathers=() if old.gathers else (0,)),
            replace(old, early=() if old.early else (0,)),
            replace(old, equal=not old.equal),
            replace(old, apart=not old.apart),
            Function(),
        )
    )
    if new.lane == "transfer":
        new = replace(new, roles=False, early=())
    return with_call(program, call, replace(call, function=new))


def edit_workers(program: Program, random: Random) -> Program | None:
    return replace(program, workers=random.randint(1, 4))


def move_call(program: Program, random: Random) -> Program | None:
    calls = [*program.calls]
    n = random.randrange(len(calls))
    call = calls.pop(n)
    calls.insert(random.randrange(len(calls) + 1), call)
    return replace(program, calls=tuple(calls))


def drop_call(program: Program, random: Random) -> Program | None:
    if len(program.calls) < 2:
        return None
    return with_call(program, random.choice(program.calls))


def add_wait(program: Program, random: Random) -> Program | None:
    """Wait for what another call notifies or waits for."""
    reference = _some(random, program, "waits", "notifies")
    if reference is None:
        return None
    source, verb, n = reference
    place = replace(getattr(source, verb)[n], rank="", when="")
    call = random.choice(program.calls)
    waits = [*call.waits]
    waits.insert(random.randrange(len(waits) + 1), place)
    return with_call(program, call, replace(call, waits=tuple(waits)))


def edit_condition(program: Program, random: Random) -> Program | None:
    reference = _some(random, program, "waits", "notifies")
    if reference is None:
        return None
    call, verb, n = reference
    place = getattr(call, verb)[n]
    names = [name for name, _ in (*call.loops, *call.axes)] + ["rank"]
    tables = [f"{name}.load(0)" for name in program.values]
    number = random.choice([*names, *names, *names, *tables])
    when = random.choice(
        ("", f"{number} > 0", f"{number} < 1", number, f"{number} < 0", "1")
    )
    return edited_call(program, *reference, replace(place, when=when))


def swap_waits(program: Program, random: Random) -> Program | None:
    calls = [call for call in program.calls if len(call.waits) > 1]
    if not calls:
        return None
    call = random.choice(calls)
    waits = random.sample(call.waits, len(call.waits))
    return with_call(program, call, replace(call, waits=tuple(waits)))


def add_access(program: Program, random: Random) -> Program | None:
    """Read or write what another call accesses."""
    reference = _some(random, program, "reads", "writes")
    if reference is None:
        return None
    source, verb, n = reference
    call = random.choice(program.calls)
    to = random.choice(("reads", "writes"))
    place = getattr(source, verb)[n]
    if to == "reads":
        place = replace(place, rank="")
    return with_call(program, call, replace(call, **{to: (*getattr(call, to), place)}))


def swap_access(program: Program, random: Random) -> Program | None:
    reference = _some(random, program, "reads", "writes")
    tensor = random.choice(program.tensors)
    if reference is None:
        return None
    call, verb, n = reference
    place = getattr(call, verb)[n]
    if len(tensor.shape) != len(place.index):
        return None
    return edited_call(program, *reference, replace(place, name=tensor.name))


def edit_order(program: Program, random: Random) -> Program | None:
    call = random.choice(program.calls)
    if len(call.axes) != 1 or call.limited:
        return None
    extent = call.axes[0][1]
    order = random.choice((f"({extent}) - 1 - t", "t // 2", f"(t + 1) % ({extent})"))
    return with_call(program, call, replace(call, order=(order,)))


def flip(program: Program, random: Random) -> Program | None:
    call = random.choice(program.calls)
    name = random.choice(("queued", "even"))
    return with_call(program, call, replace(call, **{name: not getattr(call, name)}))


def drop_count(program: Program, random: Random) -> Program | None:
    """Let all tasks of a loaded extent exist."""
    calls = [call for call in program.calls if call.limited]
    if not calls:
        return None
    call = random.choice(calls)
    return with_call(program, call, replace(call, limited="", count=""))


def edit_value(program: Program, random: Random) -> Program | None:
    """Another number in all tensors with these values."""
    if not program.values:
        return None
    key = random.choice([*program.values])
    old = program.values[key]
    rank = random.randrange(program.world)
    new = [[*row] for row in old]
    if not new[rank]:
        return None
    new[rank][random.randrange(len(new[rank]))] += random.choice((-1, 1))
    values: dict[str, Any] = {
        name: new if numbers == old else numbers
        for name, numbers in program.values.items()
    }
    return replace(program, values=values)


def hide(program: Program, random: Random) -> Program | None:
    """Give fewer values to the verifier."""
    if not program.given:
        return None
    hidden = random.choice(program.given)
    return replace(program, given=tuple(n for n in program.given if n != hidden))


def into_loop(program: Program, random: Random) -> Program | None:
    """Put a call into the loop of the one before, or out of it."""
    n = random.randrange(len(program.calls))
    call = program.calls[n]
    loops = () if call.loops else program.calls[n - 1].loops if n else ()
    if loops == call.loops:
        loops = ((f"extra{n}", "2"),)
    return with_call(program, call, replace(call, loops=loops))


CHANGES: list[Change] = [
    drop_reference,
    drop_reference,
    repeat_reference,
    drop_event,
    drop_event,
    edit_index,
    edit_index,
    edit_rank,
    edit_ranks,
    edit_expects,
    edit_shape,
    edit_extent,
    edit_extent,
    edit_dim,
    edit_function,
    edit_function,
    edit_workers,
    edit_workers,
    move_call,
    move_call,
    drop_call,
    add_wait,
    edit_condition,
    edit_condition,
    swap_waits,
    add_access,
    add_access,
    swap_access,
    edit_order,
    flip,
    drop_count,
    edit_value,
    edit_value,
    hide,
    into_loop,
]
