"""The fused collectives on real data: errors, times, proofs and timelines.

    sh launch/demo                       (on as many ranks as GPUs, or 4)
    sh launch/demo --share-gpu           (on 4 ranks, also where there is one GPU)
    launch/mpirun -n 2 examples/demo.py [--output FOLDER]

On GPUs where every rank can use one, else on the CPU backend, with smaller shapes.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
import textwrap
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import etc_dist
from etc_dist.errors import CpuOnlyWarning
from etc_dist.ops.operation import with_sizes
from etc_dist.ops.tile_model import FAMILY
from etc_dist.verify.verify import verify

BF16 = ml_dtypes.bfloat16
ROUNDS = 5
"""Measurements of each time; the median of the slowest ranks is shown."""

WIDTH = 79
"""Columns of the report; launch/mpirun puts the rank in front of each line."""


class OnGpu:
    """Arrays, clock and the unfused baseline of a rank with a GPU."""

    rows_in_all, n, k = 8192, 8192, 3584  # of matmul_reduce_scatter
    n_gathered, k_gathered = 7168, 8192  # of all_gather_matmul
    baseline = "cuBLAS and NCCL"
    remark = ""

    def __init__(self, world: etc_dist.World):
        if world.ranks_per_gpu > 1:
            self.baseline = ""
            self.remark = (
                f"{world.ranks_per_gpu} ranks share a GPU, so times mean nothing. NCCL "
                "refuses to run like this, so nothing is compared with it."
            )
        try:
            import cupy
            from cupy.cuda import nccl
            from cupy_backends.cuda.libs import cublas
        except ImportError as fault:
            raise SystemExit(
                f"the unfused baseline of this demo needs cuBLAS and NCCL: {fault}\n"
                "to do: pip install 'cupy-cuda13x[ctk]' nvidia-nccl-cu13 "
                "(or 'cupy-cuda12x[ctk]' nvidia-nccl-cu12)"
            ) from fault
        self.xp, self._world, self._cublas = cupy, world, cublas
        self._alpha, self._beta = np.ones(1, np.float32), np.zeros(1, np.float32)
        if self.baseline:
            unique_id = world.gather(nccl.get_unique_id() if world.rank == 0 else None)
            self._nccl = nccl.NcclCommunicator(world.size, unique_id[0], world.rank)
        self._bfloat16, self._sum = 9, 0  # ncclBfloat16, ncclSum

    def prepared(self, x: Any) -> Any:
        """`x` in the dtype of the baseline."""
        return x

    def matmul(self, x: Any, w: Any, y: Any) -> None:
        """y = x @ w.T by cuBLAS, which is column-major: y.T = w @ x.T."""
        (m, k), n = x.shape, w.shape[0]
        bf16, fp32, default, yes, no = 14, 68, -1, 1, 0
        alpha, beta = self._alpha.ctypes.data, self._beta.ctypes.data
        handle = self.xp.cuda.device.get_cublas_handle()
        # cuBLAS takes two flags, three sizes, then a pointer, a dtype and a stride of
        # each matrix, after its factor.
        self._cublas.gemmEx(
            handle,
            yes,
            no,
            n,
            m,
            k,
            alpha,
            w.data.ptr,
            bf16,
            k,
            x.data.ptr,
            bf16,
            k,
            beta,
            y.data.ptr,
            bf16,
            n,
            fp32,
            default,
        )

    def reduce_scatter(self, parts: Any, y: Any) -> None:
        self._nccl.reduceScatter(
            parts.data.ptr, y.data.ptr, y.size, self._bfloat16, self._sum, self._stream
        )

    def all_gather(self, x: Any, all_x: Any) -> None:
        self._nccl.allGather(
            x.data.ptr, all_x.data.ptr, x.size, self._bfloat16, self._stream
        )

    def seconds(self, call: Callable[[], object], repeats: int = 10) -> float:
        """Seconds of one call on this rank's GPU, out of several back to back."""
        start, end = (self.xp.cuda.Event() for _ in range(2))
        self._world.barrier()
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        return self.xp.cuda.get_elapsed_time(start, end) / 1e3 / repeats

    @property
    def _stream(self) -> int:
        return self.xp.cuda.get_current_stream().ptr


