"""A graph whose dependencies come from data: rows are packed bin by bin, then summed.

    launch/mpirun -n 2 examples/bin_sums.py

The key of a row is its bin. The first call counts the rows of each bin and computes
where they begin. The second call loads from its results where to write and which event
to notify. The third loads how many notifications to expect and which rows to read. The
CUDA bodies are in bin_sums.cuh.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import etc_dist
from etc_dist.ir import Graph, device_function, graph_function, span

CUDA = Path(__file__).with_suffix(".cuh")


@device_function(source=CUDA, reads=1, writes=3)
def count_bins(keys: Any, counts: Any, starts: Any, place: Any) -> None:
    counts[...] = np.bincount(keys, minlength=len(counts))
    starts[...] = np.cumsum(counts) - counts
    place[np.argsort(keys, kind="stable")] = np.arange(len(keys))


@device_function(source=CUDA, reads=1, writes=1, lane="transfer")
def pack_row(row: Any, packed: Any) -> None:
    packed[...] = row


@device_function(source=CUDA, reads=1, writes=1, lane="transfer")
def sum_bin(rows: Any, total: Any) -> None:
    total[...] = rows.sum(axis=0)


@graph_function
def bin_sums(g: Graph) -> None:
    """x [rows, n], keys [rows] -> total [bins, n], the sums of the rows with each key,
    on each rank separately."""
    rows, bins, n = g.dims("rows bins n")
    x = g.input("x", (rows, n), "float32")
    keys = g.input("keys", (rows,), "int32")
    total = g.output("total", (bins, n), "float32")
    counts = g.local("counts", (bins,), "int32")
    starts = g.local("starts", (bins,), "int32")
    place = g.local("place", (rows,), "int32")
    packed = g.local("packed", (rows, n), "float32")
    count_events = g.events("counted", (1,), expects=1)
    filled = g.events("filled", (bins,), expects=lambda b: counts.load(b))

    g.call(
        count_bins,
        g.grid(one=1),
        reads=[keys[:]],
        writes=[counts[:], starts[:], place[:]],
        notifies=[count_events[0]],
    )
    (r,) = grid = g.grid(r=rows)
    g.call(
        pack_row,
        grid,
        reads=[x[r, :]],
        writes=[packed[place.load(r), :]],
        waits=[count_events[0]],
        notifies=[filled[keys.load(r)]],
    )
    (b,) = grid = g.grid(b=bins)
    g.call(
        sum_bin,
        grid,
        reads=[packed[span(starts.load(b), counts.load(b)), :]],
        writes=[total[b, :]],
        waits=[count_events[0], filled[b]],
    )


def main() -> None:
    with (
        etc_dist.start() as world,
        etc_dist.compile(bin_sums(world.size), world) as program,
    ):
        if world.backend == "cuda":
            import cupy as xp
        else:
            xp = np
        # Whole numbers, whose sums are exact; bins 0 and 11 stay empty.
        rng = np.random.default_rng(world.rank)
        keys = rng.integers(1, 11, 100).astype(np.int32)
        x = rng.integers(-9, 10, (100, 64)).astype(np.float32)
        total = xp.empty((12, 64), np.float32)
        program.run(x=xp.asarray(x), keys=xp.asarray(keys), total=total)
        program.synchronize()

        expected = np.zeros((12, 64), np.float32)
        np.add.at(expected, keys, x)
        is_equal = bool((total == xp.asarray(expected)).all())
        rank_results = world.gather(is_equal)
        if world.rank == 0:
            print(world.show())
            print(program.show(rows=100, bins=12, n=64))
            print(
                f"total holds the sums of all bins, on every rank: {all(rank_results)}"
            )
    if not is_equal:
        raise SystemExit(f"rank {world.rank}: the result is wrong")


if __name__ == "__main__":
    main()
