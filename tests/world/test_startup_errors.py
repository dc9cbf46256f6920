import sys
from dataclasses import replace
from pathlib import Path

import pytest

from etc_dist.errors import ArgumentError, WorldError
from etc_dist.settings import Settings
from etc_dist.world import mpi, start, startup
from etc_dist.world.choice import Gpus

CPU = Settings(backend="cpu")


@pytest.mark.mpi(ranks=[2])
def test_settings_that_differ_are_refused_on_all_ranks(world, monkeypatch):
    # The import of CuPy takes seconds; the GPUs do not matter here.
    monkeypatch.setattr(
        "etc_dist.world.startup.find_gpus", lambda: Gpus(missing="no CuPy")
    )
    settings = Settings(backend="cpu" if world.rank else "auto")
    with pytest.raises(ArgumentError, match="different settings of backend"):
        start(settings)
    assert world.gather(1) == [1] * world.size


# Arguments of start on the last rank alone, and the error of all ranks.
ARGUMENTS = {
    "settings expects a Settings or None, got str": ({"settings": "x"}, TypeError),
    "comm expects an Intracomm or None, got str": (
        {"settings": CPU, "comm": "x"},
        TypeError,
    ),
    "wait_limit = -1": ({"settings": replace(CPU, wait_limit=-1)}, ArgumentError),
}


@pytest.mark.mpi
@pytest.mark.parametrize("text", ARGUMENTS)
def test_bad_arguments_of_one_rank_start_no_world_on_any(text, world):
    before, is_bad = list(startup._worlds), world.rank == world.size - 1
    arguments, kind = ARGUMENTS[text]
    with pytest.raises(kind, match=text):
        start(**(arguments if is_bad else {"settings": CPU}))
    assert startup._worlds == before
    assert world.gather(1) == [1] * world.size


@pytest.mark.mpi(ranks=[1])
def test_a_refused_start_frees_its_communicator(one_rank):
    # MPICH has 2048 communicators to give.
    for _ in range(2100):
        with pytest.raises(TypeError, match="comm expects"):
            start(CPU, comm="x")
    assert one_rank.gather(1) == [1]


@pytest.mark.mpi(ranks=[2])
def test_a_start_that_some_ranks_do_not_call_ends(world, monkeypatch):
    from mpi4py import MPI

    monkeypatch.setattr(Settings, "world_limit", 0.3)
    place = MPI.COMM_WORLD.Dup()
    if world.rank == 0:
        with pytest.raises(WorldError, match="not all of them"):
            start(CPU, comm=place)
    world.barrier()
    if world.rank > 0:  # completes the Idup of rank 0
        place.Idup()[1].Wait()
    MPI.COMM_WORLD.Barrier()  # where rank 0 completes it, too
    assert world.gather(1) == [1] * world.size


@pytest.mark.mpi
def test_a_communicator_that_was_freed_starts_no_world():
    from mpi4py import MPI

    freed = MPI.COMM_WORLD.Dup()
    freed.Free()
    with pytest.raises(ArgumentError, match=r"got: +comm = MPI.COMM_NULL"):
        start(CPU, comm=freed)


@pytest.mark.mpi
def test_a_cache_may_be_a_text():
    world = start(replace(CPU, cache="/tmp/here"))
    assert world.settings.cache == Path("/tmp/here")
    world.close()


def test_missing_mpi_is_reported_with_its_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(WorldError, match="pip install mpi4py mpich"):
        start(Settings(backend="cpu"))


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("step", "text"),
    [("_start", "did not take part"), ("_forget_closed", "interrupted")],
)
def test_a_start_that_is_interrupted_on_one_rank_leaves_no_world(
    step, text, world, monkeypatch
):
    before, is_interrupted = list(startup._worlds), world.rank == world.size - 1
    monkeypatch.setattr(Settings, "world_limit", 1.0)
    settings = Settings(backend="cpu", world_limit=1.0)
    if is_interrupted:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(startup, step, interrupt)
            start(settings)
        assert startup._worlds == before
    else:
        with pytest.raises(WorldError, match=text):
            start(settings).barrier()
    world.barrier()
    again = start(CPU)
    again.barrier()
    again.close()


@pytest.mark.mpi(ranks=[2])
def test_what_mpi_still_uses_outlives_an_interrupted_start(world, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(mpi.MpiTransport, "receive", interrupt)
        start(CPU)
    messages = mpi._unfinished[-1]._sending
    peers = [message.rank for message in messages]
    assert sorted([*peers, world.rank]) == list(range(world.size))
    for message in messages:
        message.request.Cancel()
        message.request.Wait()
    assert world.gather(1) == [1] * world.size
