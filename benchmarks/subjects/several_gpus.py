"""All tests and benchmarks that need several GPUs, in parts, the most important first.

.venv/bin/python benchmarks/run.py several_gpus [--ranks N] [--seconds 480] [PART ...]

Each part runs on all GPUs, within a time limit. A benchmark that ended at this commit
and number of ranks is not run again: an interrupted run can be continued."""

from __future__ import annotations

import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator
from importlib.util import find_spec

from benchmarks import records
from benchmarks.harness import Result, Run, Subject
from benchmarks.workload import MODELS

PYTEST = "-m pytest -q --color=no"
COLLECTIVES = ("matmul_reduce_scatter", "all_gather_matmul")
RANDOM = ("random_reduce_scatter", "random_all_gather", "random_mlp_ranks")
TWO_MODELS = "--models qwen3-32b,llama3-70b"
FEW_ROWS = (8, 32, 128, 256, 512, 1024, 2048)
MLP_ROWS = (*FEW_ROWS, 4096, 8192, 16384)
"""Rows of all ranks together."""
DECODED, BATCHES = ("qwen3-32b", "qwen3-30b-a3b"), "--batches 1,8,32,128"
RUN = "benchmarks/run.py "
Job = tuple[str, str]
"""A launcher, of `launchers`, and its command."""


def per_rank(totals: Iterable[int], ranks: int) -> str:
    """The option of so many rows of all ranks."""
    rows = [total // ranks for total in totals if total % ranks == 0]
    return f"--rows-per-rank {','.join(map(str, rows))}"


def parts(ranks: int) -> dict[str, list[Job]]:
    """The jobs of each part."""
    measured = {
        "soak": ["soak"],
        "collectives": [
            f"{op} --models {model} --rows-per-rank 1024"
            for op in COLLECTIVES
            for model in MODELS
        ],
        "few_rows": [
            f"{op} {TWO_MODELS} {per_rank(FEW_ROWS, ranks)}" for op in COLLECTIVES
        ],
        "random": list(RANDOM),
        "all_reduce": ["all_reduce", "all_reduce_norm", "matmul_all_reduce"],
        "decode": [f"decode --models {model} {BATCHES}" for model in DECODED],
        "mlp": [f"mlp {TWO_MODELS} {per_rank(MLP_ROWS, ranks)}"],
        "moe": [
            f"moe --parallel {parallel} --routing {routing}"
            for parallel in ("expert", "tensor")
            for routing in ("uniform", "zipf")
        ],
    }
    jobs = {
        name: [("mpirun", RUN + command) for command in commands]
        for name, commands in measured.items()
    }
    if find_spec("vllm") is not None:
        baseline = f" --vllm {records.RESULTS / 'decode_vllm.jsonl'}"
        by_vllm = f"{BATCHES} --context 512 --ranks {ranks}"
        jobs["decode"] = [
            job
            for model in DECODED
            for job in (
                ("itself", f"{RUN}decode_vllm --model {model} {by_vllm}"),
                ("mpirun", f"{RUN}decode --models {model} {BATCHES}{baseline}"),
            )
        ]
    tests = f"python {PYTEST} --timeout-method=thread --with-mpi --all -m mpi tests"
    # The tests of deaths start jobs, and kill one of their ranks.
    deaths = f"{PYTEST} tests/runtime/test_faults.py -k death --durations=3"
    scripts = "examples/torch_tensor_parallel.py", "tests/torch/on_ranks.py"
    memcheck = "compute-sanitizer --tool memcheck --report-api-errors no"
    return {
        "tests": [("mpirun", tests)],
        "deaths": [("itself", deaths)],
        **jobs,
        "torch": [("torchrun", script) for script in scripts],
        "memcheck": [("two", f"{memcheck} --error-exitcode 9 python examples/mlp.py")],
    }


def launchers(ranks: int, seconds: float) -> dict[str, list[str]]:
    """The commands that start a job, by name. itself: of a command that starts its
    ranks; two: two ranks."""
    limit = ["timeout", f"{seconds:.0f}", sys.executable]
    mpirun = [sys.executable, str(records.ROOT / "launch" / "mpirun")]
    mpirun += ["--time-limit", f"{seconds:.0f}", "-n"]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    return {
        "itself": limit,
        "mpirun": [*mpirun, str(ranks)],
        "two": [*mpirun, "2"],
        "torchrun": [*limit, *torchrun],
    }


def ended(ranks: int) -> set[str]:
    """The commands of the benchmarks that ended without a failure at this commit."""
    commit = records.commit()
    return {
        f"{RUN}{r.subject} {r.options}".rstrip()
        for r in records.load()
        if (r.op, r.get("state"), r.commit) == ("run", "ended", commit)
        and r.world_size == ranks
        and not r.failed
    }


def measure(run: Run) -> Iterator[Result]:
    options, run.is_timed = run.options, False
    ranks = options.ranks or count_gpus()
    for name in options.parts or parts(ranks):
        end = time.monotonic() + options.seconds
        for launcher, command in parts(ranks)[name]:
            if command in ended(ranks):
                continue
            seconds, wrong = end - time.monotonic(), ["not run, out of time"]
            if seconds > 0:
                run.say(f"\n=== {command} ===")
                start = launchers(ranks, seconds)[launcher]
                process = subprocess.run([*start, *command.split()], cwd=records.ROOT)
                wrong = (
                    [f"exit code {process.returncode}"] if process.returncode else []
                )
            yield {"part": name, "command": command}, wrong


def count_gpus() -> int:
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    except OSError:
        return 0
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())


def refusal(options: Namespace) -> str:
    ranks = options.ranks or count_gpus()
    return "" if ranks > 1 else f"needs at least 2 GPUs, found {ranks}"


def add_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("parts", nargs="*", choices=[*parts(1), []], help="default: all")
    add("--ranks", type=int, help="default: the number of GPUs")
    add("--seconds", type=float, default=480.0, help="of a part")


SUBJECTS = {
    "several_gpus": Subject(
        "Run what needs several GPUs.",
        measure,
        add_options,
        refusal=refusal,
        has_world=False,
    )
}
