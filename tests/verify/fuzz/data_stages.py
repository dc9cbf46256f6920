"""Stages of a random program that load from int32 tensors."""

from __future__ import annotations

from dataclasses import replace

from tests.verify.fuzz.maker import Maker
from tests.verify.fuzz.program import Function, Place
from tests.verify.fuzz.stages import signal


def computed(maker: Maker, values: list[list[int]]) -> tuple[str, list[Place]]:
    """A table that tasks write, one or one for each element; what to wait for."""
    inputs, table = maker.table(values), maker.table(values, "local")
    num_tasks, part = 1, ":"
    if maker.random.random() < 0.3:
        num_tasks, part = len(values[0]), "tile(i, 1)"
    event = maker.event("1", str(num_tasks), "1")
    maker.call(
        maker.function(),
        {"i": str(num_tasks)},
        reads=[Place(inputs, (part,))],
        writes=[Place(table, (part,))],
        notifies=[Place(event, ("0", "i"))],
    )
    return table, [Place(event, ("0", str(i))) for i in range(num_tasks)]


def copied(maker: Maker, values: list[list[int]]) -> tuple[str, list[Place]]:
    """A table of the caller, or one that a task writes."""
    if maker.random.random() < 0.4:
        return maker.table(values), []
    return computed(maker, values)


def bins(maker: Maker) -> None:
    """Rows are packed by bin; a bin is read as soon as its rows are there."""
    random = maker.random
    rows, bins = random.choice((1, 2, 3, 4)), random.choice((1, 2, 3))
    keys = maker.per_rank(lambda: [random.randrange(bins) for _ in range(rows)])
    counts = [[key.count(b) for b in range(bins)] for key in keys]
    starts = [[sum(c[:b]) for b in range(bins)] for c in counts]
    places = []
    for key, start in zip(keys, starts, strict=True):
        free = list(start)
        places.append([])
        for b in key:
            places[-1].append(free[b])
            free[b] += 1
    tables = [copied(maker, v) for v in (keys, counts, starts, places)]
    (key, _), (count, _), (start, _), (place, _) = tables
    count_waits = [wait for _, waits in tables for wait in waits]
    x = maker.tensor("input", str(rows), "2")
    packed = maker.tensor("local", str(rows), "2")
    out = maker.tensor("output", str(bins), "2")
    filled = maker.event(str(bins), "1", f"{count}.load(e0)")
    function = maker.function()
    maker.call(
        function,
        {"r": str(rows)},
        reads=[Place(x, ("r", ":"))],
        writes=[Place(packed, (f"{place}.load(r)", ":"))],
        waits=count_waits,
        notifies=[Place(filled, (f"{key}.load(r)", "0"))],
    )
    maker.call(
        replace(maker.function(), equal=False),
        {"b": str(bins)},
        reads=[Place(packed, (f"span({start}.load(b), {count}.load(b))", ":"))],
        writes=[Place(out, ("b", ":"))],
        waits=[*count_waits, Place(filled, ("b", "0"))],
    )


def pick(maker: Maker) -> None:
    """A region from a table that is shorter than the grid."""
    random, source = maker.random, maker.source()
    tasks = random.choice((2, 3))
    short = random.choice((1, tasks - 1, tasks))
    most = max(source.columns - 1, 0)
    values = maker.per_rank(lambda: [random.randint(0, most) for _ in range(short)])
    table, waits = copied(maker, values)
    at = "i"
    if random.random() < 0.4:
        steps = maker.per_rank(lambda: [random.randrange(short) for _ in range(short)])
        index, count_waits = copied(maker, steps)
        waits, at = [*waits, *count_waits], f"{index}.load(i)"
    waits = [*waits, *maker.waits_for_all(source)]
    out = maker.tensor("output", str(tasks), "1")
    start = f"select(i < {short}, {table}.load({at}), 0)"
    maker.call(
        maker.function(),
        {"i": str(tasks)},
        reads=[Place(source.tensor, (source.rows[0][0], f"span({start}, 1)"))],
        writes=[Place(out, ("i", ":"))],
        waits=waits,
    )


def limited(maker: Maker) -> None:
    """A grid with a loaded extent, alone or in a loop, and what waits for it."""
    random = maker.random
    bound, columns = random.choice((1, 2, 3)), random.choice((1, 1, 2, 0))
    turns = random.choice((0, 0, 1, 2))
    counts = maker.per_rank(
        lambda: [random.randint(-1, bound + 1) for _ in range(max(turns, 1))]
    )
    loop = maker.loop_name()
    loops = ((loop, str(turns)),) if turns else ()
    turn = loop if turns else "0"
    if random.random() < 0.3:
        table, count_waits = maker.table(counts), []
    else:
        table, count_waits = computed(maker, counts)
    n = f"minimum(maximum({table}.load(e0), 0), {bound}) * {columns}"
    n = n if columns else "0"
    end_event = maker.event(str(max(turns, 1)), "1", n)
    step = maker.event(f"{max(turns, 1)} * {bound}", str(columns), "1")
    y = maker.tensor("state", str(max(turns, 1) * bound), str(columns))
    axes = {"i": str(bound), "j": str(columns)}
    place = Place(y, (f"{turn} * {bound} + i", "tile(j, 1)"))
    function = replace(maker.function(transfer=False), equal=False)
    has_step = random.random() < 0.5
    notifies = [Place(end_event, (turn, "0"))]
    if has_step:
        notifies.append(Place(step, (f"{turn} * {bound} + i", "j")))
    count = f"{table}.load({turn})"
    maker.call(
        function,
        axes,
        writes=[place],
        waits=count_waits,
        notifies=notifies,
        limited="i",
        count=count,
        loops=loops,
        even=random.random() < 0.2,
    )
    if has_step:
        maker.call(
            function,
            axes,
            reads=[place],
            writes=[place],
            waits=[*count_waits, Place(step, (f"{turn} * {bound} + i", "j"))],
            limited="i",
            count=count,
            loops=loops,
        )
    out = maker.tensor("output", str(max(turns, 1)), "1")
    maker.call(
        replace(maker.function(), equal=False),
        {"k": str(max(turns, 1))},
        writes=[Place(out, ("k", ":"))],
        waits=[
            *(count_waits if random.random() < 0.85 else ()),
            Place(end_event, ("k", "0")),
        ],
    )


def stream(maker: Maker) -> None:
    """Streams an input, at an index that is known after the first wait."""
    random = maker.random
    tasks = random.choice((1, 2, 3))
    values = maker.per_rank(lambda: [random.randrange(2) for _ in range(tasks)])
    table, count_waits = copied(maker, values)
    waits = [*(count_waits or [signal(maker)]), signal(maker)]
    weights = maker.tensor("input", "2", "2")
    out = maker.tensor("output", str(tasks), "2")
    maker.call(
        Function(roles=True, streams=(0,)),
        {"i": str(tasks)},
        reads=[Place(weights, (f"{table}.load(i)", ":"))],
        writes=[Place(out, ("i", ":"))],
        waits=waits if random.random() < 0.8 else waits[::-1],
        streams_after=1,
    )
