"""A graph across ranks: an all-gather that passes blocks around a ring.

    launch/mpirun -n 4 examples/ring_all_gather.py

Every rank sends its rows to the next rank, and forwards the blocks that it receives
from the previous one while later blocks still arrive. The device function is the
library's `push_rows`; the graph defines the dependencies.
"""

from __future__ import annotations

import numpy as np

import etc_dist
from etc_dist.functions.push_rows import push_rows
from etc_dist.ir import Expr, Graph, ceildiv, graph_function, minimum, span
from etc_dist.ir.tensor import Tile

BLOCK = 16
"""Rows that one task sends."""


@graph_function
def ring_all_gather(g: Graph) -> None:
    """x [rows, n] on each rank -> y [world * rows, n]: the rows of all ranks."""
    rows, n = g.dims("rows n")
    world, push = g.world_size, push_rows()
    following = (g.rank + 1) % world
    num_blocks = g.let("blocks", ceildiv(rows, BLOCK))
    x = g.input("x", (rows, n), "float32")
    y = g.output("y", (world * rows, n), "float32")
    ring = g.symmetric("ring", (world * rows, n), "float32")
    block_events = g.events("arrived", (world, num_blocks), expects=1, cross_rank=True)

    (i,) = grid = g.grid(i=num_blocks)
    height = minimum(BLOCK, rows - i * BLOCK)  # the last block may be smaller

    def block(source: Expr) -> Tile:
        """Block i among the rows of rank `source`."""
        return span(source * rows + i * BLOCK, height)

    g.call(
        push,
        grid,
        name="copy_own",
        reads=[x[span(i * BLOCK, height), :]],
        writes=[y[block(g.rank), :]],
    )
    g.call(
        push,
        grid,
        name="send",
        reads=[x[span(i * BLOCK, height), :]],
        writes=[ring.on(following)[block(g.rank), :]],
        notifies=[block_events.on(following)[g.rank, i].when(world > 1)],
    )
    # Step by step, the rows of the previous rank, of the one before it, and so on.
    step, i = grid = g.grid(step=world - 1, i=num_blocks)
    source = (g.rank + world - 1 - step) % world
    g.call(
        push,
        g.grid(step=max(world - 2, 0), i=num_blocks),
        name="forward",
        reads=[ring[block(source), :]],
        writes=[ring.on(following)[block(source), :]],
        waits=[block_events[source, i]],
        notifies=[block_events.on(following)[source, i]],
    )
    g.call(
        push,
        grid,
        name="copy",
        reads=[ring[block(source), :]],
        writes=[y[block(source), :]],
        waits=[block_events[source, i]],
    )


def main() -> None:
    with (
        etc_dist.start() as world,
        etc_dist.compile(ring_all_gather(world.size), world) as program,
    ):
        if world.backend == "cuda":
            import cupy as xp
        else:
            xp = np
        x = xp.arange(100 * 8, dtype=xp.float32).reshape(100, 8) + 1000 * world.rank
        y = program.run(x=x)["y"]
        program.synchronize()

        expected = xp.concatenate(
            [x + 1000 * (r - world.rank) for r in range(world.size)]
        )
        is_equal = all(world.gather(bool((y == expected).all())))
        if world.rank == 0:
            print(world.show())
            num_calls = len(program.plan.graph.calls)
            print(f"{world.size} ranks, {num_calls} calls in one kernel")
            print(f"y holds the rows of all ranks, on every rank: {is_equal}")
    if not is_equal:
        raise SystemExit(f"rank {world.rank}: the result is wrong")


if __name__ == "__main__":
    main()
