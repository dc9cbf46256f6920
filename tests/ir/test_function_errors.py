"""Refused expressions, device functions and operands, and types that would pass."""

from __future__ import annotations

import pickle
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from etc_dist.codegen import generate
from etc_dist.errors import ArgumentError, GraphError
from etc_dist.ir import (
    RANK,
    DeviceFunction,
    Extent,
    Graph,
    GraphFunction,
    Operand,
    Symbol,
    ceildiv,
    device_function,
    equal,
    graph_function,
    maximum,
    minimum,
    select,
    tile,
)
from etc_dist.ir.expr import MOST_DEPTH, Expr, wrap
from etc_dist.ops.matmul import matmul_graph
from etc_dist.schedule import schedule_static
from etc_dist.verify.verify import verify
from tests.graphs.calls import Task, calls
from tests.graphs.kit import made as of_kit
from tests.graphs.kit import touch
from tests.ir.test_graph_errors import EARLY, Kit, work
from tests.refusals import refused
from tests.runtime.programs import send

J = Symbol("j", "coordinate")
N, M = Symbol("n", "dim"), Symbol("m", "dim")


def copy(x: Any, y: Any) -> None:
    y[...] = x


def renamed(x: Any, y: Any) -> None:
    y = x  # noqa: F841


def made(body: Any = copy, **terms: Any) -> DeviceFunction:
    return device_function(**{"source": "", "reads": 1, "writes": 1, **terms})(body)


