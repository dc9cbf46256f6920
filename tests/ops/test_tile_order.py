"""Orders of tasks: each coordinate once, in the sequence that they promise, and few
bytes from DRAM."""

from __future__ import annotations

from collections import OrderedDict
from itertools import product

import numpy as np
import pytest

from etc_dist.functions.tile_shape import TileShape
from etc_dist.ir import GraphFunction
from etc_dist.ir.call import TASK
from etc_dist.ir.expr import wrap
from etc_dist.ops.matmul_reduce_scatter import matmul_reduce_scatter_graph
from etc_dist.ops.tile_order import last_between, owners_together
from tests.graphs.rank_tiles import tile_dims

WORKERS, L2_BYTES, STEPS, COLUMNS = 132, 40_000_000, 8, 128
SHAPES = (TileShape(96, COLUMNS, swapped=True),)


@pytest.mark.parametrize("tasks", [1, 2, 5])
@pytest.mark.parametrize("parts", [2, 3, 8])
def test_the_last_part_lies_between_the_others(parts, tasks):
    pairs = last_between(TASK, parts, tasks)
    pairs_of_tasks = [
        tuple(e.evaluate({"t": t}) for e in pairs) for t in range(parts * tasks)
    ]
    last = parts - 1
    assert [i for p, i in pairs_of_tasks if p == last] == list(range(tasks))
    earlier = [(p, i) for p in range(last) for i in range(tasks)]
    assert [pair for pair in pairs_of_tasks if pair[0] != last] == earlier
    places = [t for t, (p, _) in enumerate(pairs_of_tasks) if p == last]
    assert places == list(range(last, parts * tasks, parts))


@pytest.mark.parametrize("group", [1, 2, 5])
@pytest.mark.parametrize("late", [0, 4, 15])
@pytest.mark.parametrize("owners", [2, 3])
def test_owners_run_together_and_late_own_tiles_last(owners, late, group):
    blocks, columns = 5, 3
    sizes = map(wrap, (blocks, columns, group, late))
    order = owners_together(TASK, owners, *sizes)
    tasks = range(owners * blocks * columns)
    pairs = [tuple(int(e.evaluate({"t": t})) for e in order) for t in tasks]
    tiles = sorted(product(range(blocks), range(columns)), key=lambda at: at[0])
    tiles.sort(key=lambda at: (at[0] // group, at[1], at[0]))
    early, peers = len(tiles) - late, range(owners - 1)
    assert pairs == [
        *((p, *at) for at in tiles[:early] for p in range(owners)),
        *((p, *at) for at in tiles[early:] for p in peers),
        *((owners - 1, *at) for at in tiles[early:]),
    ]


def reads(graph: GraphFunction, **sizes: int) -> list[float]:
    """How often x and w are read from DRAM, by a wave of tiles after the other, each in
    STEPS along k, with an L2 cache that evicts what was used least recently."""
    env = graph.environment({**sizes, **tile_dims(graph, COLUMNS)}, 0)
    (call,) = (
        candidate for candidate in graph.calls if candidate.name == "tile_matmul"
    )
    inner = {**env, TASK.name: np.arange(call.tasks.evaluate(env))}
    at = [e.evaluate(inner).tolist() for e in call.order]
    tiles = [(row, (column,)) for *row, column in zip(*at, strict=True)]
    step_bytes = 2 * env["k"] // STEPS
    nbytes = step_bytes * env["tile_even_rows"], step_bytes * COLUMNS
    cache: OrderedDict[tuple[int, ...], int] = OrderedDict()
    read, cache_bytes = [0, 0], 0
    for first in range(0, len(tiles), WORKERS):
        wave = tiles[first : first + WORKERS]
        for step, tile, operand in product(range(STEPS), wave, range(2)):
            key = operand, step, *tile[operand]
            if key not in cache:
                cache[key] = nbytes[operand]
                read[operand] += nbytes[operand]
                cache_bytes += nbytes[operand]
            cache.move_to_end(key)
            while cache_bytes > L2_BYTES:
                cache_bytes -= cache.popitem(last=False)[1]
    rows = graph.world_size * env["rows"]
    return [
        nbytes / (2 * env["k"] * count)
        for nbytes, count in zip(read, (rows, env["n"]), strict=True)
    ]


def test_a_reduce_scatter_reads_weights_from_dram_about_once():
    """Once more by the last own tiles. With owners in turn it would read them 3.6
    times."""
    graph = matmul_reduce_scatter_graph(2, shapes=SHAPES)
    x, w = reads(graph, rows=257, n=9472, k=3904)
    assert w < 1.5 and x < 2.5