class OnCpu:
    """Arrays, clock and the unfused baseline of a rank without a GPU."""

    rows_in_all, n, k = 1024, 512, 256
    n_gathered, k_gathered = 512, 256
    baseline = "NumPy and MPI, fp32"
    remark = (
        "The CPU backend is not fast: it simulates the GPU's workers, one task at a "
        "time, to check programs."
    )

    def __init__(self, world: etc_dist.World):
        from mpi4py import MPI

        warnings.simplefilter("ignore", CpuOnlyWarning)  # of fp32 arrays

        self.xp, self._world, self._comm = np, world, MPI.COMM_WORLD

    def prepared(self, x: Any) -> Any:
        return x.astype(np.float32)  # NumPy multiplies bfloat16 element by element

    def matmul(self, x: Any, w: Any, y: Any) -> None:
        np.matmul(x, w.T, out=y)

    def reduce_scatter(self, parts: Any, y: Any) -> None:
        self._comm.Reduce_scatter_block(parts, y)

    def all_gather(self, x: Any, all_x: Any) -> None:
        self._comm.Allgather(x, all_x)

    def seconds(self, call: Callable[[], object]) -> float:
        self._world.barrier()
        start = time.perf_counter()
        call()
        return time.perf_counter() - start


@dataclasses.dataclass
class Case:
    """One fused collective with its data, its reference and the unfused baseline."""

    title: str
    see: str  # caption of the timeline
    meanings: dict[str, str]  # its legend, by call
    shape: tuple[int, int, int]
    make: Callable[..., Any]
    x: Any
    w: Any
    reference: Any
    unfused: Callable[[], object]


def matmul_reduce_scatter_case(world: etc_dist.World, on: Any) -> Case:
    rows = on.rows_in_all // world.size
    m, n, k = rows * world.size, on.n, on.k
    xs = [random(on, rank, m, k) for rank in range(world.size)]
    ws = [random(on, 100 + rank, n, k) for rank in range(world.size)]
    own_rows = slice(world.rank * rows, (world.rank + 1) * rows)
    reference = sum(
        exact(x[own_rows]) @ exact(w).T for x, w in zip(xs, ws, strict=True)
    )
    x, w = on.prepared(xs[world.rank]), on.prepared(ws[world.rank])
    partial, y = on.xp.empty((m, n), x.dtype), on.xp.empty((rows, n), x.dtype)

    def unfused() -> None:
        on.matmul(x, w, partial)
        on.reduce_scatter(partial, y)

    def make(**more: Any) -> Any:
        operation = with_sizes(etc_dist.MatmulReduceScatter, shapes=FAMILY)
        return operation(world=world, **more)

    see = "rows are sent (orange) and summed (red) while GEMM tiles (blue) still run"
    meanings = {
        "tile_matmul": "GEMM tiles of all ranks' rows",
        "return_rows": "rows on their way to the rank that owns them",
        "sum_ranks": "sums of the received rows",
    }
    title, shape = "GEMM + Reduce-Scatter", (m, n, k)
    return Case(
        title,
        see,
        meanings,
        shape,
        make,
        xs[world.rank],
        ws[world.rank],
        reference,
        unfused,
    )