LANE = "device function work cannot run on a worker|got: "
MISSING = "device function copy names an operand that does not exist"
CPP = "wanted: ASCII identifiers without a leading underscore|got: "
HOLD = "numbers that its CUDA body cannot hold"
TAKE = "a parameter for each operand|wanted: 2 positional parameters: 1 reads, then 1 w"
FUNCTIONS = {
    "new array": (lambda: made(renamed), "renamed does not write its operand y"),
    "lane": (lambda: work(lane="vector"), LANE + "lane 'vector'"),
    "early": (
        lambda: work(1, lane="transfer", **EARLY),
        "no reads_before_wait= on the transfer lane",
    ),
    "large": (lambda: made(constants={"kEps": 2**31}), HOLD),
    "fp64": (lambda: made(constants={"kEps": 1e39}), HOLD),
    "NaN": (lambda: made(constants={"kEps": float("nan")}), HOLD),
    "one parameter": (lambda: made(lambda x: None), TAKE),
    "three parameters": (lambda: made(lambda x, y, z: None), TAKE),
    "keyword": (lambda: made(lambda x, *, y: None), TAKE),
    "negative": (lambda: made(reads=-1), "a negative number of operands"),
    "gathers": (lambda: made(gathers=(1,)), "gathers= of " + MISSING),
    "reads": (lambda: made(reads_before_wait=(-1,)), "before_wait= of " + MISSING),
    "tile": (lambda: made(tile={2: Operand()}), "tile= of " + MISSING),
    "starts": (
        lambda: replace(work(), starts={"first": (9, 0)}),
        "starts= of device function work names an operand that does not exist",
    ),
    "like": (lambda: made(tile={0: Operand(like=9)}), MISSING),
    "mirrors": (lambda: made(tile={0: Operand(mirrors=9)}), MISSING),
    "words": (lambda: made(constants={"two words": 1}), CPP + "'two words'"),
    "hidden": (lambda: made(constants={"_hidden": 1}), CPP + "'_hidden'"),
    "empty": (lambda: made(constants={"": 1}), CPP + "''"),
    "not ASCII": (lambda: made(constants={"ké": 1}), CPP + "'ké'"),
    "function": (lambda: replace(work(), name="é"), CPP + "'é'"),
    "multiple of none": (
        lambda: made(
            tile={0: Operand(("m", Extent(name="n", times=64))), 1: Operand(("m", 1))}
        ),
        "a multiple or a part of an unknown|got: 64 * n to do",
    ),
    "size 0": (lambda: Operand((0,)), "size is out of range|got: size = 0"),
    "size -1": (lambda: Operand((-1,)), "got: size = -1"),
    "most": (lambda: Extent(most=0), "most is out of range"),
    "multiple": (lambda: Extent(multiple=0), "multiple is out of range"),
    "times": (lambda: Extent(times=0), "times is out of range"),
    "per": (lambda: Extent(per=0), "per is out of range"),
    "name of two words": (lambda: Operand(("two words",)), "not have a name|'two wo"),
    "name of a number": (lambda: Operand((Extent(name="8"),)), "not have a name|'8'"),
    "dtype": (lambda: Operand(dtype="float64"), "unknown dtype|got: 'float64'"),
    "condition": (
        lambda: 4 if J - 4 else 5,
        "no truth value|where: expression j - 4|minimum() and maximum()",
    ),
    **{
        f"comparison {number}": (act, "where: expression rank")
        for number, act in enumerate(
            (
                lambda: RANK == 0,
                lambda: np.int64(0) != RANK,
                lambda: RANK in (0, 1),
                lambda: np.array(0) == RANK,
                lambda: np.arange(2) != RANK,
                lambda: np.array(0) == RANK,
                lambda: np.bool_(True) == RANK,
            )
        )
    },
    "// 0": (lambda: wrap(7) // 0, "where: 7 // 0|got: 0"),
    "% 0": (lambda: wrap(7) % 0, "where: 7 % 0|got: 0"),
    **{
        f"ceildiv {divisor!r}": (
            lambda divisor=divisor: ceildiv(N, divisor),
            "ceildiv has no divisor below 1",
        )
        for divisor in (0, -3, np.int64(-3))
    },
    "no ranks": (lambda: matmul_graph(0), "world_size: an integer from 1 on"),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_expression_or_a_function_is_refused(name):
    refused(*FUNCTIONS[name], (GraphError, ArgumentError))


def comparison_twice() -> None:
    assert 0 <= N < M


def generator(g: Graph) -> Any:
    yield g.grid(i=1)


IS_UNKNOWN = "has no truth value|write select("
TYPES = {
    "float": (lambda: J + 1.5, "expects an int or an expression, got 1.5"),
    "grid": (lambda: tile(Kit().grid(i=4), 2), "expects an int or an expression"),
    "loop": (lambda: Kit().x[Kit().loop(layer=4)], "expects an int or an expression"),
    "shape": (lambda: Kit().local("z", (4, "4"), "int32"), "the shape of tensor z exp"),
    "extent": (lambda: Kit().grid(i=4, j="4"), "extent of j expects an int"),
    "expects": (
        lambda: Kit().events("z", (4,), expects="1"),
        "events z: expects= expects an",
    ),
    "pace": (lambda: Kit().work(pace=1.5), "pace= expects an int"),
    "value": (lambda: Kit().valued(rows="4"), "rows expects an int"),
    "list of events": (lambda: Kit().work(waits=Kit().e), "not iterable"),
    "list of elements": (lambda: Kit().work(waits=Kit().c.on(1)), "not iterable"),
    "list of tensors": (lambda: Kit().call(work(), (J,), reads=Kit().x), ""),
    "comparison": (lambda: wrap(N < 3), "expects an int or an expression"),
    "sum": (lambda: (N < 3) + 1, "unsupported operand"),
    "chain": (comparison_twice, "comparison 0 <= n has no truth value"),
    "max": (lambda: max(N, M), "minimum() and maximum()"),
    **{
        f"truth of {condition}": (lambda c=condition: bool(c), IS_UNKNOWN)
        for condition in (N < 3, N > 3, N <= M, N > M, N >= 0, equal(N, 3))
    },
    **{
        f"equals {value!r}": (lambda value=value: (N < 3) == value, "comparison n < 3")
        for value in (True, 1, np.bool_(True), np.array(True))
    },
    **{
        f"select {condition!r}": (
            lambda c=condition: select(c, N, M),
            "expects a comparison|equal(a, b)",
        )
        for condition in (True, N == M, N, 1)
    },
    "size": (lambda: Operand((1.5,)), "size expects an int"),
    "size True": (lambda: Operand((True,)), "size expects an int, got bool"),
    "most": (lambda: Extent(most=1.5), "most expects an int"),
    "ranks": (lambda: matmul_graph(2.5), "world_size expects an int"),
    "no ranks": (lambda: matmul_graph(None), "world_size expects an int"),
    "generator": (
        lambda: graph_function(generator),
        "generator would not run|omit yield",
    ),
    "pickle": (lambda: pickle.dumps(made()), "device function copy cannot be pickled"),
}


@pytest.mark.parametrize("name", TYPES)
def test_a_type_that_would_pass_is_refused(name):
    act, words = TYPES[name]
    refused(act, words, (TypeError, AttributeError))


def test_what_is_close_to_a_refusal_is_taken():
    g = Kit()
    g.valued(rows=g.n)
    Kit().valued(rows=3)
    Kit().valued(rows=-(2**31))
    for fits in (lambda *operands: None, lambda x, y, z=0, *, i: None):
        made(fits)
    assert made(gathers=range(1)).gathers == (0,)
    for source in ("", "functions/not_yet.cuh", "/nowhere/copy.cuh"):
        assert made(source=source).source == source
    function = made()
    assert deepcopy(function) is function
    assert (N < 3) == (N < 3) and len({N < 3, N < 2, N <= 3, M < 3, N < 3}) == 4
    takes = {"body": lambda y, *, rows, j, columns=0: None}
    g.work(takes, g.grid(j=1), name="right", writes=[g.s[:]], values={"rows": 3})


PLACES = ["let", "shape", "expects", "grid", "region", "load", "event", "order"]


def deep(depth: int, place: str) -> GraphFunction:
    """A graph whose expression at one place has `depth` nested operations."""

    def act(g: Graph) -> None:
        def nested(value: Expr, at: str) -> Expr:
            for k in range(depth if at == place else 0):
                value = minimum(value, m) if k % 2 else maximum(value, 0)
            return value

        n, m = g.dims("n m")
        count = g.let("count", nested(n, "let"))
        x, at = g.input("x", (n,), "float32"), g.input("at", (m,), "int32")
        y = g.output("y", (nested(n, "shape"),), "float32")
        ready = g.events("ready", (n,), expects=lambda e: nested(e, "expects"))
        (i,) = grid = g.grid(i=nested(count, "grid"))
        g.call(
            touch(1, 1),
            grid,
            reads=[x[tile(nested(i, "region"), 1)]],
            writes=[y[at.load(nested(i, "load"))]],
            waits=[ready[nested(i, "event")]],
            order=lambda t: (nested(t, "order"),),
        )

    return of_kit(act)


@pytest.mark.parametrize("place", PLACES)
def test_more_nested_operations_than_are_allowed_are_refused(place):
    assert generate(schedule_static(deep(MOST_DEPTH - 1, place))).text
    words = f"too many nested operations|wanted: at most {MOST_DEPTH}|got: 1000"
    refused(lambda: deep(1000, place), words)


SIZES = {
    "let": "the number k of g.let",
    "tensor": "the shape of z",
    "events": "the shape of done",
    "grid": "the extent i of call make",
    "loop": "the extent turn of call use",
}


def divided(at: str) -> GraphFunction:
    """A quotient of dims in one place, and n elsewhere."""
    size = {name: "n // m" if name == at else "n" for name in SIZES}
    parts = f"""
        let k = {size["let"]}
        local z [{size["tensor"]}, 4] float32
        events done [{size["events"]}] expects 1
    """
    of_maker = {"grid": f"i: {size['grid']}", "notifies": ["done[i]"]}
    of_user = {"loop": f"turn: {size['loop']}", "waits": ["done[turn]"]}
    tasks = [
        Task(send, ["x n[i] 4 float32"], ["z[i, :]"], name="make", **of_maker),
        Task(send, ["z[turn, :]"], ["y n[turn] 4 float32"], name="use", **of_user),
    ]
    return calls(1, tasks=tasks, dims="n m", parts=parts)


@pytest.mark.parametrize("at", SIZES)
def test_a_size_that_divides_by_zero_is_named(at):
    plan = schedule_static(divided(at))
    verify(plan, {"n": 3, "m": 1}, 2)
    words = f"{SIZES[at]} cannot be computed at these dims|where: graph calls, n=3, m"
    for act in (
        lambda: verify(plan, {"n": 3, "m": 0}, 2),
        lambda: plan.show(workers=2, n=3, m=0),
    ):
        refused(act, words + "=0|got: n // m: ", ArgumentError)


def test_hosts_of_unequal_ranks_are_refused():
    def of_hosts(size: Any) -> GraphFunction:
        return matmul_graph(4, local_size=size)

    assert of_hosts(2).local_size == 2
    refused(lambda: of_hosts(3), "different numbers of ranks|a divisor of 4|got: 3")
    refused(lambda: of_hosts(8), "local_size is out of range", ArgumentError)
