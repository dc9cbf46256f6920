"""Matmuls, MLPs and collectives at the sizes of `benchmarks/random_sizes.py`, each in
one program for all sizes of a dtype and a layout of the weights.

The baseline is cuBLAS. For an MLP or a gated matmul on one GPU it is cuBLAS and the
SwiGLU that torch.compile makes for these sizes, in one CUDA graph; on several, cuBLAS
and NCCL. Its weights have the layout of ours.

Weights of over 1 GB take turns: copies of those whose result is checked. Tunings in the
user's cache are not read. A gate that is not met is recorded as a failure of the run.

--regret also times all tiles whose prediction is within 1.5 times the least one, each
after 1 GiB of other data was read."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from statistics import median
from typing import Any, NamedTuple, cast

from benchmarks import records
from benchmarks.device import WARM_UP, Call, Device, Gpu, captured
from benchmarks.harness import REPEATS, Result, Run, Subject, numbers
from benchmarks.protocol import compared, measure_times
from benchmarks.random_sizes import SEEDS, SIZES, Draw, draws, seed_of, summary
from benchmarks.records import Record
from benchmarks.subjects.collectives import (
    AllGatherMatmulWorkload,
    Collective,
    MatmulReduceScatterWorkload,
)
from benchmarks.subjects.matmul import ROTATED_BYTES, MatmulWorkload, taking_turns
from benchmarks.subjects.mlp import MLPWorkload
from benchmarks.tables import markdown
from benchmarks.workload import (
    BLOCK,
    Calls,
    GraphCall,
    Rival,
    Workload,
    in_turn,
    medians,
    run_steps,
)
from etc_dist import Matmul, build
from etc_dist.functions.epilogue import swiglu
from etc_dist.functions.tile_shape import TileShape, shapes_for
from etc_dist.ir import Graph, GraphFunction, graph_function
from etc_dist.layers.mlp import SharedMLP
from etc_dist.layers.mlp_policy import fastest_pair, rankings_of, sizes_of
from etc_dist.ops.matmul import matmul_graph
from etc_dist.ops.multiply import TiledMatmul, tiles_of_dims
from etc_dist.ops.operation import kept
from etc_dist.ops.tile_model import FAMILY, dims_of, predictions, text_of
from etc_dist.ops.tuning import PACKAGE, tuning_of

PROTOCOL = (
    "2 ms device sleep, event, call, event; {calls}; weights of "
    f"{ROTATED_BYTES / 1e9} GB take turns; median after {WARM_UP} warm-ups; blocks of "
    f"{BLOCK} take turns"
)
NEAR = 1.5
"""Times the least prediction: the tiles whose times `--regret` compares."""
CPU_DRAWS = 2


@graph_function
def gated_matmul_graph(
    g: Graph, *, dtype: str = "bfloat16", shapes: Sequence[TileShape] = FAMILY
) -> None:
    """x [m, k], gate and up [n, k] -> y [m, n] = silu(x gate.T) * (x up.T)."""
    m, n, k = g.dims("m n k")
    x = g.input("x", (m, k), dtype)
    weights = [g.input(name, (n, k), dtype) for name in ("gate", "up")]
    y = g.output("y", (m, n), dtype)
    tiles = tiles_of_dims(g, "", shapes, m)
    TiledMatmul(g, "", tiles, dtype, x, weights, y, swiglu).add()


class Choice(NamedTuple):
    """Tiles: the dims that select them in a call, their text, the predicted time."""

    dims: Mapping[str, int]
    text: str
    us: float


def copy_of(w: Any) -> Any:
    """A copy of a weight, transposed if it is a transposed view."""
    return w.copy() if w.flags.c_contiguous else w.T.copy().T


class Random(Workload):
    """An operation at a draw's sizes. Of the first class of its bases."""

    protocol = PROTOCOL.format(calls="each rank's call by its host")

    def __init__(self, device: Device, drawn: Draw):
        sizes, kind = (drawn.n, drawn.k), drawn.variant
        name = f"draw {drawn.number}"
        super().__init__(device, name, sizes, drawn.rows, kind.dtype, kind.w_layout)
        self.draw_of, self.inputs = drawn, 1
        self._activation: tuple[Any, Any, Call] | None = None

    @staticmethod
    def drawn(op: str, seed: str, ranks: int, *, is_timed: bool) -> list[Draw]:
        """The shapes of a seed; on the CPU backend a few small ones."""
        sizes = SIZES[op]
        all_draws = list(draws(sizes if is_timed else sizes.small, seed, ranks))
        return all_draws if is_timed else all_draws[:CPU_DRAWS]

    @staticmethod
    def prepare(device: Device, drawn: Sequence[Any]) -> None:
        """What is done once for all draws of a seed."""

    def close(self) -> None:
        """Closes operations that the next draw does not use."""

    def choices(self) -> list[Choice]:
        """The tiles that the policy may choose, its choice first; none if the program
        has no policy."""
        return []

    @cached_property
    def turns(self) -> list[tuple[Any, ...]]:
        """The weights, and on GPUs copies that take turns with them."""
        count = 1
        if isinstance(self.device, Gpu):
            count = taking_turns(sum(w.nbytes for w in self.weights))
        copies = [tuple(map(copy_of, self.weights)) for _ in range(count - 1)]
        return [self.weights, *copies]

    def call(self, operation: Any, weights: Sequence[Any], out: Any) -> Call:
        return partial(operation, self.xs[0], *weights, out)

    def calls(self, operation: Any, outs: Sequence[Any]) -> list[Call]:
        return [self.call(operation, self.weights, out) for out in outs]

    def timed(self, gpu: Gpu, ours: Any, rivals: Mapping[str, Rival]) -> Calls:
        calls = [self.call(ours, weights, self.outs[0]) for weights in self.turns]
        own_call = in_turn(self.timed_calls(gpu, calls))
        return {"ours": own_call, **{n: in_turn(r.calls) for n, r in rivals.items()}}

    def activation(
        self, gpu: Gpu, width: int, out: Any = None
    ) -> tuple[Any, Any, Call]:
        """Gate and up, the place of their SwiGLU (`out`, if given), and its compiled
        call: one for all turns, since to compile takes seconds."""
        if self._activation is None:
            gate_and_up = gpu.empty((self.m, 2 * width), self.dtype)
            active = gpu.empty((self.m, width), self.dtype) if out is None else out
            self._activation = (
                gate_and_up,
                active,
                gpu.compiled_swiglu(gate_and_up, active),
            )
        return self._activation

    def unfused(self, gpu: Gpu, weights: Sequence[Any], out: Any) -> Mapping[str, Call]:
        """The steps of other libraries, unless `rivals` names them."""
        return {}

    def rivals(self, gpu: Gpu) -> dict[str, Rival]:
        (out,) = self.new_outs()
        every: list[Call]
        every = [partial(run_steps, self.unfused(gpu, w, out)) for w in self.turns]
        if self.is_replayed:
            every = [captured(gpu, call) for call in every]
        return {"baseline": Rival(every, [out])}

    def durations(self, times: Mapping[str, Sequence[float]]) -> dict[str, Any]:
        speedup = median(times["baseline"]) / median(times["ours"])
        return {**medians(times), "speedup": round(speedup, 4)}

    def fields(self) -> dict[str, Any]:
        (choice, *_) = self.choices() or [Choice({}, "", 0.0)]
        return {
            **Workload.fields(self),
            "w_layout": self.layout,
            "policy": choice.text or None,
            "predicted_us": round(choice.us, 2) or None,
            "seed": self.draw_of.seed,
        }


