"""Refusals of index expressions: values that are known only when the program runs."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.codegen import generate
from etc_dist.errors import GraphError
from etc_dist.ir import (
    Graph,
    GraphFunction,
    Symbol,
    ceildiv,
    equal,
    graph_function,
    maximum,
    minimum,
    select,
    tile,
)
from etc_dist.ir.expr import MOST_DEPTH, Expr, wrap
from etc_dist.schedule import schedule_static
from tests.verify.test_verify import touch

N, M = Symbol("n", "dim"), Symbol("m", "dim")


@pytest.mark.parametrize(
    "condition", [N < 3, N > 3, N <= M, N > M, N >= 0, equal(N, 3)]
)
def test_a_comparison_has_no_truth_value(condition):
    with pytest.raises(TypeError, match=r"has no truth value.*write select\("):
        if condition:
            pass


def test_a_chained_comparison_is_refused():
    with pytest.raises(TypeError, match=r"comparison 0 <= n has no truth value"):
        assert 0 <= N < M
    with pytest.raises(TypeError, match=r"minimum\(\) and maximum\(\)"):
        max(N, M)


@pytest.mark.parametrize("value", [True, 1, np.bool_(True), np.array(True)])
def test_a_comparison_does_not_equal_a_number(value):
    with pytest.raises(TypeError, match="comparison n < 3 has no truth value"):
        assert (N < 3) == value


def test_comparisons_are_equal_by_structure():
    assert (N < 3) == (N < 3) and hash(N < 3) == hash(N < 3)
    assert len({N < 3, N < 2, N <= 3, M < 3}) == 4


def test_a_comparison_is_not_a_number():
    with pytest.raises(TypeError, match=r"got the comparison n < 3.*select"):
        wrap(N < 3)
    with pytest.raises(TypeError, match="unsupported operand"):
        assert (N < 3) + 1


@pytest.mark.parametrize("condition", [True, N == M, N, 1])
def test_select_takes_a_comparison_only(condition):
    with pytest.raises(TypeError, match=r"expects a comparison.*equal\(a, b\)"):
        select(condition, N, M)


@pytest.mark.parametrize("divisor", [0, -3, np.int64(-3)])
def test_ceildiv_takes_a_positive_divisor(divisor):
    with pytest.raises(GraphError, match="ceildiv has no divisor below 1"):
        ceildiv(N, divisor)


def graph_of(place: str, depth: int) -> GraphFunction:
    """A graph whose expression at one place has `depth` nested operations."""

    def nested(value: Expr, at: str) -> Expr:
        for k in range(depth if at == place else 0):
            value = minimum(value, M) if k % 2 else maximum(value, 0)
        return value

    @graph_function
    def made(g: Graph) -> None:
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

    return made(1)


PLACES = ["let", "shape", "expects", "grid", "region", "load", "event", "order"]


@pytest.mark.parametrize("place", PLACES)
def test_more_nested_operations_than_are_allowed_are_refused(place):
    assert generate(schedule_static(graph_of(place, MOST_DEPTH - 1))).text
    with pytest.raises(GraphError, match="too many nested operations") as caught:
        graph_of(place, 1000)
    assert caught.value.wanted == f"at most {MOST_DEPTH}"
    assert caught.value.got == "1000" and caught.value.where
