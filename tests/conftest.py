"""Shared by all tests: fixtures, deselection, and agreement of ranks.

`python -m pytest tests` runs the tests without ranks. `mpi` tests are ordinary tests
that every rank runs:

    launch/mpirun -n 4 python -m pytest --with-mpi -m mpi tests"""

from __future__ import annotations

import functools
import gc
import hashlib
import io
import itertools
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest

from launch.suite import CPU_RANKS, count_gpus

TESTS = Path(__file__).parent
GOLDEN = TESTS / "golden"
# How long a failed rank waits for the others to end the test, in seconds.
GRACE = float(os.environ.get("LAUNCH_TEST_GRACE", "10"))
MARKS = {
    "mpi": ("ranks",),
    "gpu": ("devices",),
    "exhaustive": (),
    "models": (),
    "torch": (),
}
"""The markers and their arguments."""
EXHAUSTIVE = "for --all only"
CODES = {"passed": 0, "skipped": 1, "failed": 2}

# ------------------------------------------------------------------------- fixtures


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A number from the test's own id: the same on every rank and in any order."""
    return zlib.crc32(request.node.nodeid.encode())


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.fixture(scope="session")
def world() -> Iterator[Any]:
    """This process's place among the ranks, on the backend of the settings."""
    from etc_dist import world
    from etc_dist.settings import Settings

    new_world = world.start(Settings.load())
    yield new_world
    new_world.close()


def kept_proof(plan: Any, dims: Mapping[str, int], workers: int) -> Any:
    """A proof, in the cache as those of programs are: it is made again for another
    plan, shape or verifier."""
    from etc_dist.settings import Settings
    from etc_dist.verify.proof import prove

    return prove(plan, dims, workers, Settings.load())


@pytest.fixture(scope="session", autouse=True)
def run_records() -> Iterator[None]:
    """Keep which data of runs has been verified, in the cache of the session."""
    from etc_dist.cache import Cache
    from etc_dist.settings import Settings
    from tests.run_records import verify_once

    verify = verify_once(Cache(Settings.load().cache))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("run_check", "cpu.simulate"):
            patch.setattr(import_module(f"etc_dist.runtime.{name}"), "verify", verify)
        yield


def expect_cpu_ranks(world: Any, ranks: int) -> None:
    """Skip a test on GPUs, and on another number of ranks."""
    if (world.backend, world.size) != ("cpu", ranks):
        pytest.skip(f"for {ranks} ranks of the CPU backend")


