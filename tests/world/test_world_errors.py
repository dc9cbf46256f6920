import contextlib
import subprocess
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path

import pytest

from etc_dist.errors import (
    ArgumentError,
    EtcDistError,
    GraphError,
    SymmetricMemoryError,
    WorldError,
)
from etc_dist.settings import Settings
from etc_dist.world import start, startup
from etc_dist.world.choice import Gpus
from etc_dist.world.processes import AbortOnUncaught

CPU = Settings(backend="cpu")


def goes_on(world) -> bool:
    world.barrier()
    return world.gather(world.rank) == list(range(world.size))


def shown_once(error: EtcDistError) -> bool:
    """Whether a traceback shows no other error with these words."""
    return "".join(traceback.format_exception(error)).count(error.what) == 1


@pytest.fixture
def doomed():
    """A world of its own for a test that breaks it."""
    from mpi4py import MPI

    own = start(Settings(backend="cpu", world_limit=0.5))
    yield own
    MPI.COMM_WORLD.Barrier()
    with contextlib.suppress(WorldError):
        own.close()


@pytest.mark.mpi(min_size=2)
def test_mismatch_raises_on_all_ranks_and_names_who_calls_what(world):
    odd = world.rank == 1
    with pytest.raises(ArgumentError) as caught:
        world.match_call(
            11 if odd else 12, lambda: "matmul [8]" if odd else "matmul [4]"
        )
    assert caught.value.what == "the ranks do not make the same call"
    others = [rank for rank in range(world.size) if rank != 1]
    name = "rank 0" if others == [0] else f"ranks {', '.join(map(str, others))}"
    assert caught.value.got.split("\n" + " " * 10) == [
        f"{name}: matmul [4]",
        "rank 1: matmul [8]",
    ]
    assert goes_on(world)


@pytest.mark.mpi(min_size=2)
def test_mismatch_with_equal_words_shows_signatures(world):
    with pytest.raises(ArgumentError, match=r"rank 1: add \(signature 0x15\)"):
        world.match_call(0x14 + world.rank, lambda: "add")
    assert goes_on(world)


@pytest.mark.mpi(min_size=2)
def test_fault_in_a_description_reaches_the_peers_as_text(world):
    def describe() -> str:
        return "add" if world.rank else str(1 / 0)

    with pytest.raises(ArgumentError, match=r"rank 0: \(no description: ZeroDiv"):
        world.match_call(1 + world.rank, describe)
    assert goes_on(world)


@pytest.mark.mpi(min_size=2)
def test_refusal_of_one_rank_raises_its_class_on_all(world):
    own = GraphError("x is bad", where="add", wanted="[4]", got="[3]", fix="pass [4]")
    with pytest.raises(GraphError) as caught:
        if world.rank == 1:
            world.refuse(own)
        world.match_call(3, lambda: "add")
    assert str(caught.value) == (
        "x is bad\n  where:  rank 1: add\n  wanted: [4]\n  got:    [3]\n"
        "  to do:  pass [4]"
    )
    assert shown_once(caught.value)
    assert goes_on(world)


@pytest.mark.mpi(min_size=2)
def test_refusals_of_all_ranks_are_told_rank_by_rank(world):
    got = f"[{min(world.rank, 1)}]"
    own = GraphError("x is bad", where="add", wanted="[4]", got=got, fix="pass [4]")
    with pytest.raises(GraphError) as caught:
        world.refuse(own)
    assert (caught.value.what, caught.value.where) == ("x is bad", "add")
    first, second = caught.value.got.split("\n" + " " * 10)
    assert first == "rank 0: [0]" and second.endswith(": [1]")
    assert goes_on(world)


def fail_on_rank_1(world, fault):
    """A step that raises `fault` on rank 1."""

    def step() -> None:
        if world.rank == 1:
            raise fault

    return step


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("agree", ["agree", "agree_done"])
def test_step_that_fails_on_one_rank_raises_on_all(world, agree):
    own = GraphError("x is bad", where="add", wanted="[4]", got="[3]", fix="pass [4]")
    with pytest.raises(GraphError, match="rank 1: add") as caught:
        getattr(world, agree)(fail_on_rank_1(world, own))
    assert shown_once(caught.value)
    fault = OSError("no such file")
    with pytest.raises(WorldError, match="OSError: no such file") as caught:
        getattr(world, agree)(fail_on_rank_1(world, fault))
    assert caught.value.where == f"rank 1: world.{agree}"
    assert caught.value.__cause__ is (fault if world.rank == 1 else None)
    assert goes_on(world)


@pytest.mark.mpi
def test_result_that_cannot_travel_is_a_fault_of_the_step(world):
    with pytest.raises(WorldError, match="a step that all ranks take failed"):
        world.agree(lambda: lambda: None)
    assert goes_on(world)


@pytest.mark.mpi(min_size=2)
def test_rank_that_does_not_come_is_named_and_breaks_the_world(doomed):
    from mpi4py import MPI

    late = doomed.size - 1
    if doomed.rank != late:
        with pytest.raises(WorldError) as caught:
            doomed.match_call(1, lambda: "add")
        assert caught.value.got == f"rank {late} did not come"
        assert caught.value.wanted == "every rank within 0.5 s"
        since = time.monotonic()
        with pytest.raises(WorldError, match=f"broken: .*rank {late} did not come"):
            doomed.barrier()
        assert time.monotonic() - since < 0.2
    MPI.COMM_WORLD.Barrier()
    if doomed.rank == late:
        with pytest.raises(WorldError, match="gave up: an earlier call there"):
            doomed.match_call(1, lambda: "add")
    assert doomed.broken


