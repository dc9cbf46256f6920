"""Refused graphs."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import pytest

from etc_dist.ir import RANK, DeviceFunction, Graph, Symbol, up_to
from etc_dist.ir.expr import Expr
from tests.refusals import refused

J = Symbol("j", "coordinate")
NAMED = "cannot be used|an ASCII identifier"
OTHERS = "call work uses unknown symbols|wanted: only |got: j to do"


def work(reads: int = 0, writes: int = 0, **fields: Any) -> DeviceFunction:
    lane = fields.pop("lane", "tensor")
    body = fields.pop("body", print)
    return DeviceFunction("work", body, "", lane, reads, writes, **fields)


class Kit(Graph):
    """A graph of two ranks with the dim n, and calls of a function with as many
    operands as are given."""

    def __init__(self) -> None:
        super().__init__("one", 2)
        self.n = self.dims("n")

    @cached_property
    def x(self) -> Any:
        return self.input("x", (4,), "float32")

    @cached_property
    def own_x(self) -> Any:
        """Ranks may have different numbers of rows."""
        rows, _ = self.own_rows("rows", "most")
        return self.input("own", (rows, 4), "float32")

    @cached_property
    def index(self) -> Any:
        return self.input("index", (4,), "int32")

    @cached_property
    def own_index(self) -> Any:
        return self.local("own_index", (4,), "int32")

    @cached_property
    def s(self) -> Any:
        return self.symmetric("s", (4,), "float32")

    @cached_property
    def e(self) -> Any:
        return self.events("e", (4,), expects=1)

    @cached_property
    def c(self) -> Any:
        return self.events("c", (4,), expects=1, cross_rank=True)

    def work(self, fields: Any = (), grid: Any = None, **call: Any) -> Any:
        operands = len(call.get("reads", ())), len(call.get("writes", ()))
        grid = self.grid(i=4) if grid is None else grid
        return self.call(work(*operands, **dict(fields)), grid, **call)

    def valued(self, **values: Any) -> None:
        """A call of a body that takes `rows`."""

        def body(y: Any, *, rows: int) -> None: ...

        y = self.output("y", (4,), "float32")
        self.work({"body": body}, writes=[y[:]], values=values)

    def counted(self, count: Any, more: Any = None, **call: Any) -> None:
        """A call with a loaded extent."""
        self.work(grid=self.grid(i=up_to(4, count), **(more or {})), **call)


def other_graph(g: Kit) -> None:
    graph = Graph("other", 1)
    n = graph.dims("n")
    x, e = graph.input("x", (n + 3,), "float32"), graph.events("e", (n,), expects=1)
    g.work(reads=[g.x[0], x[:]], notifies=[e[0]])


def named_twice(g: Kit) -> None:
    g.work()
    g.work()


def ranked(g: Kit) -> Expr:
    return g.let("far", g.let("near", g.rank + 1) * 2)


def looped(g: Kit, act: Any = None, **loop: Any) -> None:
    with g.loop(**(loop or {"layer": 4})) as layer:
        (act or (lambda layer: g.work()))(layer)


def loop_and_grid(g: Kit) -> None:
    looped(g)
    g.grid(layer=4)
    looped(g)


def entered_twice(g: Kit) -> None:
    loop = g.loop(layer=4)
    for name in ("first", "second"):
        with loop:
            g.work(name=name)


def left_open(g: Kit) -> None:
    g.loop(layer=4).__enter__()
    g.work()
    g.finish()


TAKES = {"body": lambda y, *, rows, j, columns=0: None}
STREAMS = {"roles": ("load", "compute"), "streams": (0,)}
EARLY = {"reads_before_wait": (0,)}
GRAPHS = {
    # Tensors and events
    "only symmetric": (lambda g: g.x.on(RANK + 1), "x.on(rank + 1)|kind 'input'"),
    "load of floats": (lambda g: g.x.load(J, 0), "x.load(j, 0)|got: float32, input"),
    "load of an output": (
        lambda g: g.output("y", (4,), "int32").load(J),
        "got: int32, output",
    ),
    "no index of a load": (
        lambda g: g.own_index.load(),
        "own_index|wanted: 1 indices|got: 0",
    ),
    "two indices of a load": (lambda g: g.own_index.load(0, 0), "got: 2"),
    "two indices": (lambda g: g.x[0, 0], "wrong number of axes|wanted: 1 indices"),
    "two indices far": (lambda g: g.s.on(1)[0, 0], "axes|wanted: 1 indices"),
    "no index of events": (lambda g: g.e[()], "axes|wanted: 1 indices"),
    "two indices of events": (lambda g: g.c.on(1)[0, 0], "axes|wanted: 1 indices"),
    "step": (lambda g: g.x[0:4:2], "got: step 2"),
    "events of this rank": (lambda g: g.e.on(1)[0], "event tensor e is not cross-rank"),
    "dtype": (
        lambda g: g.local("l", (4,), "float64"),
        "tensor l has an unknown dtype|bfloat16, float16, float32, int32, "
        "float8_e4m3fn",
    ),
    # Rows that differ between ranks
    "one row of a rank": (
        lambda g: g.work(reads=[g.own_x[0, :]]),
        "rows that a rank may not have|own[0, :]|got: one index",
    ),
    "all rows of a rank": (
        lambda g: g.work(reads=[g.own_x[:, :]]),
        "own[:, :]|wanted: tile(i, size) or span(start, size) of own|span(0, largest)",
    ),
    "symmetric rows of a rank": (
        lambda g: g.symmetric("s", g.own_x.shape, "float32"),
        "the shape of tensor s uses unknown symbols|got: rows",
    ),
    "columns of a rank": (
        lambda g: g.output("y", (g.n, *g.own_x.shape[:1]), "float32"),
        "the shape of tensor y uses unknown symbols|got: rows",
    ),
    "number of rows of a rank": (
        lambda g: g.let("half", g.own_x.shape[0] // 2),
        "number half uses unknown symbols|got: rows",
    ),
    **{
        f"{kind} of the largest number of rows": (
            lambda g, kind=kind, of=of: getattr(g, kind)("t", (4, of(g)), "float32"),
            "shape of tensor t uses unknown symbols|before all agree on the largest",
        )
        for kind, of in (
            ("input", lambda g: g.own_rows("rows", "most")[1]),
            ("output", lambda g: g.let("all", 2 * g.own_rows("rows", "most")[1])),
        )
    },
    "rows of a rank twice": (
        lambda g: (g.own_x, g.own_rows("others", "all")),
        "wanted: rows alone|got: others, too",
    ),
    # Names
    **{
        f"name {name!r} of a {kind}": (act, NAMED + f"|graph one|got: {name!r}")
        for name in ("s", "rank", "t", "two words", "1st", "_hidden", "", "é")
        for kind, act in {
            "tensor": lambda g, name=name: (g.s, g.output(name, (4,), "float32")),
            "event": lambda g, name=name: (g.s, g.events(name, (4,), expects=1)),
            "number": lambda g, name=name: (g.s, g.let(name, g.n * 2)),
            "call": lambda g, name=name: (g.s, g.work(name=name or "s ")),
        }.items()
        if (name, kind) != ("", "call")
    },
    **{
        f"reserved {name}": (act, "reserved: dims, rank, self, stream, t, workers")
        for name in ("t", "rank", "stream", "self", "dims")
        for act in (
            lambda g, name=name: g.dims(name),
            lambda g, name=name: g.grid(**{name: 4}),
            lambda g, name=name: g.input(name, (4,), "float32"),
        )
    },
    "same call": (named_twice, "the name 'work' cannot be used|name=..."),
    "coordinate and number": (
        lambda g: (g.grid(i=4), g.let("i", g.n + 1)),
        "the name 'i' cannot be used",
    ),
    "coordinate and dim": (lambda g: (g.grid(i=4), g.dims("i")), "the name 'i'"),
    "axis of events": (
        lambda g: (g.dims("d_0"), g.events("d", (4,), expects=lambda i: i)),
        "the name 'd_0'",
    ),
    "constant and dim": (lambda g: (g.let("b", 4), g.dims("b")), "the name 'b'"),
    "constant twice": (lambda g: (g.let("b", 4), g.let("b", 3)), "the name 'b'"),
    # Shapes and numbers
    **{
        f"{name} that depends on {number.__name__}": (
            lambda g, make=make, number=number: make(g, number(g)),
            "depends on the rank|got: " + of_rank,
        )
        for number, of_rank in ((lambda g: g.rank, "rank"), (ranked, "far"))
        for name, make in {
            "local": lambda g, n: g.local("l", (4, n), "float32"),
            "symmetric": lambda g, n: g.symmetric("l", (4, n), "float32"),
            "events": lambda g, n: g.events("l", (4, n), expects=1),
        }.items()
    },
    **{
        f"{name} of a coordinate": (act, "uses unknown symbols|only n, rank|got: j to")
        for name, act in {
            "number": lambda g: g.let("m", J + 1),
            "shape": lambda g: g.local("l", (J,), "float32"),
            "events": lambda g: g.events("l", (J,), expects=1),
        }.items()
    },
    # Operands of a call
    "no axis": (lambda g: g.work(grid=g.grid()), "wanted: at least one axis"),
    "operands": (
        lambda g: g.call(work(1, 1), g.grid(i=1), reads=[g.x[:]] * 2),
        "wanted: 1 reads and 1 writes|got: 2 reads and 0 writes",
    ),
    "region": (lambda g: g.work(writes=[g.s[J]]), OTHERS + "|call work: s[j]"),
    "rank of a region": (
        lambda g: g.work(writes=[g.s.on(J)[:]]),
        OTHERS + "|call work: s.on(j)[:]",
    ),
    "wait": (lambda g: g.work(waits=[g.e[J]]), OTHERS + "|call work: e[j]"),
    "rank of events": (
        lambda g: g.work(notifies=[g.c.on(J)[0]]),
        OTHERS + "|call work: c.on(j)[0]",
    ),
    "order": (lambda g: g.work(order=lambda t: (J,)), OTHERS + "|order j"),
    "pace": (lambda g: g.work(pace=J), OTHERS + "|pace j"),
    "extent": (lambda g: g.work(grid=g.grid(k=J)), OTHERS + "|extent of k"),
    "order of two": (
        lambda g: g.work(order=lambda t: (t, 0)),
        "order= does not return a coordinate of the grid|graph one, call work|(t, 0)",
    ),
    "wait of a peer": (
        lambda g: g.work(waits=[g.c.on(1)[0]]),
        "call work waits on another rank's event|got: c.on(1)[0]",
    ),
    "read of a peer": (
        lambda g: g.work(reads=[g.s.on(1)[:]]),
        "call work reads another rank's memory|write to tensor.on(reader)",
    ),
    "another graph": (other_graph, "of another graph|call work|got: x[:], e[0] to do"),
    "write to an input": (lambda g: g.work(writes=[g.x[:]]), "call work writes an inp"),
    # Values of a body
    "value": (
        lambda g: g.work(TAKES, writes=[g.s[:]], values={"rows": 3}),
        "takes values that the call does not have|graph one, call work|keyword-only "
        "parameters among i, n, rank, rows|got: j to do",
    ),
    "unknown value": (
        lambda g: g.valued(rows=2, row=3),
        "values= of call work has names|wanted: keyword-only parameters: rows|got: row",
    ),
    "sum": (lambda g: g.valued(rows=g.n + 1), "got: n + 1|g.let(name, expression)"),
    "coordinate": (lambda g: g.valued(rows=J), "values= of call work|got: j to do"),
    "other dim": (
        lambda g: g.valued(rows=Symbol("m", "dim")),
        "values= of call work|got: m to do",
    ),
    "large value": (
        lambda g: g.valued(rows=2**31),
        "got: rows=2147483648|wanted: integers of 32 bits",
    ),
    # Reads before waits
    "early without waits": (
        lambda g: g.work(EARLY, reads=[g.x[:]]),
        "got: 0 waits, not loaded",
    ),
    "early loads without waits": (
        lambda g: g.work({"loads_before_wait": True}, reads=[g.x[:]]),
        "got: 0 waits, not loaded",
    ),
    "stream after the only wait": (
        lambda g: g.work(STREAMS, reads=[g.x[:]], waits=[g.e[0]], streams_after=1),
        "got: streams_after=1, 1 waits, 0 of them loaded, streams [0] of kinds ['input",
    ),
    "stream after none": (
        lambda g: g.work(STREAMS, reads=[g.x[:]], waits=[g.e[0]], streams_after=0),
        "got: streams_after=0, 1 waits",
    ),
    # Loops
    "empty loop": (lambda g: looped(g, lambda at: None), "loop layer has no calls"),
    "loop of two": (
        lambda g: looped(g, i=2, j=3),
        "wanted: one argument, as in g.loop(layer=layers)",
    ),
    "grid of a turn": (
        lambda g: looped(g, lambda at: g.work(grid=g.grid(a=at + 1))),
        "call work uses unknown symbols|call work: extent of a|got: layer",
    ),
    "turn outside": (
        lambda g: (
            looped(g),
            g.work(name="after", reads=[g.x[Symbol("layer", "coordinate")]]),
        ),
        "call after uses unknown symbols|got: layer",
    ),
    "loaded turns": (
        lambda g: looped(g, layer=g.index.load(0)),
        "the number of turns of loop layer depends on a runtime tensor",
    ),
    "pace in a loop": (
        lambda g: looped(g, lambda at: g.work(pace=8)),
        "call work in a loop has a pace",
    ),
    "two loops": (lambda g: (looped(g), looped(g)), "the name 'layer' cannot be used"),
    "loop and grid": (loop_and_grid, "the name 'layer' cannot be used"),
    "loop entered twice": (
        entered_twice,
        "loop layer is entered twice|call g.loop() again, with another name",
    ),
    "open loop": (left_open, "loop layer has no end"),
    # Loads where a number is needed before a run
    **{
        f"{what} from a {kind} tensor": (
            lambda g, make=make, name=name: make(g, getattr(g, name).load(0)),
            f"{what} depends on a runtime tensor|got: {name}[0]|{fix}",
        )
        for kind, name in (("caller's", "index"), ("local", "own_index"))
        for what, make, fix in (
            (
                "the shape of tensor z",
                lambda g, n: g.local("z", (n,), "float32"),
                "use an upper bound|size 0",
            ),
            (
                "the shape of event tensor z",
                lambda g, n: g.events("z", (n,), expects=1),
                "use an upper bound",
            ),
            ("the grid of call work", lambda g, n: g.work(grid=g.grid(i=n)), "size 0"),
            (
                "the order of call work",
                lambda g, n: g.work(order=lambda t: ((t + n) % 4,)),
                "use an upper bound",
            ),
            ("the pace of call work", lambda g, n: g.work(pace=n), "upper bound"),
            (
                "the named number many",
                lambda g, n: g.let("many", n + 1),
                "where: graph one|write the load in the index expressions",
            ),
        )
        if (what, kind) != ("the named number many", "caller's")
    },
    # Loaded extents
    **{
        f"loaded extent: {name}": (act, "loaded extent|i: own_index[|at most 4")
        for name, act in {
            "no wait": lambda g: g.counted(g.own_index.load(0)),
            "wait[i]": lambda g: g.counted(
                g.own_index.load(0), waits=[g.e[g.grid(i=4)[0]], g.e[0]]
            ),
            "count[i]": lambda g: g.counted(
                g.own_index.load(g.grid(i=4)[0]), waits=[g.e[0]]
            ),
            "count[count]": lambda g: g.counted(
                g.own_index.load(g.own_index.load(0)), waits=[g.e[0]]
            ),
            "lane": lambda g: g.counted(
                g.own_index.load(0), waits=[g.e[0]], fields={"lane": "transfer"}
            ),
            "two": lambda g: g.counted(
                *(g.own_index.load(0), {"j": up_to(4, g.own_index.load(1))}),
                waits=[g.e[0]],
            ),
            "order": lambda g: g.counted(
                g.own_index.load(0), waits=[g.e[0]], order=lambda t: (3 - t,)
            ),
        }.items()
    },
}


@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_that_cannot_be_correct_is_refused(name):
    act, words = GRAPHS[name]
    refused(lambda: act(Kit()), words)


def test_a_count_of_an_input_needs_no_wait():
    g = Kit()
    call = g.work(grid=g.grid(i=up_to(4, g.index.load(0))))
    assert call.knows_count and not call.waits_for_count


def test_an_error_in_a_loop_is_raised_as_it_is():
    with pytest.raises(ZeroDivisionError), Kit().loop(layer=4):
        raise ZeroDivisionError