@pytest.fixture
def one_rank(world: Any) -> Any:
    """The world, where it has no other rank than this."""
    if world.size > 1:
        pytest.skip("for one rank")
    return world


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels with all mutations, of which none is selected: a program is compiled
    once for tests of the kernels and for tests of their mutations."""
    from tests.emulate.mutations import write_mutated

    folder = tmp_path_factory.mktemp("mutated") / "kernels"
    write_mutated(folder)
    return folder


LIMIT = 0.5
"""Seconds that a wait may last in `short_timeout`."""


@pytest.fixture
def short_timeout(world: Any) -> Iterator[Any]:
    """The world, with a short limit and without the proof that would refuse."""
    before = world.settings
    world.settings = replace(before, verify=False, wait_limit=LIMIT)
    yield world
    world.settings = before


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the graphs that are compiled during the test."""
    from etc_dist.codegen import generate

    names: list[str] = []

    def counted(plan: Any, **options: Any) -> Any:
        names.append(plan.graph.name)
        return generate(plan, **options)

    monkeypatch.setattr("etc_dist.compiler.generate", counted)
    return names


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Compare a text with tests/golden/<module>/<test>.txt."""
    module = Path(request.node.path).relative_to(TESTS).with_suffix("")
    name = re.sub(r"[^\w.=-]+", "-", request.node.name).strip("-")
    path = GOLDEN / module / f"{name}.txt"
    update = request.config.getoption("--update-golden")
    command = f"python -m pytest {request.node.nodeid!r} --update-golden"

    def compare(text: str) -> None:
        text = text.rstrip("\n") + "\n"
        if update and _rank() == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        elif not path.exists():
            pytest.fail(f"{path} is missing; write it by\n  {command}", pytrace=False)
        elif path.read_text() != text:
            assert text == path.read_text(), f"if this is right: {command}"

    return compare


@pytest.fixture
def default_signals() -> Iterator[None]:
    """Let jobs begin with default handlers. This process may ignore signals: under
    nohup, or in the background of a script."""
    ignored = [
        number
        for number in (signal.SIGHUP, signal.SIGINT)
        if signal.getsignal(number) == signal.SIG_IGN
    ]
    for number in ignored:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


# ------------------------------------------------------------------ which tests run


def first_always(cases: Iterable[tuple[Any, ...]], count: int) -> list[Any]:
    """Cases of a parametrized test, of which all but the first are exhaustive."""
    marks = itertools.chain(count * [[]], itertools.repeat(pytest.mark.exhaustive))
    return [pytest.param(*case, marks=m) for case, m in zip(cases, marks, strict=False)]


def some_of(cases: Iterable[Any], step: int) -> list[Any]:
    """Cases of a parametrized test, of which all but each `step`-th are exhaustive."""
    return [
        pytest.param(case, marks=[pytest.mark.exhaustive] if case_idx % step else [])
        for case_idx, case in enumerate(cases)
    ]


# Few examples are the same ones each time, so that a run repeats the last one.
hypothesis.settings.register_profile(
    "few", hypothesis.settings(deadline=None, derandomize=True, max_examples=4)
)
hypothesis.settings.register_profile(
    "many", hypothesis.settings(deadline=None, max_examples=30)
)


OPTIONAL = {"models": "the tests marked models", "torch": "the tests marked torch"}
"""Options of pytest, and what each adds."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write the texts in tests/golden"
    )
    parser.addoption(
        "--all", action="store_true", help="run the tests marked exhaustive, too"
    )
    for name, tests in OPTIONAL.items():
        parser.addoption(f"--{name}", action="store_true", help=f"run {tests}, too")


@functools.cache
def usable_gpus() -> int:
    return 0 if os.environ.get("ETC_DIST_BACKEND") == "cpu" else count_gpus()


def has_gpu() -> bool:
    return usable_gpus() > 0


def check_marks(item: pytest.Item) -> None:
    """Refuse arguments that would be ignored."""
    for name, arguments in MARKS.items():
        for mark in item.iter_markers(name):
            faults = [*map(str, mark.args), *sorted(set(mark.kwargs) - {*arguments})]
            if faults:
                takes = " and ".join(f"{a}=" for a in arguments)
                takes = f"{takes} only" if takes else "nothing"
                raise pytest.UsageError(
                    f"{item.nodeid}: the {name} marker takes {takes}, "
                    f"not {', '.join(faults)}"
                )
    if not {*_named_ranks(item)} <= {*CPU_RANKS}:
        raise pytest.UsageError(
            f"{item.nodeid}: ranks= takes a list of {', '.join(map(str, CPU_RANKS))}, "
            f"not {_named_ranks(item)}"
        )


def _named_ranks(item: pytest.Item) -> list[int]:
    """The numbers of ranks that a test names; none where any number will do."""
    mark = item.get_closest_marker("mpi")
    return mark.kwargs.get("ranks", []) if mark else []


def runs_here(numbers: list[int], size: int, is_all: bool) -> bool:
    """Whether a test that names some numbers of ranks runs on `size` of them. By
    default, the names decide, and 2 where there are none. With --all, and on a number
    that no test may name, such as that of eight GPUs, their least does."""
    if is_all or size not in CPU_RANKS:
        return size >= min(numbers, default=1)
    return size in (numbers or [2])


def _is_for_other_ranks(config: pytest.Config, item: pytest.Item) -> bool:
    is_mpi = item.get_closest_marker("mpi") is not None
    return is_mpi and not runs_here(_named_ranks(item), *_ranks(config))


def _ranks(config: pytest.Config) -> tuple[int, bool]:
    """The ranks of this run, and whether all tests run."""
    world = _mpi_world()
    return 1 if world is None else world.size, config.getoption("--all")


def _devices(item: pytest.Item) -> int:
    """GPUs that a test needs."""
    return max(
        (m.kwargs.get("devices", 1) for m in item.iter_markers("gpu")), default=0
    )


