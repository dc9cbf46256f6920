"""Stages of a random program: calls that read what earlier ones have written."""

from __future__ import annotations

from dataclasses import replace

from tests.verify.fuzz.maker import Maker, Source
from tests.verify.fuzz.program import Function, Place

OTHER_HOST = "(rank + {local}) % world"
NEAR = "rank - rank % {local} + (rank + 1) % {local}"


def map_tiles(maker: Maker, kind: str = "", size: int = 0) -> Source:
    """Tiles of a source, or all of it, -> tiles of a new tensor."""
    random, source = maker.random, maker.source()
    is_whole = random.random() < 0.25
    size = size or random.choice((1, 2, 3, 4))
    num_tasks = -(-source.columns // size)
    kind = kind or random.choice(("local", "symmetric"))
    target = maker.tensor(kind, "1", str(source.columns))
    group, expects = maker.grains(num_tasks)
    event = maker.event("1", str(-(-num_tasks // group)), expects)
    if is_whole:
        reads, waits = maker.regions(source, ":"), maker.waits_for_all(source)
    else:
        reads = maker.regions(source, f"tile(i, {size})")
        waits = maker.waits(source, f"i * {size}", size)
    function = maker.function()
    is_plain = function == Function(lane=function.lane)
    if is_plain and random.random() < 0.2:
        function = replace(function, gathers=(0,))
    if is_plain and function.lane == "tensor" and len(waits) and random.random() < 0.3:
        extra = signal(maker)
        waits = [*waits, extra] if random.random() < 0.7 else [extra, *waits]
        function = replace(function, early=(0,))
    maker.call(
        function,
        {"i": str(num_tasks)},
        reads=reads,
        writes=[Place(target, ("0", f"tile(i, {size})"))],
        waits=waits,
        notifies=[Place(event, ("0", f"i // {group}" if group > 1 else "i"))],
        order=maker.order(num_tasks),
        queued=random.random() < 0.85,
    )
    new_source = Source(
        target, (("0", "0"),), source.columns, event, group * size, kind
    )
    maker.sources.append(new_source)
    return new_source


def signal(maker: Maker) -> Place:
    """An element that one task notifies, which does nothing else."""
    event = maker.event("1", "1", "1")
    maker.call(maker.function(), {"one": "1"}, notifies=[Place(event, ("0", "0"))])
    return Place(event, ("0", "0"))


def drain(maker: Maker, source: Source) -> None:
    """An output of a source."""
    size = maker.random.choice((1, 2, 4, 8))
    num_tasks = -(-source.columns // size)
    num_rows = len(source.rows)
    out = maker.tensor("output", str(num_rows), str(source.columns))
    maker.call(
        maker.function(),
        {"i": str(num_tasks)},
        reads=[
            Place(source.tensor, (row, f"tile(i, {size})")) for row, _ in source.rows
        ],
        writes=[Place(out, (str(r), f"tile(i, {size})")) for r in range(num_rows)],
        waits=maker.waits(source, f"i * {size}", size),
        queued=maker.random.random() < 0.8,
        order=maker.order(num_tasks),
    )


def exchange(maker: Maker) -> None:
    """Each rank sends a source to all ranks, to the next one, or to a partner."""
    random, size = maker.random, maker.random.choice((1, 2, 3, 4))
    is_far = maker.local < maker.world and random.random() < 0.8
    if is_far:
        local_source = map_tiles(maker, "symmetric", size)
        source = replace(local_source, rows=local_source.rows[:1])
    else:
        source = maker.source()
        source = replace(source, rows=source.rows[:1])
    num_tasks = -(-source.columns // size)
    group, expects = maker.grains(num_tasks)
    columns = str(-(-num_tasks // group))
    element = f"i // {group}" if group > 1 else "i"
    is_to_all = random.random() < 0.5 and maker.local == maker.world
    axes, rank = {"i": str(num_tasks)}, NEAR.format(local=maker.local)
    if is_far:
        rank = OTHER_HOST.format(local=maker.local)
    row = "0"
    rows = maker.world if is_to_all else 1
    if is_to_all:
        axes = dict(random.sample([("d", "world"), ("i", str(num_tasks))], 2))
        rank, row = "d", "rank"
        if random.random() < 0.3:
            rank = "(rank + d) % world"
    there = maker.tensor("symmetric", str(rows), str(source.columns))
    event = maker.event(str(rows), columns, expects, cross=True)
    function = maker.function()
    if is_far:
        function = Function(lane="transfer", far=True, apart=True, equal=True)
    maker.call(
        function,
        axes,
        reads=[Place(source.tensor, (source.rows[0][0], f"tile(i, {size})"))],
        writes=[Place(there, (row, f"tile(i, {size})"), rank)],
        waits=maker.waits(source, f"i * {size}", size),
        notifies=[Place(event, (row, element), rank)],
        queued=random.random() < 0.85,
    )
    if is_far and random.random() < 0.3:
        write_again(maker, source, event, size)
    rows_of_ranks = tuple((str(r), str(r)) for r in range(rows))
    maker.sources.append(
        Source(there, rows_of_ranks, source.columns, event, group * size, "symmetric")
    )


def write_again(maker: Maker, source: Source, event: str, size: int) -> None:
    """Overwrite what was sent, after an arrival."""
    there = maker.event_of(event)
    waits = [
        Place(event, (r, k))
        for r in map(str, range(int(there.shape[0])))
        for k in map(str, range(int(there.shape[1])))
    ]
    maker.used.add(event)
    maker.call(
        maker.function(),
        {"one": "1"},
        writes=[Place(source.tensor, ("0", f"span(0, {size})"))],
        waits=waits,
    )


def loop(maker: Maker) -> None:
    """Turns that read one row of a buffer and write the other."""
    random = maker.random
    source = maker.source()
    columns, size = source.columns, random.choice((1, 2, 3, 4))
    num_tasks = -(-columns // size)
    turns = random.choice((0, 1, 2, 3))
    loop = maker.loop_name()
    extent = maker.number(turns)
    is_whole = random.random() < 0.5
    kind = random.choice(("local", "symmetric"))
    rank = ""
    if (
        kind == "symmetric"
        and maker.world == maker.local == 2
        and random.random() < 0.6
    ):
        rank = "(rank + 1) % world"
    buffers = random.choice(("2", "2", f"{extent} + 1"))
    x = maker.tensor(kind, buffers, str(columns))
    expects = str(num_tasks) if is_whole else "1"
    ready = maker.event(
        f"{extent} + 1", "1" if is_whole else str(num_tasks), expects, bool(rank)
    )
    element = "0" if is_whole else "i"

    def row(turn: str) -> str:
        return f"({turn}) % 2" if buffers == "2" else turn

    columns_of_task = f"tile(i, {size})"
    read_columns = ":" if is_whole and random.random() < 0.5 else columns_of_task
    maker.call(
        maker.function(),
        {"i": str(num_tasks)},
        reads=maker.regions(source, columns_of_task),
        writes=[Place(x, ("0", columns_of_task), rank)],
        waits=maker.waits(source, f"i * {size}", size),
        notifies=[Place(ready, ("0", element), rank)],
    )
    inner: list[tuple[Function, list[Place], list[Place], list[Place], list[Place]]]
    begin = [Place(ready, (loop, element))]
    end = [Place(ready, (f"{loop} + 1", element), rank)]
    reads = [Place(x, (row(loop), read_columns))]
    writes = [Place(x, (row(f"{loop} + 1"), columns_of_task), rank)]
    if random.random() < 0.5:
        inner = [(maker.function(), reads, writes, begin, end)]
    else:
        z = maker.tensor("local", "1", str(columns))
        half = maker.event(extent, "1" if is_whole else str(num_tasks), expects)
        middle = [Place(half, (loop, element))]
        through = [Place(z, ("0", columns_of_task))]
        inner = [
            (maker.function(), reads, through, begin, middle),
            (maker.function(), through, writes, middle, end),
        ]
    for function, reads, writes, waits, notifies in inner:
        maker.call(
            function,
            {"i": str(num_tasks)},
            reads=reads,
            writes=writes,
            waits=waits,
            notifies=notifies,
            loops=((loop, extent),),
            order=maker.order(num_tasks),
        )
    grain = 0 if is_whole else size
    maker.sources.append(
        Source(x, ((row(extent), extent),), columns, ready, grain, kind)
    )


def update(maker: Maker) -> None:
    """A state that two calls update in place, in an order by events."""
    random = maker.random
    columns, size = random.choice((2, 4, 5)), random.choice((1, 2))
    num_tasks = -(-columns // size)
    state = maker.tensor("state", "1", maker.number(columns))
    is_whole = random.random() < 0.4
    if is_whole:
        event = maker.event("1", "1", str(num_tasks))
    else:
        event = maker.event("1", str(num_tasks), "1")
    element = Place(event, ("0", "0" if is_whole else "i"))
    tile = Place(state, ("0", f"tile(i, {size})"))
    function = maker.function()
    maker.call(
        function,
        {"i": str(num_tasks)},
        reads=[tile if random.random() < 0.9 else Place(state, ("0", ":"))],
        writes=[tile],
        notifies=[element],
    )
    maker.call(
        function if random.random() < 0.5 else maker.function(),
        {"i": str(num_tasks)},
        reads=[tile],
        writes=[tile],
        waits=[element],
        queued=random.random() < 0.8,
    )


def leave(maker: Maker) -> None:
    """Tasks send what no task reads to the next rank, and notify it and their own."""
    tasks = maker.random.choice((1, 2))
    there = maker.tensor("symmetric", "world", str(tasks))
    peer_event = maker.event("1", str(tasks), "1", cross=True)
    own_event = maker.event("1", str(tasks), "1")
    rank = NEAR.format(local=maker.local)
    maker.call(
        maker.function(),
        {"i": str(tasks)},
        writes=[Place(there, ("rank", "tile(i, 1)"), rank)],
        notifies=[Place(peer_event, ("0", "i"), rank), Place(own_event, ("0", "i"))],
    )
    for event in (peer_event, own_event):
        maker.call(
            maker.function(), {"i": str(tasks)}, waits=[Place(event, ("0", "i"))]
        )


def overwrite(maker: Maker) -> None:
    """A buffer that is written, read, and written again after that."""
    source = map_tiles(maker, "local")
    read = map_tiles(maker)
    if read.columns != source.columns or not read.event:
        return
    size = read.grain
    tasks = -(-source.columns // size) if size else 0
    event = maker.event("1", str(tasks), "1")
    maker.call(
        maker.function(),
        {"i": str(tasks)},
        writes=[Place(source.tensor, ("0", f"tile(i, {size})"))],
        waits=maker.waits(read, f"i * {size}", size),
        notifies=[Place(event, ("0", "i"))],
    )
    maker.used.discard(read.event)
    again = Source(source.tensor, (("0", "0"),), source.columns, event, size, "local")
    maker.sources.append(again)


def gather(maker: Maker) -> None:
    """Turns that write a row of a cache, and read from all of it."""
    random = maker.random
    columns, size = random.choice((2, 3, 4)), random.choice((1, 2, 4))
    num_tasks, turns = -(-columns // size), random.choice((1, 2, 3))
    loop = maker.loop_name()
    cache = maker.tensor("local", str(turns), str(columns))
    out = maker.tensor("output", str(turns), str(columns))
    write_event = maker.event(str(turns), str(num_tasks), "1")
    end_event = maker.event(f"{turns} + 1", str(num_tasks), "1")
    tile = f"tile(i, {size})"
    axes = {"i": str(num_tasks)}
    maker.call(maker.function(), axes, notifies=[Place(end_event, ("0", "i"))])
    maker.call(
        maker.function(),
        axes,
        writes=[Place(cache, (loop, tile))],
        waits=[Place(end_event, (loop, "i"))],
        notifies=[Place(write_event, (loop, "i"))],
        loops=((loop, str(turns)),),
    )
    lane = random.choice(("tensor", "tensor", "transfer"))
    reads = [Place(cache, (":", tile))]
    if random.random() < 0.2:
        row = random.choice((loop, f"minimum({loop} + 1, {turns - 1})"))
        reads.append(Place(cache, (row, tile)))
    maker.call(
        Function(lane=lane, gathers=(0,)),
        axes,
        reads=reads,
        writes=[Place(out, (loop, tile))],
        waits=[Place(write_event, (loop, "i"))],
        notifies=[Place(end_event, (f"{loop} + 1", "i"))],
        loops=((loop, str(turns)),),
    )
    maker.call(maker.function(), axes, waits=[Place(end_event, (str(turns), "i"))])


def nested(maker: Maker) -> None:
    """Two loops, of which each turn adds to the same tiles of a state."""
    random = maker.random
    outer, inner = maker.loop_name(), maker.loop_name("m")
    turns, times = random.choice((0, 1, 2)), random.choice((1, 2))
    columns, size = random.choice((1, 2, 4)), random.choice((1, 2))
    num_tasks = -(-columns // size)
    state = maker.tensor("state", "1", maker.number(columns))
    total = turns * times
    at = f"{outer} * {times} + {inner}"
    ready = maker.event(f"{max(total - 1, 0)}", str(num_tasks), "1")
    tile = Place(state, ("0", f"tile(i, {size})"))
    maker.call(
        maker.function(),
        {"i": str(num_tasks)},
        reads=[tile],
        writes=[tile],
        waits=[Place(ready, (f"{at} - 1", "i"), when=f"{at} > 0")],
        notifies=[Place(ready, (at, "i"), when=f"{at} < {total - 1}")],
        loops=((outer, str(turns)), (inner, str(times))),
        order=maker.order(num_tasks),
    )


def chain(maker: Maker) -> None:
    """Tasks that add to one element, each after the one before; or of two ranks."""
    random, tasks = maker.random, maker.random.choice((1, 2, 3))
    is_passed = maker.world == maker.local > 1 and random.random() < 0.5
    if not is_passed:
        state = maker.tensor("state", "1", "1")
        ready = maker.event("1", str(tasks), "1")
        maker.call(
            maker.function(),
            {"i": str(tasks)},
            reads=[Place(state, ("0", ":"))],
            writes=[Place(state, ("0", ":"))],
            waits=[Place(ready, ("0", "i - 1"), when="i > 0")],
            notifies=[Place(ready, ("0", "i"), when=f"i + 1 < {tasks}")],
            order=maker.order(tasks),
            queued=random.random() < 0.7,
        )
        return
    passed = maker.tensor("symmetric", "world", str(tasks))
    here = maker.event("1", str(tasks), "1", cross=True)
    out = maker.tensor("output", "1", str(tasks))
    last = "world - 1"
    maker.call(
        maker.function(),
        {"i": str(tasks)},
        writes=[Place(passed, ("rank", "tile(i, 1)"), f"minimum(rank + 1, {last})")],
        waits=[Place(here, ("0", "i"), when="rank > 0")],
        notifies=[Place(here, ("0", "i"), "rank + 1", when=f"rank < {last}")],
        queued=random.random() < 0.7,
    )
    maker.call(
        maker.function(),
        {"i": str(tasks)},
        reads=[Place(passed, ("maximum(rank - 1, 0)", "tile(i, 1)"))],
        writes=[Place(out, ("0", "tile(i, 1)"))],
        waits=[Place(here, ("0", "i"), when="rank")],
    )
