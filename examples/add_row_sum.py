"""A custom graph: y = a + b by tiles, fused with the sum of each row of y.

    launch/mpirun -n 2 examples/add_row_sum.py

The two calls run in one kernel. A task of `row_sum` reads two row blocks of `add` with
all their columns, so it waits for many `add` tasks: an element of `added` is complete
once all tasks of its two blocks have notified it. The CUDA bodies are in
add_row_sum.cuh.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import etc_dist
from etc_dist.ir import Graph, ceildiv, device_function, graph_function, minimum, tile

CUDA = Path(__file__).with_suffix(".cuh")
TILE = 64
"""Rows and columns of an `add` task."""
BLOCKS = 2
"""Row blocks of `add` that one `row_sum` task covers."""


@device_function(source=CUDA, reads=2, writes=1)
def add(a: Any, b: Any, y: Any) -> None:
    y[...] = a + b


@device_function(source=CUDA, reads=1, writes=1, lane="transfer")
def row_sum(y: Any, total: Any) -> None:
    total[...] = y.sum(axis=1)


@graph_function
def add_row_sum(g: Graph) -> None:
    """a, b [rows, n] -> y [rows, n] and total [rows], on each rank separately."""
    rows, n = g.dims("rows n")
    num_blocks = g.let("blocks", ceildiv(rows, TILE))
    columns = g.let("columns", ceildiv(n, TILE))
    num_groups = g.let("groups", ceildiv(num_blocks, BLOCKS))
    a = g.input("a", (rows, n), "float32")
    b = g.input("b", (rows, n), "float32")
    y = g.output("y", (rows, n), "float32")
    total = g.output("total", (rows,), "float32")
    # The last group may have fewer row blocks: the count depends on the element.
    sum_events = g.events(
        "added",
        (num_groups,),
        expects=lambda s: minimum(BLOCKS, num_blocks - s * BLOCKS) * columns,
    )

    i, j = grid = g.grid(i=num_blocks, j=columns)
    here = (tile(i, TILE), tile(j, TILE))
    g.call(
        add,
        grid,
        reads=[a[here], b[here]],
        writes=[y[here]],
        notifies=[sum_events[i // BLOCKS]],
    )

    (s,) = grid = g.grid(s=num_groups)
    g.call(
        row_sum,
        grid,
        reads=[y[tile(s, BLOCKS * TILE), :]],
        writes=[total[tile(s, BLOCKS * TILE)]],
        waits=[sum_events[s]],
    )


def main() -> None:
    with (
        etc_dist.start() as world,
        etc_dist.compile(add_row_sum(world.size), world) as program,
    ):
        if world.backend == "cuda":
            import cupy as xp
        else:
            xp = np
        # 328 rows are six row blocks, the last one partial, in three groups.
        rng = np.random.default_rng(world.rank)
        a, b = (xp.asarray(rng.random((328, 256), np.float32)) for _ in range(2))
        results = program.run(a=a, b=b)  # outputs that are not given are made
        program.synchronize()

        is_equal = bool((results["y"] == a + b).all())
        expected = (a + b).sum(axis=1)
        error = float(abs(results["total"] - expected).max() / abs(expected).max())
        rank_results = world.gather((is_equal, error))
        if world.rank == 0:
            print(world.show())
            print(program.show(rows=328, n=256))
            print(f"y equals a + b on every rank: {all(ok for ok, _ in rank_results)}")
            print(
                f"largest error of a row's sum: {max(e for _, e in rank_results):.1e}"
            )
    if not is_equal or error > 1e-5:
        raise SystemExit(f"rank {world.rank}: the result is wrong")


if __name__ == "__main__":
    main()
