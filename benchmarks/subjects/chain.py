"""Matrix multiplications one after the other in one program, against cuBLAS.

Each multiplies the result of the one before: the weights of the next one can be loaded
while its x is being computed."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from benchmarks.device import Gpu, captured, roofline_ms, wide
from benchmarks.harness import Result, Run, Subject, add_shapes
from benchmarks.protocol import measure_shapes
from benchmarks.workload import REPLAYED, GraphCall, Rival, Shapes, Workload, run_steps
from etc_dist.functions.tile_shape import TileShape
from etc_dist.ir import Graph, Tensor, graph_function
from etc_dist.layers.mlp_policy import fastest_pair
from etc_dist.ops.multiply import RowEvents, TiledMatmul, tiles_of_dims
from etc_dist.ops.tile_model import FAMILY, dims_of, predictions, text_of
from etc_dist.ops.tuning import tuning_of

SIZES = Shapes(
    models={"qwen3-32b": (5120, 25600), "8192x8192": (8192, 8192)},
    small=((136, 264), 20),
    rows=(1, 8, 32, 64, 128),
)
"""Hidden and inner size. All weights together have 2.1 and 1.1 GB."""
COUNT = 8
"""The matrix multiplications: to the inner size, back to the hidden one, and so on."""


def sizes_of(n: int, hidden: Any, inner: Any) -> tuple[Any, Any]:
    """The rows and columns of weight n."""
    return (inner, hidden) if n % 2 == 0 else (hidden, inner)


@graph_function
def chain_graph(
    g: Graph, *, dtype: str = "bfloat16", shapes: Sequence[TileShape] = FAMILY
) -> None:
    """x [rows, hidden], COUNT weights -> y [rows, hidden], on each rank its own. Dims
    select the tiles of each matmul n, with names that begin with `w{n}_`. They wait for
    all of the matmul before."""
    rows, hidden, inner = g.dims("rows hidden inner")
    x = g.input("x", (rows, hidden), dtype)
    weights = [
        g.input(f"w{n}", sizes_of(n, hidden, inner), dtype) for n in range(COUNT)
    ]
    y = g.output("y", (rows, hidden), dtype)
    last: Tensor = x
    events: RowEvents | None = None
    for n, weight in enumerate(weights):
        ends, columns = n == COUNT - 1, sizes_of(n, hidden, inner)[0]
        result = y if ends else g.local(f"y{n}", (rows, columns), dtype)
        tiles = tiles_of_dims(g, f"w{n}_", shapes, rows)
        matmul = TiledMatmul(g, f"w{n}_", tiles, dtype, last, [weight], result)
        events_of_last = None if ends else matmul.complete(f"w{n}_done", rows)
        matmul.add(events)
        last, events = result, events_of_last


class ChainWorkload(Workload):
    """x [M, N], weights [K, N] and [N, K] in turn -> [M, N]."""

    op = "chain"
    protocol = REPLAYED
    is_replayed = True
    spreads_nan = True
    leeway = baseline_leeway = COUNT**0.5
    """Each result is rounded."""

    def x(self, rank: int, number: int = 0) -> Any:
        return self.draw("x", rank, self.rows, self.sizes[0])

    def make_weights(self) -> tuple[Any, ...]:
        """Such that all results have the deviation of x."""
        shapes = [sizes_of(n, *self.sizes) for n in range(COUNT)]
        return tuple(
            self.device.random(shape, self.dtype, f"{self.name} w{n}", shape[1] ** -0.5)
            for n, shape in enumerate(shapes)
        )

    @property
    def out_shape(self) -> tuple[int, int]:
        return self.rows, self.sizes[0]

    def make(self, schedule: str, **options: Any) -> GraphCall:
        names = ["x", *(f"w{n}" for n in range(COUNT)), "y"]
        call = GraphCall(chain_graph(1), self.world, names, schedule)
        rankings = [
            predictions(
                FAMILY,
                (self.rows, *sizes_of(n, *self.sizes)),
                call.program.workers,
                tuning_of(self.world).tiles,
            )
            for n in range(2)
        ]
        tiles = tuning_of(self.world).tiles
        pair = fastest_pair(rankings, tiles.call_us, call.program.workers)
        tilings = pair.first.tiling, pair.second.tiling
        call.dims = {
            dim: value
            for n in range(COUNT)
            for dim, value in dims_of(tilings[n % 2], f"w{n}_").items()
        }
        self._policy = ", then ".join(text_of(FAMILY, tiling) for tiling in tilings)
        return call

    def arguments(self, number: int) -> tuple[Any, ...]:
        return self.xs[number], *self.weights

    def reference(self, number: int = 0) -> Any:
        result = wide(self.xs[number])
        for weight in self.weights:
            result = result @ wide(weight).T
        return result

    def rivals(self, gpu: Gpu) -> dict[str, Rival]:
        """cuBLAS, replayed."""
        widths = [len(weight) for weight in self.weights]
        results = [gpu.empty((self.rows, width), self.dtype) for width in widths]
        pairs = zip(pairwise([*self.xs, *results]), self.weights, strict=True)
        steps = [gpu.matmul(x, w, y) for (x, y), w in pairs]
        step_by_name = {f"w{n}": step for n, step in enumerate(steps)}
        self.baseline = captured(gpu, partial(run_steps, step_by_name))
        return {"baseline": Rival([self.baseline], results[-1:])}

    def limits(self, gemm_ms: float) -> tuple[float, float]:
        assert isinstance(self.device, Gpu)
        elements = sum(weight.size for weight in self.weights)
        flops = 2 * self.rows * elements
        return roofline_ms(2 * elements, flops, self.device.rates), 0.0

    def fields(self) -> dict[str, Any]:
        return {**super().fields(), "policy": self._policy}


def measure(run: Run) -> Iterator[Result]:
    if run.device.world.size > 1:
        raise SystemExit("chain: it runs on one rank")
    return measure_shapes(run, ChainWorkload, SIZES)


def add_options(parser: ArgumentParser) -> None:
    add_shapes(parser, SIZES.models)


TITLE = "Check and time matrix multiplications one after the other."
SUBJECTS = {"chain": Subject(TITLE, measure, add_options)}
