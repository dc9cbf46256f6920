"""A graph of the size of a decoder with many layers, for proofs: its calls, events and
buffers, with bodies that do nothing."""

from __future__ import annotations

from dataclasses import dataclass

from etc_dist.ir import (
    Expr,
    Graph,
    Tensor,
    ceildiv,
    equal,
    graph_function,
    select,
    tile,
)
from tests.graphs.kit import touch

HIDDEN, QKV, INNER, HEADS = 5120, 10240, 25600, 8
SLICES = 4


@dataclass(frozen=True)
class Step:
    """A call of a layer that writes `buffer` in tiles of columns: by `rows` at once, or
    in slices along k."""

    name: str
    columns: int
    tile: int
    rows: Expr | None = None
    lane: str = "tensor"
    slices: int = 1
    weight: int = 0

    @property
    def tasks(self) -> Expr | int:
        tiles = self.slices * (self.columns // self.tile)
        return tiles if self.rows is None else self.rows * tiles


@graph_function
def decoder(g: Graph) -> None:
    """Each buffer is for layers of even and of odd number. A layer waits for all tasks
    of each of its steps in turn; attention is by row and head, and updates a cache."""
    layers, rows = g.dims("layers rows")
    x, y = (make(name, (rows, HIDDEN), "bfloat16")
            for make, name in ((g.input, "x"), (g.output, "y")))  # fmt: skip
    cache = g.state("cache", (layers, rows, QKV), "bfloat16")
    num_eights = g.let("eights", ceildiv(rows, 8))
    steps = [
        Step("norm", HIDDEN, HIDDEN, num_eights),
        Step("qkv", QKV, 128, weight=HIDDEN),
        Step("attend", HEADS * 1024, 1024, rows),
        Step("o", HIDDEN, 128, slices=SLICES, weight=HEADS * 1024),
        Step("sum_o", HIDDEN, 128, num_eights, lane="transfer"),
        Step("norm_again", HIDDEN, HIDDEN, num_eights),
        Step("up", 2 * INNER, 128, weight=HIDDEN),
        Step("activate", INNER, 512, num_eights, lane="transfer"),
        Step("down", HIDDEN, 128, slices=SLICES, weight=INNER),
        Step("sum_down", HIDDEN, 128, num_eights, lane="transfer"),
        Step("scale", HIDDEN, 1280, num_eights, lane="transfer"),
        Step("add", HIDDEN, 640, num_eights),
    ]
    tasks = [s.tasks for s in steps]
    buffers = [
        g.local(f"buffer_{s.name}", (2, s.slices, rows, s.columns), "bfloat16")
        for s in steps
    ]
    first = g.let("last_step", tasks[-1])
    ready = g.events(
        "ready", (layers + 1,), expects=lambda i: select(equal(i, 0), num_eights, first)
    )
    step_events = [
        g.events(f"done_{s.name}", (layers,), expects=count)
        for s, count in zip(steps[:-1], tasks[:-1], strict=True)
    ]

    def add(name: str, lane: str, grid, reads, writes, waits, notifies) -> None:
        f = touch(len(reads), len(writes), lane)
        refs = {"waits": waits, "notifies": notifies}
        g.call(f, grid, name=name, reads=reads, writes=writes, **refs)

    last = buffers[-1]
    (i,) = grid = g.grid(i=num_eights)
    embedded = last[1, 0, tile(i, 8), :]
    add("embed", "tensor", grid, [x[tile(i, 8), :]], [embedded], [], [ready[0]])
    with g.loop(layer=layers) as layer:
        for n, step in enumerate(steps):
            source = last if n == 0 else buffers[n - 1]
            before = (layer + 1) % 2 if n == 0 else layer % 2
            waits = [ready[layer] if n == 0 else step_events[n - 1][layer]]
            is_last = n == len(steps) - 1
            notifies = [ready[layer + 1] if is_last else step_events[n][layer]]
            if step.rows is None:
                s, j = grid = g.grid(s=step.slices, j=step.columns // step.tile)
                k = _columns(source) // step.slices
                weight = g.input(
                    f"w_{step.name}", (layers, step.columns, step.weight), "bfloat16"
                )
                reads = [source[before, :, :, tile(s, k)],
                         weight[layer, tile(j, step.tile), :]]  # fmt: skip
                writes = [buffers[n][layer % 2, s, :, tile(j, step.tile)]]
            else:
                r, j = grid = g.grid(r=step.rows, j=step.columns // step.tile)
                rows_of_task = r if step.name == "attend" else tile(r, 8)
                wide = _columns(source) // (step.columns // step.tile)
                reads = [source[before, :, rows_of_task, tile(j, wide)]]
                writes = [buffers[n][layer % 2, 0, rows_of_task, tile(j, step.tile)]]
                if step.name == "attend":
                    cache_rows = cache[layer, r, tile(j, QKV // HEADS)]
                    reads, writes = [*reads, cache_rows], [*writes, cache_rows]
            add(step.name, step.lane, grid, reads, writes, waits, notifies)
    (i,) = grid = g.grid(i=num_eights)
    hidden_rows = last[(layers + 1) % 2, 0, tile(i, 8), :]
    add("head", "tensor", grid, [hidden_rows], [y[tile(i, 8), :]], [ready[layers]], [])


def _columns(tensor: Tensor) -> Expr:
    return tensor.shape[-1]
