"""All tests and benchmarks that need several GPUs, in parts, the most important first.

.venv/bin/python benchmarks/several_gpus.py [--ranks N] [--seconds 480] [PART ...]

Each part runs on all GPUs, within a time limit. Shapes with a record of this commit
and number of ranks are not measured again: an interrupted run can be continued.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import decode_step, records
from benchmarks.workload import MODELS
from etc_dist.errors import ArgumentError
from etc_dist.models.part import check_ranks

PYTEST = ("-m", "pytest", "-q", "--color=no", "--timeout-method=thread", "--with-mpi")
COLLECTIVES = ("matmul_reduce_scatter", "all_gather_matmul")
TWO_MODELS = ("qwen3-32b", "llama3-70b")
FEW_ROWS = (8, 32, 128, 256, 512, 1024, 2048)
"""Rows of all ranks together."""
MLP_ROWS = (8, 32, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Rows of all ranks together."""
MOE_TOKENS = (128, 512, 2048, 8192)
"""Tokens of a rank."""
ROWS = (1024,)
"""Rows of a rank: 8192 on eight ranks."""
DECODED = ("qwen3-32b", "qwen3-30b-a3b")
BATCHES = (1, 8, 32, 128)
"""Requests of a decode step."""


@dataclass(frozen=True)
class Job:
    """A command that runs on all ranks. ranks: their number; None for that of GPUs.
    launcher: "mpirun", "torchrun", or "itself" for a command that starts its ranks."""

    command: tuple[str, ...]
    ranks: int | None = None
    launcher: str = "mpirun"


Known = Sequence[Any]
"""The records of this commit on this number of ranks."""


def tests(ranks: int, known: Known) -> Iterator[Job]:
    yield Job(("python", *PYTEST, "-m", "mpi", "tests"))


def deaths(ranks: int, known: Known) -> Iterator[Job]:
    # The tests start jobs, and kill one of their ranks.
    killed = "tests/runtime/test_faults.py", "-k", "death", "--durations=3"
    yield Job(("-m", "pytest", "-q", "--color=no", *killed), launcher="itself")


def soak(ranks: int, known: Known) -> Iterator[Job]:
    if not any(record.op == "soak" for record in known):
        yield Job(("benchmarks/soak.py",))


def collectives(ranks: int, known: Known) -> Iterator[Job]:
    for op in COLLECTIVES:
        yield from missing(known, op, list(MODELS), ROWS, ranks)


