import gc
import os
import weakref

import pytest

from etc_dist.settings import Settings
from etc_dist.world import start


class Thing:
    def __init__(self, number: int):
        self.number = number

    def await_end(self) -> None:
        """No run was ended."""


@pytest.mark.mpi
def test_thing_lives_until_it_is_release_or_the_world_closes():
    world = start(Settings(backend="cpu"))
    first, second = Thing(1), Thing(2)
    alive = weakref.ref(first), weakref.ref(second)
    world.hold(first)
    world.hold(second)
    world.release(first)
    world.release(first)
    del first, second
    gc.collect()
    assert [thing() is not None for thing in alive] == [False, True]
    world.close()
    gc.collect()
    assert alive[1]() is None


@pytest.mark.mpi
def test_show_names_rank_backend_host_and_mpi(world):
    text = world.show()
    start = f"world: rank {world.rank} of {world.size}, backend {world.backend} ("
    assert text.startswith(start)
    assert ", host " in text and ", MPI " in text


@pytest.mark.mpi(ranks=[1])
def test_block_that_an_exception_leaves_closes_a_world_of_one_rank():
    from mpi4py import MPI

    world = start(Settings(backend="cpu"), MPI.COMM_SELF)
    with pytest.raises(ZeroDivisionError), world:
        world.allocate(8)
        raise ZeroDivisionError
    assert world.closed


@pytest.mark.mpi
def test_free_memory_is_less_than_that_of_the_host_or_the_gpu(world):
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if world.backend == "cuda":
        import cupy

        _, whole = cupy.cuda.runtime.memGetInfo()
    assert 2**20 < world.free_bytes() <= whole