def _skip_without_devices(item: pytest.Item) -> None:
    num_needed, num_gpus = _devices(item), usable_gpus()
    if num_needed > num_gpus:
        reason = f"needs {num_needed} GPUs, and {num_gpus} can be used"
        item.add_marker(pytest.mark.skip(reason=reason))


def _is_slow(item: pytest.Item) -> bool:
    """Whether a test is exhaustive here: tests of ranks are not on GPUs, which are
    fast."""
    is_on_gpus = os.environ.get("ETC_DIST_BACKEND") == "cuda"
    if is_on_gpus and item.get_closest_marker("mpi") is not None:
        return False
    return item.get_closest_marker("exhaustive") is not None


def _is_optional(config: pytest.Config, name: str) -> Callable[[pytest.Item], object]:
    """Whether an item is marked `name`, without the option of this name."""
    is_chosen = config.getoption(f"--{name}")
    return lambda item: not is_chosen and item.get_closest_marker(name)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where `-m mpi` selects tests of ranks, files without any for this number are not
    read."""
    is_file = collection_path.match("test_*.py")
    if config.getoption("markexpr") != "mpi" or not is_file:
        return None
    pattern = r"mark\.mpi(?:\(ranks=(\[.*?\])\))?"
    marks = re.findall(pattern, collection_path.read_text())
    ranks_of_marks = [json.loads(ranks or "[]") for ranks in marks]
    return None if any(runs_here(n, *_ranks(config)) for n in ranks_of_marks) else True


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    marked = {i for i in items if any(m.name in MARKS for m in i.iter_markers())}
    for item in marked:
        check_marks(item)
    deselect = {
        "there is no GPU": lambda item: _devices(item) and not has_gpu(),
        **{f"for --{name} only": _is_optional(config, name) for name in OPTIONAL},
        "for other numbers of ranks": lambda item: _is_for_other_ranks(config, item),
        EXHAUSTIVE: lambda item: not config.getoption("--all") and _is_slow(item),
    }
    counts: dict[str, int] = {}
    for reason, applies in deselect.items():
        selection: list[pytest.Item] = []
        left_out: list[pytest.Item] = []
        for item in items:
            is_out = item in marked and applies(item)
            (left_out if is_out else selection).append(item)
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = selection
            counts[reason] = len(left_out)
    for item in marked:
        _skip_without_devices(item)
    config.stash[_left_out] = counts


_left_out = pytest.StashKey[dict[str, int]]()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without the garbage collector, which ignores the collected tests later:
    to visit them again and again takes a fifth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_sessionstart(session: pytest.Session) -> None:
    # NOTE: pytest-mpi's closing block about the MPI library buries the summary.
    for plugin in session.config.pluginmanager.get_plugins():
        if type(plugin).__name__ == "MPIPlugin":
            plugin._is_testing_mpi = False


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    counts = config.stash.get(_left_out, {})
    return [f"left out, {reason}: {count} tests" for reason, count in counts.items()]


# -------------------------------------------------------------------- many ranks


def _rank() -> int:
    world = _mpi_world()
    return 0 if world is None else world.rank


@functools.cache
def _mpi_world() -> Any:
    """MPI's world under mpirun, else None; MPI is not started without mpirun."""
    names = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
    if not any(name in os.environ for name in names):
        return None
    from mpi4py import MPI

    num_ranks = int(os.environ.get("LAUNCH_RANKS", MPI.COMM_WORLD.size))
    if num_ranks != MPI.COMM_WORLD.size:
        raise pytest.UsageError(
            f"mpirun started {num_ranks} ranks, but MPI sees {MPI.COMM_WORLD.size}: "
            f"mpirun and mpi4py use different MPI libraries (etc-dist doctor)"
        )
    return MPI.COMM_WORLD


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    # Python's own thresholds cost a twentieth of the time.
    gc.set_threshold(20_000, 20, 20)
    hypothesis.settings.load_profile("many" if config.getoption("--all") else "few")
    under_mpi = config.getoption("--with-mpi", False) and _mpi_world() is not None
    if under_mpi and _mpi_world().size > 1:
        world = _mpi_world()
        # A signal, the default, is not handled inside a blocked MPI call.
        config.option.timeout_method = "thread"
        folder = tempfile.gettempdir()
        base = config.option.basetemp or f"{folder}/pytest-ranks-{_job(world)}"
        config.option.basetemp = f"{base}-{world.rank}"
        config.add_cleanup(
            lambda: shutil.rmtree(config.option.basetemp, ignore_errors=True)
        )
        config.pluginmanager.register(Agreement(world), "rank-agreement")
    path = os.environ.get("LAUNCH_OUTCOMES")
    # Of processes that share the tests, those write that run some.
    is_runner = hasattr(config, "workerinput") or not config.getoption("-n", None)
    if path and is_runner and (not under_mpi or _rank() == 0):
        config.pluginmanager.register(Outcomes(Path(path)), "outcomes")