def few_rows(ranks: int, known: Known) -> Iterator[Job]:
    for op in COLLECTIVES:
        totals = [total // ranks for total in FEW_ROWS if total % ranks == 0]
        yield from missing(known, op, TWO_MODELS, totals, ranks)


def mlp(ranks: int, known: Known) -> Iterator[Job]:
    rows = [total // ranks for total in MLP_ROWS if total % ranks == 0]
    yield from missing(known, "mlp", TWO_MODELS, rows, ranks)


def moe(ranks: int, known: Known) -> Iterator[Job]:
    for parallel in ("expert", "tensor"):
        op = f"moe_{parallel}_parallel"
        for routing in ("uniform", "zipf"):
            done = {r.M for r in known if r.op == op and r.routing == routing}
            rows = ranks if parallel == "tensor" else 1
            left = [tokens for tokens in MOE_TOKENS if tokens * rows not in done]
            options = ("--parallel", parallel, "--routing", routing)
            if left:
                yield Job(("benchmarks/moe.py", *options, "--tokens", joined(left)))


def decode(ranks: int, known: Known) -> Iterator[Job]:
    for model in DECODED:
        try:
            check_ranks(decode_step.MODELS[model], ranks)
        except ArgumentError as error:
            print(f"{model} is left out: {error}")
            continue
        done = {r.batch for r in known if (r.op, r.model) == ("decode_vllm", model)}
        left = [batch for batch in BATCHES if batch not in done]
        if left and find_spec("vllm") is not None:
            options = ("--models", model, "--batches", joined(left))
            script = "benchmarks/decode_vllm.py", *options, "--context", "512"
            yield Job((*script, "--ranks", str(ranks)), launcher="itself")
        done = {
            r.batch
            for r in known
            if r.op == "decode" and (r.model, r.steps_per_launch) == (model, 1)
        }
        left = [batch for batch in BATCHES if batch not in done]
        if left:
            options = ("--models", model, "--batches", joined(left))
            by_vllm = records.RESULTS / "decode_vllm.jsonl"
            baseline = ("--vllm", str(by_vllm)) if by_vllm.exists() else ()
            yield Job(("benchmarks/decode.py", *options, *baseline))


def torch(ranks: int, known: Known) -> Iterator[Job]:
    for script in ("examples/torch_tensor_parallel.py", "tests/torch/on_ranks.py"):
        yield Job((script,), launcher="torchrun")


def memcheck(ranks: int, known: Known) -> Iterator[Job]:
    sanitizer = ("compute-sanitizer", "--tool", "memcheck", "--report-api-errors", "no")
    example = ("python", "examples/mlp.py")
    yield Job((*sanitizer, "--error-exitcode", "9", *example), ranks=2)


PARTS = {
    part.__name__: part
    for part in (
        *(tests, deaths, soak, collectives, few_rows),
        *(decode, mlp, moe, torch, memcheck),
    )
}


def missing(
    known: Known, op: str, models: Sequence[str], rows: Sequence[int], ranks: int
) -> Iterator[Job]:
    """Jobs for the shapes without a record; models that lack the same share a job."""
    done = {(r.model, r.M) for r in known if r.op == op}
    jobs: dict[tuple[int, ...], list[str]] = {}
    for model in models:
        left = tuple(n for n in rows if (model, n * ranks) not in done)
        if left:
            jobs.setdefault(left, []).append(model)
    for left, sharing in jobs.items():
        options = ("--models", joined(sharing), "--rows-per-rank", joined(left))
        yield Job((f"benchmarks/{op}.py", *options))


def joined(values: Iterable[object]) -> str:
    return ",".join(map(str, values))


def known_records(ranks: int) -> list[Any]:
    commit = records.commit()
    return [r for r in records.load() if (r.world_size, r.commit) == (ranks, commit)]


def execute(job: Job, ranks: int, limit: float) -> bool:
    """Run a job within `limit` seconds; whether it succeeded."""
    count, seconds = str(job.ranks or ranks), f"{limit:.0f}"
    if job.launcher == "itself":
        launcher = ["timeout", seconds, sys.executable]
    elif job.launcher == "torchrun":
        launcher = ["timeout", seconds, sys.executable, "-m", "torch.distributed.run"]
        launcher += ["--nproc-per-node", count]
    else:
        launcher = [sys.executable, str(records.ROOT / "launch" / "mpirun")]
        launcher += ["-n", count, "--time-limit", seconds]
    print(f"\n=== {' '.join(job.command)} ===", flush=True)
    done = subprocess.run([*launcher, *job.command], cwd=records.ROOT, check=False)
    return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Run what needs several GPUs.")
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="default: all")
    parser.add_argument("--ranks", type=int, help="default: the number of GPUs")
    parser.add_argument("--seconds", type=float, default=480.0, help="of a part")
    options = parser.parse_args()
    ranks = options.ranks or count_gpus()
    if ranks < 2:
        parser.error(f"needs at least 2 GPUs, found {ranks}")
    failed, left = [], []
    for name in options.parts or PARTS:
        end = time.monotonic() + options.seconds
        for job in PARTS[name](ranks, known_records(ranks)):
            limit = end - time.monotonic()
            if limit <= 0:
                left.append(f"{name}: {' '.join(job.command)}")
            elif not execute(job, ranks, limit):
                failed.append(f"{name}: {' '.join(job.command)}")
    for title, jobs in (("FAILED", failed), ("not run, out of time", left)):
        print("".join(f"{title} {job}\n" for job in jobs), end="")
    return int(bool(failed or left))


def count_gpus() -> int:
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    except OSError:
        return 0
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())


if __name__ == "__main__":
    sys.exit(main())