def all_gather_matmul_case(world: etc_dist.World, on: Any) -> Case:
    rows = on.rows_in_all // world.size
    m, n, k = rows * world.size, on.n_gathered, on.k_gathered
    xs = [random(on, rank, rows, k) for rank in range(world.size)]
    weights = random(on, 100 + world.rank, n, k)
    reference = on.xp.concatenate([exact(x) for x in xs]) @ exact(weights).T
    x, w = on.prepared(xs[world.rank]), on.prepared(weights)
    all_x, y = on.xp.empty((m, k), x.dtype), on.xp.empty((m, n), x.dtype)

    def unfused() -> None:
        on.all_gather(x, all_x)
        on.matmul(all_x, w, y)

    def make(**more: Any) -> Any:
        return with_sizes(etc_dist.AllGatherMatmul, shapes=FAMILY)(world=world, **more)

    see = (
        "blue GEMM tiles of own rows begin at once, orange bars send rows meanwhile, "
        "and green tiles of other ranks' rows begin as these arrive"
    )
    meanings = {
        "tile_matmul": "GEMM tiles of own rows",
        "push_rows": "own rows on their way to the other ranks",
        "multiply_peer": "GEMM tiles of rows that have arrived",
    }
    title, shape = "AllGather + GEMM", (m, n, k)
    return Case(
        title, see, meanings, shape, make, xs[world.rank], weights, reference, unfused
    )


def random(on: Any, seed: int, *shape: int) -> Any:
    """Random bfloat16 values: the same on every rank for the same seed."""
    values = np.random.default_rng(seed).random(shape, np.float32)
    return on.xp.asarray(2 * values - 1).astype(BF16)


def exact(x: Any) -> Any:
    return x.astype(np.float32)


@dataclasses.dataclass
class Result:
    """The result of a case, the same on every rank."""

    error: float
    same_bits: bool
    fused: float
    unfused: float | None
    proof: Any
    files: list[Path]
    seen: str


def run(case: Case, world: etc_dist.World, on: Any, output: Path) -> Result:
    """Check and measure a case, and draw its timeline."""
    with case.make() as op:
        error, same_bits, proof = check(op, case, world)
        y = op(case.x, case.w)
        calls = [lambda: op(case.x, case.w, y)]
        if on.baseline:
            calls.append(case.unfused)
        # In turn, so that all are measured at the same temperature and clocks.
        rounds = [
            [max(world.gather(on.seconds(call))) for call in calls]
            for _ in range(ROUNDS)
        ]
        op.synchronize()
    fused, unfused = (*map(statistics.median, zip(*rounds, strict=True)), None)[:2]
    drawn = draw(case, world, output)
    return Result(error, same_bits, fused, unfused, proof, *drawn)


