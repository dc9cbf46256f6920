import numpy as np
import pytest


@pytest.mark.mpi
def test_memory_is_zeroed_aligned_and_of_the_requested_size(world):
    memory = world.allocate(5000)
    assert memory.nbytes == 5000
    assert memory.local.shape == (5000,) and memory.local.dtype == np.uint8
    assert not memory.local.any()
    assert [address % 1024 for address in memory.addresses] == [0] * world.size
    memory.free()


@pytest.mark.mpi(ranks=[4])
def test_every_rank_sees_what_each_peer_wrote(world):
    memory = world.allocate(2048)
    memory.local[:] = 10 + world.rank
    assert int(memory.local[0]) == 10 + world.rank  # on a GPU, waits for the write
    world.barrier()
    ends = [(int(peer[0]), int(peer[-1])) for peer in memory.peers]
    assert ends == [(10 + rank, 10 + rank) for rank in range(world.size)]
    memory.free()


@pytest.mark.mpi(ranks=[1, 4])
def test_write_into_a_peers_block_arrives_there(world):
    memory = world.allocate(world.size)
    right = (world.rank + 1) % world.size
    memory.peers[right][world.rank] = 7
    assert int(memory.peers[right][world.rank]) == 7
    world.barrier()
    expected = np.zeros(world.size, dtype=np.uint8)
    expected[(world.rank - 1) % world.size] = 7
    assert memory.local.tolist() == expected.tolist()
    memory.free()


@pytest.mark.mpi
def test_addresses_are_those_of_the_peers_arrays(world):
    memory = world.allocate(64)
    pointers = [
        peer.ctypes.data if world.backend == "cpu" else peer.data.ptr
        for peer in memory.peers
    ]
    assert list(memory.addresses) == pointers
    assert memory.peers[world.rank] is memory.local
    memory.free()


@pytest.mark.mpi
def test_blocks_do_not_overlap_and_can_be_freed_in_any_order(world):
    blocks = [world.allocate(nbytes) for nbytes in (0, 1, 1025)]
    blocks[1].local[:] = 3
    assert blocks[0].local.size == 0 and not blocks[2].local.any()
    for block in (blocks[1], blocks[0], blocks[2]):
        block.free()
        block.free()
