"""The test suite: its runs of pytest, and the sum of their results.

    one process      every test that needs no ranks (with the GPU ones, where a GPU is)
    1, 2, 4 ranks    the `mpi` tests that name this number, on the CPU backend
    1, 2, 4 ranks    and again, on as many GPUs
    all ranks        on more GPUs, every `mpi` test
    2, 4 ranks       where there are fewer GPUs, these ranks share them

An `mpi` test without a number runs on 2 ranks, and with --all on every number.

A test that fails in any run fails the suite. So does a test that every run skipped,
and a run that did not come to its end. The last line is the sum over all runs.

A run may last as long as it needs. It is ended when no test has begun or ended for
300 seconds, more than one test may take.

Without a GPU, a few processes share the tests of one process and of one rank, and the
runs of more ranks, which mostly wait, go on at the same time.

Tests marked `exhaustive` run with --all only: before each commit that changes kernels/.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
CPU_RANKS = (1, 2, 4)
SHARED_RANKS = (2, 4)
MOST_WORKERS = 4
POLL = 0.1  # seconds
STALL, STALL_OF_ALL = 300.0, 900.0  # seconds in which no test begins or ends
ALL = ("--all", "--timeout=600")  # seconds of an exhaustive test
NOTHING_COLLECTED = 5  # pytest's exit code


@dataclass(frozen=True)
class Run:
    """One start of pytest; `ranks` is 0 for tests without MPI. Several `workers` share
    the tests of one process and of one rank, which needs no mpirun. `sharing`: options
    of launch/mpirun for more ranks than GPUs."""

    name: str
    ranks: int = 0
    backend: str | None = None
    workers: int = 1
    sharing: tuple[str, ...] = ()

    @property
    def by_mpirun(self) -> bool:
        return self.ranks > 0

    def command(self, arguments: Sequence[str]) -> list[str]:
        # No colours, since ranks write to pipes. Time limits by a thread, since a
        # blocked MPI call handles no signal.
        pytest = [sys.executable, "-m", "pytest", "--color=no"]
        if self.workers > 1:
            pytest += ["-n", str(self.workers), "--dist", "worksteal"]
        if not self.by_mpirun:
            which = ["--with-mpi"] if self.workers > 1 else ["-m", "not mpi"]
            return [*pytest, *which, *arguments]
        mpirun = [sys.executable, str(ROOT / "launch" / "mpirun")]
        mpirun += ["-n", str(self.ranks), *self.sharing]
        pytest += ["--timeout-method=thread", "--with-mpi", "-m", "mpi"]
        return mpirun + pytest + list(arguments)

    def environment(self, outcomes: Path) -> dict[str, str]:
        """The environment of the run; tests/conftest.py writes to `outcomes`."""
        environment = os.environ | {"LAUNCH_OUTCOMES": str(outcomes)}
        # NOTE: container images often disable the cache of compiled modules, which
        # costs a fifth of the time, since Python starts a dozen times.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        if self.workers > 1:  # they share the cores
            environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        if self.backend is not None:
            environment["ETC_DIST_BACKEND"] = self.backend
        if os.geteuid() == 0:
            # Open MPI refuses root even to a single process that no mpirun started.
            environment["OMPI_ALLOW_RUN_AS_ROOT"] = "1"
            environment["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
        return environment


@dataclass(frozen=True)
class Outcome:
    """The outcome of one test in one run."""

    test: str
    outcome: str  # passed, failed, skipped
    reason: str = ""
    devices: int = 0
    exhaustive: bool = False


@dataclass(frozen=True)
class Result:
    """The outcomes of one run; `fault`: why it did not reach its end."""

    run: Run
    outcomes: tuple[Outcome, ...] = ()
    fault: str = ""
    seconds: float = 0.0

    def count(self, outcome: str) -> int:
        return sum(o.outcome == outcome for o in self.outcomes)


@dataclass(frozen=True)
class Verdict:
    """The sum over all runs, and the complaints to print."""

    passed: int
    failed: int
    skipped: int
    complaints: tuple[str, ...] = field(default=())

    def line(self) -> str:
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"


def plan(
    gpus: int,
    shared_ranks: Iterable[int] = SHARED_RANKS,
    sharing: str = "--share-gpu",
    workers: int | None = None,
) -> list[Run]:
    """The runs for a machine with this many GPUs. workers: that share the tests of one
    process, without a GPU."""
    # One more than the cores, which idles while others wait for ranks or compilers.
    workers = workers or (os.cpu_count() or 1) + 1
    workers = 1 if gpus else min(workers, MOST_WORKERS)
    runs = [Run("one process", workers=workers)]
    least = 1 if workers == 1 else 2
    runs += [Run(f"{rank_word(n)}, cpu", n, "cpu") for n in CPU_RANKS if n >= least]
    on_gpus = sorted(n for n in {*CPU_RANKS, gpus} if 0 < n <= gpus)
    runs += [Run(f"{rank_word(n)}, cuda", n, "cuda") for n in on_gpus]
    for n in sorted(n for n in shared_ranks if 0 < gpus < n):
        word = f"{rank_word(n)}, shared"
        runs.append(Run(word, n, "cuda", sharing=(sharing,)))
    return runs


def judge(
    results: Iterable[Result], gpus: int, needs_exhaustive: bool = False
) -> Verdict:
    """Add up; a test that every run skipped counts as failed, not as skipped, unless
    some run did not come to its end. `needs_exhaustive`: so does a suite without an
    exhaustive test."""
    results = tuple(results)
    complaints = [f"{r.run.name}: {r.fault}" for r in results if r.fault]
    by_test: dict[str, list[Outcome]] = {}
    for result in results:
        for outcome in result.outcomes:
            by_test.setdefault(outcome.test, []).append(outcome)
            if outcome.outcome == "failed":
                why = f" ({outcome.reason})" if outcome.reason else ""
                complaints.append(f"{result.run.name}: {outcome.test} failed{why}")
    outcomes = [outcome for result in results for outcome in result.outcomes]
    if needs_exhaustive and not any(o.exhaustive for o in outcomes):
        complaints.append("every run: --all selected no exhaustive test")
    passed = sum(r.count("passed") for r in results)
    num_skipped = sum(r.count("skipped") for r in results)
    is_complete = not any(r.fault for r in results)
    for test, outcomes in sorted(by_test.items()):
        last = outcomes[-1]
        if any(o.outcome != "skipped" for o in outcomes) or not is_complete:
            continue
        if last.devices > gpus:
            continue  # no fault of the test: a machine with more GPUs runs it
        num_skipped -= len(outcomes)
        complaints.append(f"every run: {test} was skipped ({last.reason})")
    return Verdict(passed, len(complaints), num_skipped, tuple(complaints))


def execute_all(
    runs: Sequence[Run], arguments: Sequence[str], stall: float, whole: bool
) -> list[Result]:
    """Execute all runs. Where the first one has many workers, the others run at the
    same time, one after another, and their output follows at the end."""
    split = 1 if runs[0].workers > 1 else len(runs)
    options = arguments, stall, whole
    with tempfile.TemporaryFile("w+") as output:
        results = run_together(
            execute_lane(runs[:split], *options),
            execute_lane(runs[split:], *options, output),
        )
        output.seek(0)
        shutil.copyfileobj(output, sys.stdout)
    return results


Steps = Generator[bool, None, Any]
"""Values are whether the first test has begun."""


def execute_lane(runs: Sequence[Run], *options: Any) -> Steps:
    results: list[Result] = []
    for run in runs:
        results.append((yield from execute(run, *options)))
    return results


def run_together(first: Steps, second: Steps) -> list[Result]:
    """Advance both lanes until their ends. The second one begins with the first one's
    tests, whose modules are then compiled."""
    results_by_lane: dict[Steps, list[Result]] = {}
    with contextlib.closing(first), contextlib.closing(second):
        has_begun = False
        while len(results_by_lane) < 2:
            for lane in {
                first,
                second if has_begun else first,
            } - results_by_lane.keys():
                try:
                    has_begun |= next(lane)
                except StopIteration as end:
                    results_by_lane[lane], has_begun = end.value, True
            time.sleep(POLL)
    return results_by_lane[first] + results_by_lane[second]


def execute(
    run: Run,
    arguments: Sequence[str],
    stall: float,
    whole: bool,
    output: IO[str] | None = None,
) -> Steps:
    """Execute one run, step by step. It is ended where `stall` seconds pass without the
    begin or end of a test. `output`: in place of that of this process."""
    print(f"\n=== {run.name} ===", file=output, flush=True)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "outcomes"
        process = subprocess.Popen(
            run.command(arguments),
            cwd=ROOT,
            env=run.environment(path),
            start_new_session=True,
            stdout=output,
            stderr=output,
        )
        size, end = 0, start + stall
        try:
            while (code := process.poll()) is None and time.monotonic() < end:
                if path.exists() and path.stat().st_size != size:
                    size, end = path.stat().st_size, time.monotonic() + stall
                yield path.exists()
        finally:
            end_group(process, signal.SIGTERM if run.by_mpirun else signal.SIGABRT)
        outcomes = read_outcomes(path)
    fault = ""
    if code is None:
        fault = f"was ended, as no test had begun or ended for {stall:g} s"
    elif code == NOTHING_COLLECTED:
        fault = "has no tests" if whole else ""
    elif code > 1 or code < 0:
        fault = f"ended with exit code {code}, see above"
    elif code == 1 and all(o.outcome != "failed" for o in outcomes):
        fault = "failed outside of its tests, see above"
    elif code == 0 and whole and not outcomes:
        fault = "tests/conftest.py wrote no outcomes"
    return Result(run, outcomes, fault, time.monotonic() - start)


def end_group(process: subprocess.Popen[bytes], first: signal.Signals) -> None:
    """End a run and everything it started.

    SIGTERM lets launch/mpirun end its ranks, and an MPS server, which takes longer;
    SIGABRT makes pytest show its stack.
    """
    for number in (first, signal.SIGKILL):
        if process.poll() is not None:
            return
        os.killpg(process.pid, number)
        try:
            process.wait(20.0 if first == signal.SIGTERM else 3.0)
        except subprocess.TimeoutExpired:
            continue


def read_outcomes(path: Path) -> tuple[Outcome, ...]:
    """The last line on each test: the first one reports failure, since it may hang."""
    lines = path.read_text().splitlines() if path.exists() else []
    outcomes = [Outcome(**json.loads(line)) for line in lines]
    return tuple({outcome.test: outcome for outcome in outcomes}.values())


def count_gpus() -> int:
    """GPUs that this process may use, without starting CUDA."""
    try:
        listing = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return 0
    num_gpus = sum(line.startswith("GPU ") for line in listing.splitlines())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        num_gpus = min(num_gpus, len([part for part in visible.split(",") if part]))
    return num_gpus


def rank_word(count: int) -> str:
    return f"{count} rank" + "s" * (count > 1)


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def report(results: Sequence[Result], verdict: Verdict) -> None:
    print("\n=== summary ===")
    for result in results:
        counts = ", ".join(
            f"{result.count(o)} {o}" for o in ("passed", "failed", "skipped")
        )
        print(f"{result.run.name:14} {counts} ({result.seconds:.1f} s)")
    for complaint in verdict.complaints:
        print(f"FAILED {complaint}")
    print(verdict.line(), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="launch/test", allow_abbrev=False)
    parser.add_argument(
        "--shared-ranks",
        type=numbers,
        default=SHARED_RANKS,
        metavar="N,N",
        help="runs of more ranks than GPUs (default 2,4)",
    )
    parser.add_argument(
        "--mps",
        action="store_const",
        const="--mps",
        default="--share-gpu",
        help="shared ranks run at the same time, by an MPS server for each run",
    )
    parser.add_argument(
        "--workers",
        type=int,
        help="processes that share the tests of one (default: one more than the cores, "
        f"at most {MOST_WORKERS})",
    )
    parser.add_argument(
        "--all", action="store_true", help="run the tests marked exhaustive, too"
    )
    options, arguments = parser.parse_known_args()
    whole = not arguments
    arguments = [*(ALL if options.all else []), *(arguments or ["tests"])]
    gpus = count_gpus()
    if not gpus:
        print("no NVIDIA GPU here: tests marked gpu are left out")
    runs = plan(gpus, options.shared_ranks, options.mps, options.workers)
    stall = STALL_OF_ALL if options.all else STALL
    results = execute_all(runs, arguments, stall, whole)
    verdict = judge(results, gpus, needs_exhaustive=options.all and whole)
    report(results, verdict)
    return 1 if verdict.failed else 0


if __name__ == "__main__":
    sys.exit(main())
