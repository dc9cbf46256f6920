"""A decoder layer of a language model as one kernel: attention over a paged cache, and
an MLP, with both norms.

.venv/bin/python examples/decoder_layer.py
"""

from math import prod

import ml_dtypes
import numpy as np

import etc_dist
from etc_dist import graph_function, tile
from etc_dist.functions.append_kv import PagedCache, append_kv
from etc_dist.functions.attend import attend, written
from etc_dist.functions.epilogue import residual, store, swiglu
from etc_dist.functions.plan_shares import BOUND, EXTENT, MOST_ROWS, plan_shares
from etc_dist.functions.rms_norm import rms_norm
from etc_dist.functions.rotary import frequencies, rotary_table
from etc_dist.functions.tile_matmul import Tiles
from etc_dist.functions.tile_shape import TileShape
from etc_dist.ir import ceildiv, minimum, span

TYPE, EPS, PAGE = "bfloat16", 1e-5, 16
DIM, GROUP = 64, 2  # size of a head, query heads of a KV head
PAGED = PagedCache(DIM, PAGE)


@graph_function
def decoder_layer(g):
    rows, hidden, inner, heads = g.dims("rows hidden inner heads")  # KV heads
    positions, requests, most_pages, pages = g.dims(
        "positions requests most_pages pages"
    )
    ready = []

    def phase(name, function, axes, regions, is_last=False, **options):
        """Tasks that wait for all tasks of the phase before."""
        grid = g.grid(**axes)
        reads, writes = regions(*grid)
        waits, notifies = ready[-1:], []
        if not is_last:
            events = g.events(f"{name}_done", (1,), expects=prod(axes.values()))
            notifies = [events[0]]
            ready.append(events[0])
        refs = {"waits": waits, "notifies": notifies}
        g.call(function, grid, name=name, reads=reads, writes=writes, **refs, **options)

    def norm(name, x, y):
        gain = g.input(f"{name}_gain", (hidden,), TYPE)

        def regions(r):
            return [x[span(r, 1), :], gain[:]], [y[span(r, 1), :]]

        phase(name, rms_norm(TYPE, EPS), {"r": rows}, regions)

    def matmul(name, x, weights, y, epilogue=store, operands=(), **options):
        tiles = Tiles(g, name, 0, [TileShape(128, 128)])
        width = tiles.half_columns() if epilogue.gated else tiles.columns
        shape = y.shape[1], x.shape[1]
        weights = [g.input(weight, shape, TYPE) for weight in weights]

        def regions(i, j):
            down, across = tile(i, tiles.rows), tile(j, width)
            reads = [x[down, :], *(w[across, :] for w in weights)]
            return reads + [z[down, across] for z in operands], [y[down, across]]

        axes = {"i": ceildiv(rows, tiles.rows), "j": ceildiv(shape[0], width)}
        options["values"] = tiles.values
        phase(name, tiles.matmul(TYPE, epilogue), axes, regions, **options)

    def local(name, columns):
        return g.local(name, (rows, columns), TYPE)

    x, y = g.input("x", (rows, hidden), TYPE), g.output("y", (rows, hidden), TYPE)
    request, position = (g.input(n, (rows,), "int32") for n in ("request", "position"))
    cos_sin = g.input("cos_sin", (positions, DIM), "float32")
    table = g.input("table", (requests, most_pages), "int32")
    cache = g.state("cache", (pages, 2, heads, PAGE, DIM), TYPE)

    def places(row=slice(None)):
        return [cos_sin[:, :], request[row], position[row], table[:, :]]

    # One share of all rows: no row is divided, and no slices are combined.
    extents, bounds, combined, num_combined = (
        g.local(name, shape, "int32")
        for name, shape in (
            ("extents", (rows, EXTENT)),
            ("bounds", (2, BOUND)),
            ("combined", (1, 3)),
            ("num_combined", (1,)),
        )
    )
    share, cuts = g.let("share", 1), g.let("no_cuts", 0)

    def plan(_):
        every = span(0, minimum(MOST_ROWS, rows))
        lists = [combined[:, :], num_combined[:]]
        return places(every), [extents[every, :], bounds[:, :], *lists]

    numbers = {"lists": share, "cuts": cuts}
    phase("plan", plan_shares(PAGED), {"n": 1}, plan, values=numbers)

    normed, qkv = local("normed", hidden), local("qkv", heads * (GROUP + 2) * DIM)
    norm("norm", x, normed)
    matmul("qkv_matmul", normed, ["w_qkv"], qkv)

    def append(h):
        k, v = (qkv[:, tile(heads * (GROUP + n) + h, DIM)] for n in range(2))
        return [k, v, *places()], [cache[:, :, h, :, :]]

    phase("append", append_kv(PAGED), {"h": heads}, append)
    sums = g.local("sums", (2, heads * GROUP, DIM), "float32")
    stats = g.local("stats", (2, heads * GROUP, 2), "float32")
    attention = local("attention", heads * GROUP * DIM)

    def attend_head(h, j):
        of_head, (row, slots) = tile(h, GROUP * DIM), written(bounds, (), j, share)
        parts = [z[span(*slots), tile(h, GROUP), :] for z in (sums, stats)]
        plans = [extents[:, :], bounds[:, :]]
        reads = [qkv[:, of_head], cos_sin[:, :], table[:, :], cache[:, :, h, :, :]]
        return [*reads, *plans], [*parts, attention[span(*row), of_head]]

    axes, numbers = {"h": heads, "j": 1}, {"shares_of_task": share, "cuts": cuts}
    phase("attend", attend(PAGED), axes, attend_head, values=numbers)

    middle, again = local("middle", hidden), local("again", hidden)
    active = local("active", inner)
    matmul("o_matmul", attention, ["w_o"], middle, residual, [x])
    norm("mlp_norm", middle, again)
    matmul("up_matmul", again, ["w_gate", "w_up"], active, swiglu)
    matmul("down_matmul", active, ["w_down"], y, residual, [middle], is_last=True)


