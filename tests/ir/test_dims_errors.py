"""Dims at which a graph has no size."""

from __future__ import annotations

import pytest

from etc_dist.errors import ArgumentError
from etc_dist.ir import Graph, graph_function
from etc_dist.schedule import schedule_static
from etc_dist.verify.verify import verify
from tests.runtime.programs import send

WHERE = {
    "let": "the number k of g.let",
    "tensor": "the shape of z",
    "events": "the shape of done",
    "grid": "the extent i of call make",
    "loop": "the extent turn of call use",
}


@graph_function
def divided(g: Graph, *, at: str) -> None:
    """A quotient of dims in one place, and n elsewhere."""
    n, m = g.dims("n m")
    sizes = {name: n // m if name == at else n for name in WHERE}
    g.let("k", sizes["let"])
    x, y = g.input("x", (n, 4), "float32"), g.output("y", (n, 4), "float32")
    z = g.local("z", (sizes["tensor"], 4), "float32")
    done = g.events("done", (sizes["events"],), expects=1)
    (i,) = grid = g.grid(i=sizes["grid"])
    moves = {"reads": [x[i, :]], "writes": [z[i, :]], "notifies": [done[i]]}
    g.call(send, grid, name="make", **moves)
    with g.loop(turn=sizes["loop"]) as turn:
        moves = {"reads": [z[turn, :]], "writes": [y[turn, :]], "waits": [done[turn]]}
        g.call(send, g.grid(j=1), name="use", **moves)


@pytest.mark.parametrize("at", WHERE)
def test_a_size_that_divides_by_zero_is_named(at):
    plan = schedule_static(divided(1, at=at))
    verify(plan, {"n": 3, "m": 1}, 2)
    for refuse in (
        lambda: verify(plan, {"n": 3, "m": 0}, 2),
        lambda: plan.show(workers=2, n=3, m=0),
    ):
        with pytest.raises(ArgumentError) as caught:
            refuse()
        assert caught.value.what == f"{WHERE[at]} cannot be computed at these dims"
        assert caught.value.where == "graph divided, n=3, m=0"
        assert caught.value.got.startswith("n // m: ")
