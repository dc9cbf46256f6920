"""Copies to any rank; tests/runtime/test_hosts.py has those between hosts."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.emulate import Emulator
from etc_dist.errors import GraphError
from etc_dist.functions.push_far import push_far
from etc_dist.ir import Graph
from tests.graphs.exchange_hosts import exchange_hosts, rows_of


def test_rows_are_copied():
    x, y = np.arange(6).reshape(2, 3), np.zeros((2, 3), int)
    push_far().body(x, y)
    assert y.tolist() == x.tolist()


@pytest.mark.parametrize(
    "references",
    [
        lambda e: [],
        lambda e: [e[0]],
        lambda e: [e.on(1)[0]],
        lambda e: 2 * [e.on(0)[0]],
    ],
)
def test_a_far_call_sends_one_region_and_one_notification_to_one_rank(references):
    g = Graph("one", 4, 2)
    x = g.symmetric("x", (4,), "float32")
    notifies = references(g.events("e", (4,), expects=1, cross_rank=True))
    grid, region = g.grid(i=4), x.on(0)[:]
    with pytest.raises(GraphError, match="one region with one notification"):
        g.call(push_far(), grid, reads=[x[:]], writes=[region], notifies=notifies)


@pytest.mark.parametrize("kind", ["input", "local"])
def test_only_symmetric_tensors_are_sent(kind):
    g = Graph("one", 4, 2)
    y, slots = getattr(g, kind)("y", (4,), "float32"), g.symmetric("s", (4,), "float32")
    to, arrival = g.rank, g.events("e", (1,), expects=1, cross_rank=True)
    ends = {"writes": [slots.on(to)[:]], "notifies": [arrival.on(to)[0]]}
    with pytest.raises(GraphError, match=rf"got: +y\[:\], {kind}"):
        g.call(push_far(), g.grid(i=1), reads=[y[:]], **ends)


def test_kernel_copies_within_a_host():
    program = Emulator(exchange_hosts(2, local_size=1), workers=2)
    results = program.run([{"x": rows_of(rank)} for rank in range(2)])
    expected = np.concatenate([rows_of(rank) for rank in range(2)])
    assert all((outputs["y"] == expected).all() for outputs in results)