@pytest.mark.mpi(min_size=2)
def test_gather_hears_the_living_when_a_rank_is_silent(doomed):
    silent = doomed.size - 1
    if doomed.rank != silent:
        expected = [rank if rank != silent else None for rank in range(doomed.size)]
        assert doomed.gather(doomed.rank) == expected
        with pytest.raises(WorldError, match=f"rank {silent} did not come"):
            doomed.gather(0)


@pytest.mark.mpi
def test_allocation_beyond_all_memory_is_refused_and_the_world_goes_on(world):
    with pytest.raises(SymmetricMemoryError) as caught:
        world.allocate(1 << 60)
    assert "cannot hold this allocation" in caught.value.what
    assert isinstance(caught.value, MemoryError)
    assert goes_on(world)


@pytest.mark.mpi(min_size=2)
def test_allocation_of_unlike_sizes_is_refused(world):
    with pytest.raises(ArgumentError, match=r"rank 1: world.allocate\(1025\)"):
        world.allocate(1024 + world.rank)
    assert goes_on(world)


@pytest.mark.mpi
@pytest.mark.parametrize("nbytes", [-1, 1.5, None, True])
def test_allocation_needs_a_whole_number_of_bytes(world, nbytes):
    with pytest.raises(ArgumentError, match="a whole number, zero or more"):
        world.allocate(nbytes)


@pytest.mark.mpi
def test_freed_memory_cannot_be_used(world):
    memory = world.allocate(64)
    memory.free()
    with pytest.raises(WorldError, match="after it was freed"):
        _ = memory.local


@pytest.mark.mpi
def test_closed_world_says_so(doomed):
    doomed.close()
    doomed.close()
    with pytest.raises(WorldError, match="cannot be used: it was closed"):
        doomed.allocate(64)


@pytest.mark.mpi(min_size=2)
def test_settings_that_differ_are_refused_on_all_ranks(world, monkeypatch):
    # The import of CuPy takes seconds; what is found does not matter here.
    monkeypatch.setattr(
        "etc_dist.world.startup.find_gpus", lambda: Gpus(missing="no CuPy")
    )
    settings = Settings(backend="cpu" if world.rank else "auto")
    with pytest.raises(ArgumentError, match="different settings of backend"):
        start(settings)
    assert goes_on(world)


# What is wrong with the arguments of start, on the last rank alone.
ARGUMENTS = {
    "settings = 'x'": {"settings": "x"},
    "settings = 3": {"settings": 3},
    "settings = ''": {"settings": ""},
    "settings = {}": {"settings": {}},
    "comm = 'x'": {"settings": CPU, "comm": "x"},
    "comm = 0": {"settings": CPU, "comm": 0},
    "wait_limit = -1": {"settings": replace(CPU, wait_limit=-1)},
    "world_limit = None": {"settings": replace(CPU, world_limit=None)},
    "symmetric_size = 'x'": {"settings": replace(CPU, symmetric_size="x")},
}


@pytest.mark.mpi
@pytest.mark.parametrize("got", ARGUMENTS)
def test_bad_arguments_of_one_rank_start_no_world_on_any(got, world):
    before, bad = list(startup._worlds), world.rank == world.size - 1
    with pytest.raises(ArgumentError) as caught:
        start(**(ARGUMENTS[got] if bad else {"settings": CPU}))
    assert caught.value.got == got
    assert caught.value.what in (
        "the arguments of start do not fit",
        "settings cannot be used",
    )
    assert startup._worlds == before
    assert goes_on(world)


@pytest.mark.mpi
def test_a_refused_start_leaves_nothing_behind(one_rank):
    # An MPI library has a few thousand communicators to give.
    for _ in range(3000):
        with pytest.raises(ArgumentError, match="comm = 'x'"):
            start(CPU, comm="x")
    assert goes_on(one_rank)


@pytest.mark.mpi(min_size=2)
def test_a_start_that_not_all_ranks_come_to_ends(world, monkeypatch):
    from mpi4py import MPI

    monkeypatch.setattr(Settings, "world_limit", 0.3)
    place = MPI.COMM_WORLD.Dup()
    if world.rank == 0:
        with pytest.raises(WorldError, match="not all of them"):
            start(CPU, comm=place)
    world.barrier()
    if world.rank > 0:  # what one rank began, all must
        place.Idup()[1].Wait()
    MPI.COMM_WORLD.Barrier()  # in which rank 0 ends it, too
    assert goes_on(world)


@pytest.mark.mpi
def test_a_communicator_that_was_freed_starts_no_world():
    from mpi4py import MPI

    freed = MPI.COMM_WORLD.Dup()
    freed.Free()
    with pytest.raises(ArgumentError, match=r"got: +comm = MPI.COMM_NULL"):
        start(CPU, comm=freed)


@pytest.mark.mpi
def test_a_cache_may_be_a_text():
    own = start(replace(CPU, cache="/tmp/here"))
    assert own.settings.cache == Path("/tmp/here")
    own.close()


def test_missing_mpi_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(WorldError, match="pip install mpi4py mpich"):
        start(Settings(backend="cpu"))


def test_import_starts_nothing():
    code = (
        "import sys, etc_dist.world\n"
        "print([m for m in sys.modules if m in ('mpi4py.MPI', 'cupy', 'cuda')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_uncaught_exception_is_tagged_and_ends_all_ranks(monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(sys, "excepthook", lambda *what: seen.append(what[0]))
    hook = AbortOnUncaught(3, lambda: seen.append("aborted"))
    hook(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert seen == [KeyboardInterrupt, "aborted"]
    assert capsys.readouterr().err.startswith("[rank 3] uncaught KeyboardInterrupt")
