"""Predictions for several numbers of hosts, as a table and as a picture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from etc_dist.codegen.cuda import MAX_NEAR
from etc_dist.errors import expect_choice, expect_range
from etc_dist.ir import GraphFunction
from etc_dist.layers.mlp import mlp_graph
from etc_dist.layers.mlp_policy import choose_tiles
from etc_dist.ops.all_gather_matmul import all_gather_matmul_graph
from etc_dist.ops.matmul_reduce_scatter import matmul_reduce_scatter_graph
from etc_dist.ops.tile_model import FAMILY, choose
from etc_dist.ops.tuning import default_tuning
from etc_dist.predict.machine import Machine
from etc_dist.predict.simulation import PredictedRun, Times, simulate_run
from etc_dist.predict.times import ModelTimes, TracedTimes
from etc_dist.runtime.trace import Trace
from etc_dist.schedule import schedule_static
from etc_dist.world.hosts import MOST_RANKS

OPERATIONS: Mapping[str, Callable[..., GraphFunction]] = {
    "all_gather_matmul": all_gather_matmul_graph,
    "matmul_reduce_scatter": matmul_reduce_scatter_graph,
    "mlp": mlp_graph,
}
HOSTS = (2, 4, 8, 16, 32, 64, 128)


def predict_hosts(
    name: str,
    dims: Mapping[str, int],
    hosts: Sequence[int],
    local_size: int,
    machine: Machine,
    trace: Trace | None = None,
) -> Iterator[PredictedRun]:
    """A prediction for each number of hosts of `local_size` ranks. trace: of the times
    of tasks; default: a model of the GPU. Errors as for `simulate_run` and
    `TracedTimes`; ArgumentError for more ranks than a world can have."""
    expect_choice(name, [*OPERATIONS], "OPERATION")
    expect_range(local_size, 1, MAX_NEAR, "local_size")
    for count in hosts:
        expect_range(count * local_size, 1, MOST_RANKS, "hosts * local_size")
    for count in hosts:
        graph = OPERATIONS[name](count * local_size, local_size=local_size)
        times: Times = ModelTimes(default_tuning())
        if trace is not None:
            times = TracedTimes.of(graph, trace)
        all_dims = with_tiles(graph, dims, machine.workers)
        yield simulate_run(schedule_static(graph), all_dims, times, machine)


def with_tiles(
    graph: GraphFunction, dims: Mapping[str, int], workers: int
) -> Mapping[str, int]:
    """Dims that arrays have, with those of the tiles that the operation would choose on
    an H200."""
    tuning, ranks = default_tuning(), graph.world_size
    names, lengths = {dim.name for dim in graph.dims}, dims.values()
    sizes = [dims.get(name, 0) for name in ("rows", "n", "k")]
    if "shape" in names and min(sizes) >= 1:
        all_sizes = ranks * sizes[0], sizes[1], sizes[2]
        choices = choose(all_sizes, workers, FAMILY, tuning, ranks=ranks)
    elif "down_shape" in names and len(lengths) == 3 and min(lengths) >= 1:
        choices = choose_tiles(
            dims, ranks, workers, FAMILY, tuning=tuning, of_one_rank=True
        )
    else:
        return dims
    return {**dims, **{choice.dim: choice.value for choice in choices}}


def show_machine(machine: Machine, origin: str) -> str:
    """What a prediction assumes."""
    links = "".join(
        f"{link.name} link: {link.gbs:g} GB/s, {link.latency_us:g} us, "
        f"{link.message_us:g} us a message\n"
        for link in (machine.far, machine.near)
    )
    return f"times of tasks: {origin}, {machine.workers} workers a rank\n{links}"


def show_heading() -> str:
    """The titles over `show_line`. share: the largest bound over the predicted time."""
    titles = ("predicted us", "GEMM us", "near us", "far us", "bound us", "share")
    return f"{'hosts':>5}  {'ranks':>5}" + "".join(f"{t:>14}" for t in titles)


def show_line(run: PredictedRun) -> str:
    """A prediction as a line, in microseconds."""
    numbers = (run.us, run.tensor_us, run.near_us, run.far_us, run.bound_us)
    texts = "".join(f"{us:>14.1f}" for us in numbers)
    return f"{run.hosts:>5}  {run.ranks:>5}{texts}{run.bound_us / run.us:>14.1%}"


def draw(runs: Sequence[PredictedRun], title: str, path: Path) -> None:
    """Draw the predicted times and their bounds over the number of hosts."""
    # Imported here, as Matplotlib is slow to import.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots()
    hosts = [run.hosts for run in runs]
    axes.plot(hosts, [run.us / 1e3 for run in runs], "o-", label="predicted")
    for colour_idx, name in enumerate(runs[0].bounds, 1):
        times = [run.bounds[name] / 1e3 for run in runs]
        axes.plot(hosts, times, ":", color=f"C{colour_idx}", label=f"bound: {name}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(hosts, hosts)
    axes.set_xlabel("hosts")
    axes.set_ylabel("ms")
    axes.set_title(f"{title}\npredicted, not measured", fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path)
