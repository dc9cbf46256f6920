import pytest

from etc_dist.errors import ArgumentError, SymmetricMemoryError, WorldError
from etc_dist.settings import Settings
from etc_dist.world import start


@pytest.mark.mpi
def test_allocation_beyond_all_memory_is_refused(world):
    with pytest.raises(SymmetricMemoryError) as caught:
        world.allocate(1 << 60)
    assert "cannot hold this allocation" in caught.value.what
    assert isinstance(caught.value, MemoryError)
    world.barrier()


@pytest.mark.mpi(ranks=[2])
def test_allocation_of_unlike_sizes_is_refused(world):
    with pytest.raises(ArgumentError, match=r"rank 1: world.allocate\(1025\)"):
        world.allocate(1024 + world.rank)
    world.barrier()


@pytest.mark.mpi
def test_allocation_of_a_negative_size_is_refused(world):
    with pytest.raises(ArgumentError, match="nbytes = -1"):
        world.allocate(-1)


@pytest.mark.mpi
@pytest.mark.parametrize("nbytes", [1.5, True])
def test_size_that_is_not_an_int_is_a_type_error_on_all_ranks(world, nbytes):
    with pytest.raises(TypeError, match="nbytes expects an int, got"):
        world.allocate(nbytes if world.rank == 0 else 64)
    world.barrier()


@pytest.mark.mpi
def test_freed_memory_cannot_be_used(world):
    memory = world.allocate(64)
    memory.free()
    with pytest.raises(WorldError, match="after it was freed"):
        _ = memory.local


@pytest.mark.mpi
def test_closed_world_is_named_in_the_error():
    world = start(Settings(backend="cpu"))
    world.close()
    world.close()
    with pytest.raises(WorldError, match="cannot be used: it was closed"):
        world.allocate(64)
