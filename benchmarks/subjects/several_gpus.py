"""All tests and benchmarks that need several GPUs, in parts, the most important first.

.venv/bin/python benchmarks/run.py several_gpus [--ranks N] [--seconds 480] [PART ...]

Each part runs on all GPUs, within a time limit. Shapes with a record of this commit
and number of ranks are not measured again: an interrupted run can be continued.
"""

from __future__ import annotations

import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from benchmarks import records
from benchmarks.decoder import MODELS as DECODERS
from benchmarks.harness import Result, Run, Subject
from benchmarks.workload import MODELS
from etc_dist.errors import ArgumentError
from etc_dist.models.part import check_ranks

PYTEST = "-m pytest -q --color=no"
COLLECTIVES = ("matmul_reduce_scatter", "all_gather_matmul")
TWO_MODELS = ("qwen3-32b", "llama3-70b")
FEW_ROWS = (8, 32, 128, 256, 512, 1024, 2048)
MLP_ROWS = (*FEW_ROWS, 4096, 8192, 16384)
"""Rows of all ranks together."""
MOE_TOKENS = (128, 512, 2048, 8192)
"""Tokens of a rank."""
ROWS = (1024,)
"""Rows of a rank: 8192 on eight ranks."""
DECODED, BATCHES = ("qwen3-32b", "qwen3-30b-a3b"), (1, 8, 32, 128)
Known = Sequence[records.Record]
"""The records of this commit on this number of ranks."""
Job = tuple[str, str]
"""A launcher, of `launchers`, and its command."""


def tests(ranks: int, known: Known) -> Iterator[Job]:
    yield "mpirun", f"python {PYTEST} --timeout-method=thread --with-mpi -m mpi tests"


def deaths(ranks: int, known: Known) -> Iterator[Job]:
    # The tests start jobs, and kill one of their ranks.
    yield "itself", f"{PYTEST} tests/runtime/test_faults.py -k death --durations=3"


def soak(ranks: int, known: Known) -> Iterator[Job]:
    if not any(r.op == "soak" for r in known):
        yield "mpirun", "benchmarks/run.py soak"


def collectives(ranks: int, known: Known) -> Iterator[Job]:
    for op in COLLECTIVES:
        yield from sweep(known, op, MODELS, {n: n * ranks for n in ROWS})


def few_rows(ranks: int, known: Known) -> Iterator[Job]:
    for op in COLLECTIVES:
        yield from sweep(known, op, TWO_MODELS, per_rank(FEW_ROWS, ranks))


def mlp(ranks: int, known: Known) -> Iterator[Job]:
    yield from sweep(known, "mlp", TWO_MODELS, per_rank(MLP_ROWS, ranks))


def moe(ranks: int, known: Known) -> Iterator[Job]:
    for parallel, rows in (("expert", 1), ("tensor", ranks)):
        for routing in ("uniform", "zipf"):
            fields = {"op": f"moe_{parallel}_parallel", "routing": routing}
            options = f"moe --parallel {parallel} --routing {routing} --tokens"
            if left := missing(known, {n: n * rows for n in MOE_TOKENS}, "M", fields):
                yield "mpirun", f"benchmarks/run.py {options} {left}"


def decode(ranks: int, known: Known) -> Iterator[Job]:
    by_vllm = records.RESULTS / "decode_vllm.jsonl"
    for model in DECODED:
        try:
            check_ranks(DECODERS[model], ranks)
        except ArgumentError as error:
            print(f"{model} is left out: {error}")
            continue
        batches = {n: n for n in BATCHES}
        fields: dict[str, Any] = {"op": "decode_vllm", "model": model}
        left = missing(known, batches, "batch", fields)
        if left and find_spec("vllm") is not None:
            options = f"--models {model} --batches {left} --context 512"
            script = f"benchmarks/run.py decode_vllm {options} --ranks {ranks}"
            yield "itself", script
        fields = {"op": "decode", "model": model, "steps_per_launch": 1}
        if left := missing(known, batches, "batch", fields):
            baseline = f" --vllm {by_vllm}" if by_vllm.exists() else ""
            options = f"--models {model} --batches {left}{baseline}"
            yield "mpirun", f"benchmarks/run.py decode {options}"


def torch(ranks: int, known: Known) -> Iterator[Job]:
    for script in ("examples/torch_tensor_parallel.py", "tests/torch/on_ranks.py"):
        yield "torchrun", script


def memcheck(ranks: int, known: Known) -> Iterator[Job]:
    sanitizer = "compute-sanitizer --tool memcheck --report-api-errors no"
    yield "two", f"{sanitizer} --error-exitcode 9 python examples/mlp.py"


PARTS: Mapping[str, Callable[[int, Known], Iterator[Job]]] = {
    part.__name__: part
    for part in (
        *(tests, deaths, soak, collectives, few_rows),
        *(decode, mlp, moe, torch, memcheck),
    )
}


def per_rank(totals: Iterable[int], ranks: int) -> dict[int, int]:
    """The rows of a rank, and those of all."""
    return {total // ranks: total for total in totals if total % ranks == 0}


def missing(
    known: Known, sizes: Mapping[int, int], field: str, fields: Mapping[str, Any]
) -> str:
    """The `sizes` without a record of `fields`, as an option. sizes: the values of
    the option, with those of the record's `field`."""
    done = {
        r.get(field)
        for r in known
        if all(r.get(name) == value for name, value in fields.items())
    }
    return ",".join(str(size) for size, value in sizes.items() if value not in done)


def sweep(
    known: Known, op: str, models: Iterable[str], sizes: Mapping[int, int]
) -> Iterator[Job]:
    """Jobs for the shapes without a record; models that lack the same share a job."""
    jobs: dict[str, list[str]] = {}
    for model in models:
        left = missing(known, sizes, "M", {"op": op, "model": model})
        jobs.setdefault(left, []).append(model)
    for left, sharing in jobs.items():
        options = f"--models {','.join(sharing)} --rows-per-rank {left}"
        if left:
            yield "mpirun", f"benchmarks/run.py {op} {options}"


def launchers(ranks: int, seconds: float) -> dict[str, list[str]]:
    """The commands that start a job by the names of launchers. itself: of a command
    that starts its ranks; two: two ranks."""
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


def measure(run: Run) -> Iterator[Result]:
    options, run.is_timed = run.options, False
    ranks, commit = options.ranks or count_gpus(), records.commit()
    for name in options.parts or PARTS:
        end = time.monotonic() + options.seconds
        known = [
            r
            for r in records.load()
            if (r.get("world_size"), r.commit) == (ranks, commit)
        ]
        for launcher, command in PARTS[name](ranks, known):
            left = end - time.monotonic()
            wrong = ["not run, out of time"]
            if left > 0:
                run.say(f"\n=== {command} ===")
                prefix = launchers(ranks, left)[launcher]
                done = subprocess.run([*prefix, *command.split()], cwd=records.ROOT)
                wrong = [f"exit code {done.returncode}"] if done.returncode else []
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
    add("parts", nargs="*", choices=[*PARTS, []], help="default: all")
    add("--ranks", type=int, help="default: the number of GPUs")
    add("--seconds", type=float, default=480.0, help="of a part")


SUBJECT = Subject(
    *("Run what needs several GPUs.", measure, add_options),
    refusal=refusal,
    has_world=False,
)
