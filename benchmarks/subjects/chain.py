"""Matrix multiplications one after the other in one program, against cuBLAS.

Each multiplies the result of the one before: the weights of the next one can be loaded
while its x is being computed.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from benchmarks.device import Gpu, captured, roofline_ms, wide
from benchmarks.harness import Result, Run, Subject, add_shapes
from benchmarks.protocol import measure_shapes
from benchmarks.workload import (
    REPLAYED,
    Calls,
    Rival,
    Shapes,
    Workload,
    run_steps,
)
from etc_dist.functions.tile_matmul import TileShape
from etc_dist.ir import EventTensor, Graph, Tensor, graph_function
from etc_dist.layers.mlp_policy import combined
from etc_dist.ops.argument_table import ArgumentTable
from etc_dist.ops.few_rows import RowBlocks
from etc_dist.ops.matmul_policy import SHAPES, has_blocks, rate
from etc_dist.ops.operation import Candidate, Operation
from etc_dist.ops.tuning import Tuning, tuning_of
from etc_dist.schedule.plan import Choice
from etc_dist.world import World

SIZES = Shapes(
    models={"qwen3-32b": (5120, 25600), "8192x8192": (8192, 8192)},
    small=((136, 264), 20),
    rows=(1, 8, 32, 64, 128),
    drawn_rows=(1, 512, 1),
    drawn_sizes={"hidden": (1024, 8192, 8), "inner": (4096, 16384, 8)},
)
"""Hidden and inner size. All weights together have 2.1 and 1.1 GB."""
COUNT = 8
"""The matrix multiplications: to the inner size, back to the hidden one, and so on."""


def sizes_of(n: int, hidden: Any, inner: Any) -> tuple[Any, Any]:
    """The rows and columns of weight n."""
    return (inner, hidden) if n % 2 == 0 else (hidden, inner)


@graph_function
def chain_graph(
    g: Graph, *, dtype: str = "bfloat16", shapes: Sequence[TileShape] = SHAPES
) -> None:
    """x [rows, hidden], COUNT weights -> y [rows, hidden], on each rank its own. The
    dims `up_shape` and `down_shape` select the tiles of even and of odd matmuls."""
    rows, hidden, inner = g.dims("rows hidden inner")
    selected = g.dims("up_shape down_shape")
    x = g.input("x", (rows, hidden), dtype)
    weights = [
        g.input(f"w{n}", sizes_of(n, hidden, inner), dtype) for n in range(COUNT)
    ]
    y = g.output("y", (rows, hidden), dtype)
    blocks = RowBlocks(g, rows)
    last: Tensor = x
    events: EventTensor | None = None
    for n, weight in enumerate(weights):
        name, ends = f"w{n}", n == COUNT - 1
        columns = sizes_of(n, hidden, inner)[0]
        result = y if ends else g.local(f"y{n}", (rows, columns), dtype)
        tiles = blocks.tiles(name, selected[n % 2], shapes)
        operands = last, [weight], result
        events = blocks.multiply(
            *(name, tiles, tiles.matmul(dtype), operands, tiles.columns, events),
            notifies=None if ends else f"{name}_done",
        )
        last = result


class Chain(Operation):
    """op(x, *weights, out, stream=): the chain of all weights."""

    def __init__(self, world: World, schedule: str):
        axes = [sizes_of(n, "hidden", "inner") for n in range(COUNT)]
        weights = [f"w{n} [{rows}, {k}]" for n, (rows, k) in enumerate(axes)]
        inputs = ["x [rows, hidden]", *weights]
        table = ArgumentTable("Chain", world, inputs, "out [rows, hidden]")
        candidate = Candidate(chain_graph, w_layouts=("nk",), policy=self._choose)
        super().__init__(
            table, [candidate], world, schedule=schedule, trace=None, options={}
        )

    def __call__(self, *arrays: Any, stream: Any = None) -> Any:
        *inputs, out = arrays
        return self._call(inputs, out, stream)

    def policy(self, rows: int, hidden: int, inner: int) -> str:
        """The two tile shapes, as text."""
        dims = {"rows": rows, "hidden": hidden, "inner": inner}
        tuning, workers = tuning_of(self.world), self.program.workers
        chosen = self._choose(tuning, "nk", dims, workers)
        return ", then ".join(str(SHAPES[choice.value]) for choice in chosen)

    def _choose(
        self, tuning: Tuning, w_layout: str, dims: Mapping[str, int], workers: int
    ) -> list[Choice]:
        """As for the MLP, but without its measured pairs of tiles."""
        hidden, inner = dims["hidden"], dims["inner"]
        ups, downs = (
            rate(
                *(dims["rows"], *sizes_of(n, hidden, inner), workers),
                in_blocks=has_blocks(dims["rows"], self.world.size),
                tuning=tuning,
            )
            for n in range(2)
        )
        best = combined(ups, downs, SHAPES)[0]
        return [
            Choice("up_shape", best.up.number, list),
            Choice("down_shape", best.down.number, list),
        ]


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

    def make(self, schedule: str, **options: Any) -> Operation:
        return Chain(self.world, schedule)

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
        named = {f"w{n}": step for n, step in enumerate(steps)}
        self._baseline = captured(gpu, partial(run_steps, named))
        return {"baseline": Rival([self._baseline], results[-1:])}

    def parts(self, gpu: Gpu) -> Calls:
        return {"gemm": self._baseline}

    def limits(self, gemm_ms: float) -> tuple[float, float]:
        assert isinstance(self.device, Gpu)
        elements = sum(weight.size for weight in self.weights)
        flops = 2 * self.rows * elements
        return roofline_ms(2 * elements, flops, self.device.rates), 0.0

    def fields(self) -> dict[str, Any]:
        hidden, inner = self.sizes
        policy = self.made["ours"].policy(self.rows, hidden, inner)
        return {"M": self.rows, "N": hidden, "K": inner, "policy": policy}


def measure(run: Run) -> Iterator[Result]:
    if run.device.world.size > 1:
        raise SystemExit("chain: it runs on one rank")
    return measure_shapes(run, ChainWorkload, SIZES)


def add_options(parser: ArgumentParser) -> None:
    add_shapes(parser, SIZES.models)


TITLE = "Check and time matrix multiplications one after the other."
SUBJECT = Subject(TITLE, measure, add_options)
