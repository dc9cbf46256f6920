"""Matrix multiplications one after the other in one program, against cuBLAS.

launch/mpirun -n 1 benchmarks/chain.py --rows-per-rank 1,64,128

Each multiplies the result of the one before: the weights of the next one can be loaded
while its x is being computed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.device import Call, Gpu, roofline_ms, wide
from benchmarks.harness import begin, main, shapes_parser
from benchmarks.moe_torch import captured, captured_ours
from benchmarks.workload import BLOCK, WARM_UP, Calls, Rival, Workload, run
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

MODELS: Mapping[str, tuple[int, int]] = {
    "qwen3-32b": (5120, 25600),
    "8192x8192": (8192, 8192),
}
"""Hidden and inner size. All weights together have 2.1 and 1.1 GB."""
COUNT = 8
"""The matrix multiplications: to the inner size, back to the hidden one, and so on."""
ROWS = (1, 8, 32, 64, 128)
SMALL, SMALL_ROWS = (136, 264), 20
PROTOCOL = (
    "2 ms device sleep, event, call, event; each call a replayed CUDA graph; median "
    f"after {WARM_UP} warm-ups; blocks of {BLOCK} take turns"
)


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
    protocol = PROTOCOL
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

    def make(self, schedule: str) -> Operation:
        self._made = Chain(self.world, schedule)
        return self._made

    def call(self, operation: Any, number: int) -> Call:
        return partial(operation, self.xs[number], *self.weights, self.outs[number])

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
        self._baseline = captured(gpu, partial(run, named))
        return {"baseline": Rival([self._baseline], results[-1:])}

    def parts(self, gpu: Gpu) -> Calls:
        return {"gemm": self._baseline}

    def timed(self, gpu: Gpu, ours: Operation, rivals: Mapping[str, Rival]) -> Calls:
        calls = super().timed(gpu, ours, rivals)
        arrays = *self.xs, *self.weights, *self.outs
        return {**calls, "ours": captured_ours(gpu, ours, *arrays)}

    def limits(self, gemm_ms: float) -> tuple[float, float]:
        assert isinstance(self.device, Gpu)
        elements = sum(weight.size for weight in self.weights)
        flops = 2 * self.rows * elements
        return roofline_ms(2 * elements, flops, self.device.rates), 0.0

    def fields(self) -> dict[str, Any]:
        hidden, inner = self.sizes
        policy = self._made.policy(self.rows, hidden, inner)
        return {"M": self.rows, "N": hidden, "K": inner, "policy": policy}


def command_line() -> int:
    title = "Check and time matrix multiplications one after the other."
    options = shapes_parser(title, "chain", MODELS).parse_args()
    device = begin(options.cpu)
    if device.world.size > 1:
        raise SystemExit("chain.py: it runs on one rank")
    return main(device, ChainWorkload, MODELS, (SMALL, SMALL_ROWS), ROWS, options)


if __name__ == "__main__":
    sys.exit(command_line())