def check(op: Any, case: Case, world: etc_dist.World) -> tuple[float, bool, Any]:
    """The relative error, whether two runs give the same bits, and the proof."""
    m, n, k = case.shape
    dims = {"rows": m // world.size, "n": n, "k": k}
    y = op(case.x, case.w)
    again = op(case.x, case.w)
    # The program proves the same; here for the numbers.
    plan, workers = op.program.plan, op.program.workers
    proof = world.rank == 0 and verify(plan, plan.chosen(dims, workers), workers)
    op.synchronize()
    off, size = (
        sum(world.gather(float((v * v).sum())))
        for v in (exact(y) - case.reference, case.reference)
    )
    has_same_bits = all(
        world.gather(bool((y.view(np.int16) == again.view(np.int16)).all()))
    )
    return (off / size) ** 0.5, has_same_bits, proof


def draw(case: Case, world: etc_dist.World, output: Path) -> tuple[list[Path], str]:
    """Draw the timeline of a traced run. Returns the files and their caption."""
    with case.make(trace=True) as op:
        for _ in range(2):
            op(case.x, case.w)
        op.synchronize()
        trace = op.program.trace()
        name = op.program.plan.graph.name.removesuffix("_graph")
    files = [output / f"{name}.png", output / f"{name}.json"]
    observation = f"What to see: {overlap(trace, case.see)}."
    if world.rank == 0:
        m, n, k = case.shape
        title = f"{case.title}: M {m}, N {n}, K {k}, {world.size} ranks, "
        shared = f", {world.ranks_per_gpu} ranks a GPU" * (world.ranks_per_gpu > 1)
        title += f"backend {world.backend}{shared}"
        trace.png(files[0], title, observation, case.meanings)
        trace.perfetto(files[1])
    return files, observation


def overlap(trace: Any, see: str) -> str:
    """`see`, with the share of rank 0's transfers that overlap its GEMM."""
    own_records = [r for r in trace.records if r.rank == 0]
    last = max(r.end_ns for r in own_records if r.lane == "tensor")
    starts = [r.start_ns for r in own_records if r.lane != "tensor"]
    early = sum(start < last for start in starts)
    share = f"{early} of {len(starts)} transfers on rank 0 begin before its last tile"
    return f"{see}. {share} ends" if starts else "GEMM tiles; one rank sends nothing"


def report(world: etc_dist.World, on: Any, results: list[tuple[Case, Result]]) -> None:
    """Print the results; called on rank 0."""
    print(
        "Two fused collectives: one kernel per rank computes and communicates at once."
    )
    show(world.show())
    print("\n--- Results, in bfloat16 ---\n")
    head = f"{'M':>5} {'N':>5} {'K':>5} {'error':>8} {'bits':>5}"
    print(f"{'':21} {head} {'fused':>9} {'unfused':>9}")
    for case, result in results:
        m, n, k = case.shape
        bits = "same" if result.same_bits else "DIFFER"
        print(
            f"{case.title:21} {m:>5} {n:>5} {k:>5} {result.error:>8.1e} {bits:>5} "
            f"{milliseconds(result.fused)} {milliseconds(result.unfused)}"
        )
    print("\nerror:   relative to fp32; rounding to bfloat16 alone gives 1.7e-03")
    print("bits:    of a second run")
    print(f"fused:   milliseconds, median of {ROUNDS}, of the slowest rank")
    baseline = on.baseline and f"{on.baseline}, one step after the other"
    print(f"unfused: {baseline or 'not run'}")
    if on.remark:
        show(on.remark)
    print("\n--- Proofs, made before the first run ---\n")
    for case, result in results:
        proof = result.proof
        show(
            f"{case.title}: {proof.tasks} tasks and {proof.events} events on all ranks "
            f"were proved free of deadlocks and data races in {proof.seconds:.2f} s."
        )
    print("\n--- Timelines of every task, by rank, worker and lane ---\n")
    for case, result in results:
        picture, trace = result.files
        print(f"{case.title}: {picture}\n  {trace} (open it in ui.perfetto.dev)")
        show(result.seen)
        print()
    print("Next: docs/tutorial.md, your first graph and CUDA body.")


def milliseconds(seconds: float | None) -> str:
    return f"{seconds * 1e3:>9.3f}" if seconds is not None else f"{'-':>9}"


def show(text: str) -> None:
    print(textwrap.fill(text, WIDTH))


def output_folder(world: etc_dist.World, path: Path | None) -> Path:
    """A folder that rank 0 can write: `path`, else demo-output or a temporary one."""
    folder, fault = path or Path("demo-output"), ""
    if world.rank == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            fault = f"nothing can be written to {folder}: {error.strerror}"
            if path is None:
                folder = Path(tempfile.mkdtemp(prefix="demo-output-"))
                show(f"{fault}. The pictures will be in {folder}.")
                fault = ""
    folder, fault = world.gather((folder, fault))[0]
    if fault:
        raise SystemExit(f"{fault}. To do: name another folder by --output")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="folder (default: demo-output)")
    path = parser.parse_args().output
    with etc_dist.start() as world:
        output = output_folder(world, path)
        on = OnGpu(world) if world.backend == "cuda" else OnCpu(world)
        results = []
        for make_case in (matmul_reduce_scatter_case, all_gather_matmul_case):
            case = make_case(world, on)
            results.append((case, run(case, world, on, output)))
        if world.rank == 0:
            report(world, on, results)
    wrong = [case.title for case, r in results if r.error > 5e-3 or not r.same_bits]
    if wrong:
        raise SystemExit(f"wrong results: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