def _job(world: Any) -> int:
    """One number for all ranks of this job: rank 0's process id."""
    return int(world.bcast(os.getpid()))


class Agreement:
    """Makes the ranks agree on every test; rank 0 alone reports.

    After the call (or a set-up that did not pass) and after the tear-down, the ranks
    compare outcomes: what failed on one rank fails on all, with that rank's traceback.
    A failed rank whose peers do not answer, since they wait for it, ends the job."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.comm = world.Dup()  # never mixes with a test's own messages
        self.quiet = io.StringIO()  # the report of a rank above 0
        self.odd: list[int] = []  # ranks with other tests than rank 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if self.comm.rank and reporter is not None:
            reporter._tw._file = self.quiet

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Refuse ranks that would not run the same tests."""
        ids = "\n".join(item.nodeid for item in session.items)
        state = (hashlib.sha256(ids.encode()).hexdigest(), session.testsfailed)
        every = self.comm.allgather(state)
        self.odd = [r for r, theirs in enumerate(every) if theirs != every[0]]
        if self.odd:
            pytest.exit(f"ranks {self.odd} did not collect the tests of rank 0", 2)

    def pytest_unconfigure(self) -> None:
        if self.comm.rank in self.odd:
            sys.__stderr__.write(self.quiet.getvalue())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if item.get_closest_marker("mpi") is None:
            return report
        if call.when == "setup" and report.passed:
            return report  # the call decides
        bad = self.failed_ranks(report, item)
        if bad:
            text = report.longreprtext if report.failed else None
            texts = self.comm.allgather(text)
            report.outcome = "failed"
            report.longrepr = "\n".join(f"--- rank {r} ---\n{texts[r]}" for r in bad)
        return report

    def failed_ranks(self, report: pytest.TestReport, item: pytest.Item) -> list[int]:
        own_code = np.array([CODES[report.outcome]], dtype="i4")
        every = np.empty(self.comm.size, dtype="i4")
        request = self.comm.Iallgather(own_code, every)
        end = time.monotonic() + GRACE
        nap = 1e-5
        while not request.Test():
            # A rank that passed may be early for good reasons; it waits on.
            if report.failed and time.monotonic() > end:
                sys.__stderr__.write(
                    f"{item.nodeid} failed on rank {self.comm.rank}; other ranks did "
                    f"not end it within {GRACE:g} s\n{report.longreprtext}\n"
                )
                sys.__stderr__.flush()
                time.sleep(0.5)  # until launch/mpirun has read it
                self.world.Abort(1)
            time.sleep(nap)
            nap = min(nap * 2, 0.01)
        return [rank for rank, code in enumerate(every) if code == CODES["failed"]]


class Outcomes:
    """Writes what launch/suite.py adds up: each test as failed until it has ended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.marks: dict[str, dict[str, Any]] = {}
        self.record: dict[str, Any] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            is_exhaustive = item.get_closest_marker("exhaustive") is not None
            marks = {"devices": _devices(item), "exhaustive": is_exhaustive}
            self.marks[item.nodeid] = marks

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.record = {"test": nodeid, "outcome": "passed", **self.marks[nodeid]}
        self.write({**self.record, "outcome": "failed", "reason": "it did not end"})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        expected = hasattr(report, "wasxfail")
        if report.failed:
            self.record["outcome"] = "failed"
        elif report.skipped and not expected and self.record["outcome"] == "passed":
            self.record["outcome"] = "skipped"
            if isinstance(report.longrepr, tuple):
                reason = report.longrepr[2].removeprefix("Skipped: ")
                self.record["reason"] = reason

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.write(self.record)

    def write(self, record: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