def main():
    rng, hidden, inner, heads = np.random.default_rng(0), 96, 160, 3
    wide = heads * GROUP * DIM

    def draw(*shape):
        return (rng.standard_normal(shape) / 8).astype(ml_dtypes.bfloat16)

    arrays = {
        "norm_gain": draw(hidden) + 1,
        "mlp_norm_gain": draw(hidden) + 1,
        "w_qkv": draw(wide + 2 * heads * DIM, hidden),
        "w_o": draw(hidden, wide),
        "w_gate": draw(inner, hidden),
        "w_up": draw(inner, hidden),
        "w_down": draw(hidden, inner),
        "cos_sin": rotary_table(4 * PAGE, frequencies(DIM, 10000.0)),
        "table": np.array([[2, 0, 3, 1]], np.int32),  # the pages of the one request
    }
    x, pages = draw(40, hidden), (4, 2, heads, PAGE, DIM)

    with (
        etc_dist.start() as world,
        etc_dist.compile(decoder_layer(world.size), world) as program,
    ):

        def run(first, end, cache):
            """The rows of some positions."""
            at = np.arange(first, end, dtype=np.int32)
            rows = {"x": x[first:end], "position": at, "request": at * 0}
            return program.run(**arrays, **rows, cache=cache)["y"].astype(np.float32)

        print(f"{len(program.plan.graph.calls)} calls in one kernel")
        cache, other_cache = (np.zeros(pages, ml_dtypes.bfloat16) for _ in range(2))
        whole = run(0, 40, other_cache)
        run(0, 39, cache)  # a prompt of 39 tokens
        error = abs(run(39, 40, cache) - whole[39:]).max()  # the next token
        print(f"the last token alone has the same result: {error < 0.05}")


if __name__ == "__main__":
    main()
