"""A graph over hosts: every rank gets the rows of all, each sent once to each host."""

from __future__ import annotations

import numpy as np

from etc_dist.functions.push_far import push_far
from etc_dist.functions.push_rows import push_rows
from etc_dist.ir import Expr, Graph, ceildiv, graph_function, minimum, span
from etc_dist.ir.tensor import Tile

BLOCK = 2
"""Rows that one task sends."""


@graph_function
def exchange_hosts(g: Graph, *, direct: bool = False, astray: int = 0) -> None:
    """x [rows, n] on each rank -> y [world * rows, n]: the rows of all ranks.

    A rank sends its rows to its near ranks, and to its partner on each other host,
    which passes them on to its near ranks. direct: send to near ranks of partners
    without a far function, astray: to the ranks that follow partners; both wrong."""
    rows, n = g.dims("rows n")
    near, hosts = g.local_size, g.world_size // g.local_size
    first = g.rank - g.rank % near
    num_blocks = g.let("blocks", ceildiv(rows, BLOCK))
    x = g.input("x", (rows, n), "float32")
    y = g.output("y", (g.world_size * rows, n), "float32")
    slots = g.symmetric("slots", (g.world_size, rows, n), "float32")
    arrivals = g.events(
        "arrived", (g.world_size, num_blocks), expects=1, cross_rank=True
    )
    far = g.events("far", (g.world_size, num_blocks), expects=1, cross_rank=True)
    staged = g.symmetric("staged", (g.world_size, rows, n), "float32")

    def block(i: Expr) -> Tile:
        return span(i * BLOCK, minimum(BLOCK, rows - i * BLOCK))

    for k in range(near):
        (i,) = grid = g.grid(i=num_blocks)
        g.call(
            push_rows(),
            grid,
            name=f"share_{k}",
            reads=[x[block(i), :]],
            writes=[slots.on(first + k)[g.rank, block(i), :]],
            notifies=[arrivals.on(first + k)[g.rank, i]],
        )
    for step in range(1, hosts):
        (i,) = grid = g.grid(i=num_blocks)
        partner = (g.rank + step * near + astray) % g.world_size
        source = (g.rank - step * near + g.world_size) % g.world_size
        g.call(
            push_rows() if direct else push_far(),
            grid,
            name=f"send_{step}",
            reads=[slots[g.rank, block(i), :]],
            writes=[staged.on(partner)[g.rank, block(i), :]],
            waits=[arrivals[g.rank, i]],
            notifies=[far.on(partner)[g.rank, i]],
        )
        for k in range(near):
            to = first + k
            g.call(
                push_rows(),
                grid,
                name=f"pass_on_{step}_{k}",
                reads=[staged[source, block(i), :]],
                writes=[slots.on(to)[source, block(i), :]],
                waits=[far[source, i]],
                notifies=[arrivals.on(to)[source, i]],
            )
    r, i = grid = g.grid(r=g.world_size, i=num_blocks)
    height = minimum(BLOCK, rows - i * BLOCK)
    g.call(
        push_rows(),
        grid,
        name="collect",
        reads=[slots[r, block(i), :]],
        writes=[y[span(r * rows + i * BLOCK, height), :]],
        waits=[arrivals[r, i]],
    )


def rows_of(rank: int, rows: int = 5) -> np.ndarray:
    """The input of a rank."""
    rng = np.random.default_rng(rank)
    return rng.standard_normal((rows, 4)).astype(np.float32)