class RandomMatmul(Random, MatmulWorkload):
    op = "random_matmul"
    libraries = "SwiGLU of gated ones by torch.compile; "
    protocol = PROTOCOL.format(calls="each call a replayed CUDA graph")

    def __init__(self, device: Device, drawn: Draw):
        super().__init__(device, drawn)
        self.is_gated = drawn.variant.gated
        if self.is_gated:
            self.baseline_leeway = 2.0  # it rounds gate and up, too

    @property
    def out_shape(self) -> tuple[int, int]:
        return self.rows, self.n // 2 if self.is_gated else self.n

    @property
    def program(self) -> GraphCall:
        """That runs on any tiles, for all draws of this dtype and layout."""
        program_by_variant = cast("dict[object, GraphCall]", self.world.kept)
        if self.draw_of.variant not in program_by_variant:
            graph = partial(matmul_graph, w_layout=self.layout)
            names = ["x", "w", "y"]
            if self.is_gated:
                graph, names = partial(gated_matmul_graph), ["x", "gate", "up", "y"]
            size = self.world.size
            program = GraphCall(graph(size, dtype=self.dtype), self.world, names)
            program_by_variant[self.draw_of.variant] = program
        return program_by_variant[self.draw_of.variant]

    def make(self, schedule: str, **options: Any) -> Any:
        if not self.is_gated:
            return kept(self.world, Matmul, schedule=schedule)
        self.made["ours"] = self.program
        self.program.dims = {**self.choices()[0].dims}
        return self.program

    def call(self, operation: Any, weights: Sequence[Any], out: Any) -> Call:
        (w,), half = weights, self.n // 2
        return super().call(
            operation, [w[:half], w[half:]] if self.is_gated else [w], out
        )

    def reference(self, number: int = 0) -> Any:
        gate_and_up = super().reference(number)
        if not self.is_gated:
            return gate_and_up
        gate, up = gate_and_up[:, : self.n // 2], gate_and_up[:, self.n // 2 :]
        return gate / (1 + self.device.xp.exp(-gate)) * up

    def unfused(self, gpu: Gpu, weights: Sequence[Any], out: Any) -> Mapping[str, Call]:
        (x,), (w,) = self.xs, weights
        if not self.is_gated:
            return {"gemm": gpu.matmul(x, w, out)}
        gate_and_up, _, swiglu = self.activation(gpu, self.n // 2, out)
        return {"gate_up": gpu.matmul(x, w, gate_and_up), "swiglu": swiglu}

    def choices(self) -> list[Choice]:
        shapes = shapes_for(self.layout, FAMILY)
        n, workers = self.out_shape[1], self.made["ours"].program.workers
        ranking = predictions(
            shapes,
            (self.rows, n, self.k),
            workers,
            tuning_of(self.world).tiles,
            gated=self.is_gated,
            w_layout=self.layout,
        )
        return [
            Choice(
                dims_of(prediction.tiling),
                text_of(shapes, prediction.tiling),
                prediction.us,
            )
            for prediction in ranking
        ]

    def fields(self) -> dict[str, Any]:
        return {**Random.fields(self), "gated": self.is_gated}

    def regret(self, gpu: Gpu) -> dict[str, Any]:
        """How much longer the choice takes than the best of all likely tiles."""
        choices = self.choices()
        most = NEAR * min(choice.us for choice in choices)
        likely = [
            choice for choice in choices if choice.us <= most or choice == choices[0]
        ]
        weights = [w.T for w in self.weights] if self.layout == "kn" else self.weights
        calls: dict[str, Call] = {}
        for choice in likely:
            self.program.dims = {**choice.dims}
            call = self.call(self.program, weights, self.outs[0])
            (calls[choice.text],) = self.timed_calls(gpu, [call])
        times = measure_times(gpu, calls, BLOCK, is_cold=True)
        ms = {text: median(choice_times) for text, choice_times in times.items()}
        best = min(ms, key=lambda text: ms[text])
        regret = round(ms[likely[0].text] / ms[best] - 1, 4)
        return {"regret": regret, "best_policy": best, "compared": len(likely)}


class RandomMLPRanks(Random, MLPWorkload):
    op = "random_mlp_ranks"

    def make(self, schedule: str, **options: Any) -> Any:
        return kept(self.world, SharedMLP, schedule=schedule)

    def call(self, operation: Any, weights: Sequence[Any], out: Any) -> Call:
        gate_up, down = weights
        inputs = self.xs[0], gate_up[: self.k], gate_up[self.k :], down
        return partial(operation.call, inputs, out)

    def unfused(self, gpu: Gpu, weights: Sequence[Any], out: Any) -> Mapping[str, Call]:
        gate_up, down = weights
        return self.steps(gpu, self.xs[0], gate_up, down, out)

    def choices(self) -> list[Choice]:
        program = self.made["ours"].program
        if program.plan.policy is None:
            return []
        sizes, tuning = sizes_of(self.m, self.n, self.k), tuning_of(self.world)
        rankings = rankings_of(sizes, program.workers, FAMILY, tuning)
        pair = fastest_pair(rankings, tuning.tiles.call_us, program.workers)
        tilings = pair.first.tiling, pair.second.tiling
        text = " + ".join(text_of(FAMILY, tiling) for tiling in tilings)
        return [Choice({}, text, pair.us)]


class RandomMLP(RandomMLPRanks):
    op = "random_mlp"
    libraries = "SwiGLU by torch.compile; "
    protocol = RandomMatmul.protocol
    is_replayed = True

    def unfused(self, gpu: Gpu, weights: Sequence[Any], out: Any) -> Mapping[str, Call]:
        """torch on one GPU."""
        (x,), (gate_up, down) = self.xs, weights
        gate_and_up, active, swiglu = self.activation(gpu, self.k)
        return {
            "gate_up": gpu.matmul(x, gate_up, gate_and_up),
            "swiglu": swiglu,
            "down": gpu.matmul(active, down, out),
        }


class RandomCollective(Random, Collective):
    """The baseline has the weight in the same layout."""

    def make_weights(self) -> tuple[Any, ...]:
        w = self.w(self.world.rank)
        return (self.device.transposed(w) if self.layout == "kn" else w,)

    def make(self, schedule: str, **options: Any) -> Any:
        return kept(self.world, self.operation, schedule=schedule)

    def unfused(self, gpu: Gpu, weights: Sequence[Any], out: Any) -> Mapping[str, Call]:
        return cast(Mapping[str, Call], self.steps(gpu, self.xs[0], *weights, out))


class RandomReduceScatter(RandomCollective, MatmulReduceScatterWorkload):
    op = "random_reduce_scatter"


class RandomAllGather(RandomCollective, AllGatherMatmulWorkload):
    op = "random_all_gather"


def measure(kind: type[Random], run: Run) -> Iterator[Result]:
    """The results of all draws, then the summary; a gate that is not met is a failure
    of the run."""
    device, options = run.device, run.options
    is_timed = isinstance(device, Gpu)
    if isinstance(device, Gpu):
        run.shared["baseline"] = kind.libraries + device.baseline()
        run.shared["protocol"] = kind.protocol
    results: list[Record] = []
    for turn in options.seeds:
        seed = seed_of(records.commit(), run.op, turn)
        all_draws = kind.drawn(run.op, seed, device.world.size, is_timed=is_timed)
        drawn = all_draws[: options.draws]
        kind.prepare(device, drawn)
        for draw in drawn:
            case = kind(device, draw)
            values, wrong = compared(case, case.make("static"), REPEATS)
            if isinstance(device, Gpu) and getattr(options, "regret", False):
                values = {**values, **cast(RandomMatmul, case).regret(device)}
            if not wrong:
                results.append(Record(**values))
            yield values, wrong
            case.close()
            del case  # before the next one is made
            device.release()
    if is_timed:
        check_gates(run, run.op, results)


def compile_at_once(graphs: Sequence[GraphFunction]) -> None:
    """Compiles the programs of graphs into the cache, where they are found later."""
    with ThreadPoolExecutor() as pool:
        for _ in pool.map(build, graphs):
            pass


def check_gates(run: Run, op: str, results: Sequence[Record]) -> None:
    """Print the summary of an operation's draws; a gate that is not met is a failure of
    the run."""
    rows = summary(op, results)
    if rows:
        run.say(markdown(rows))
    run.failed += [" ".join(row.values()) for row in rows if row["met"] == "no"]


def refusal(options: Namespace) -> str:
    is_known = records.commit() != "unknown"
    return "" if is_known else "the sizes follow from the commit: set BENCH_COMMIT"


def add_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--seeds", type=numbers, default=SEEDS, help=f"some of {SEEDS}")
    add("--draws", type=int, help="only the first draws of each seed")


def add_matmul_options(parser: ArgumentParser) -> None:
    add_options(parser)
    text = f"also time all tiles within {NEAR} times the least prediction"
    parser.add_argument("--regret", action="store_true", help=text)


def subject(kind: type[Random]) -> Subject:
    return Subject(
        f"Check and time {kind.op} at sizes that follow from the commit.",
        partial(measure, kind),
        add_matmul_options if kind is RandomMatmul else add_options,
        refusal=refusal,
        settings={"tuning": PACKAGE},
    )


KINDS = (RandomMatmul, RandomMLP, RandomReduceScatter, RandomAllGather, RandomMLPRanks)
SUBJECTS = {kind.op: subject(kind) for kind in KINDS}
