"""The "cuda" backend's book-keeping, with fakes for NVSHMEM and CuPy."""

import sys
from types import SimpleNamespace

import pytest

from etc_dist.errors import ArgumentError, SymmetricMemoryError, WorldError
from etc_dist.settings import describe_sharing
from etc_dist.world import far_transport, gpu_memory
from etc_dist.world.gpu_memory import GpuMemory
from etc_dist.world.hosts import Hosts


class OneRank:
    """The agreement of one rank."""

    rank, size = 0, 1

    def agree(self, step):
        return [step()]


class FakeLibrary:
    mapped = True
    full = False

    def __init__(self, path, heap_size):
        self.held = {}

    def version(self):
        return "3.4.5"

    def unique_id(self):
        return b"id"

    def start(self, rank, size, unique_id):
        assert (rank, size, unique_id) == (0, 1, b"id")

    def align(self, alignment, nbytes):
        if self.full:
            return 0
        address = 4096 * (1 + len(self.held))
        self.held[address] = nbytes
        return address

    def peer_address(self, address, rank):
        return address if self.mapped else 0

    def free(self, address):
        del self.held[address]

    def finalize(self):
        assert not self.held


class FakeCupy(SimpleNamespace):
    free_bytes = 8 << 30

    def __init__(self):
        runtime = SimpleNamespace(
            free=lambda address: None,
            deviceGetAttribute=lambda attribute, device: attribute == 133,
            memGetInfo=lambda: (self.free_bytes, 80 << 30),
            deviceSynchronize=lambda: None,
        )
        cuda = SimpleNamespace(
            runtime=runtime,
            Device=lambda index: SimpleNamespace(use=lambda: None),
            UnownedMemory=lambda *what: what,
            MemoryPointer=lambda memory, offset: memory,
        )
        view = SimpleNamespace(fill=lambda value: None)
        super().__init__(cuda=cuda, uint8="u1", ndarray=lambda *what: view)


@pytest.fixture
def memory(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", FakeCupy())
    monkeypatch.setattr(gpu_memory, "NvshmemLibrary", FakeLibrary)
    monkeypatch.setattr(gpu_memory, "load_library", lambda: "libnvshmem.so")
    monkeypatch.setattr(gpu_memory, "_owner", None)
    monkeypatch.setenv(far_transport.VARIABLE, "none")
    return lambda heap_size=4096, ranks_per_gpu=1, hosts=1: GpuMemory(
        OneRank(), Hosts(0, hosts, 1), 0, heap_size, ranks_per_gpu
    )


def test_heap_is_counted_and_refused_before_nvshmem_is_called(memory):
    heap = memory(4096)
    blocks = [heap.allocate(nbytes) for nbytes in (1, 1024, 1025)]
    with pytest.raises(SymmetricMemoryError, match="4096 of 4096 bytes in use"):
        heap.allocate(1)
    heap.free(blocks[2])
    assert heap.allocate(2048).addresses == (12288,)


def test_far_ranks_have_no_address(memory):
    block = memory(hosts=2).allocate(1)
    assert block.addresses[0] > 0 and block.peers[0] is not None
    assert (block.addresses[1], block.peers[1]) == (0, None)


@pytest.mark.parametrize("size", [(80 << 30) + 1, 999 << 40])
def test_a_heap_larger_than_the_gpu_starts_no_nvshmem(size, memory, monkeypatch):
    monkeypatch.delattr(FakeLibrary, "start")
    with pytest.raises(ArgumentError, match=rf"at most {80 << 30} .*\n.* {size} bytes"):
        memory(size)
    assert gpu_memory._owner is None


@pytest.mark.parametrize(("at_start", "fits"), [("0", True), ("1", False)])
def test_heaps_that_share_a_gpu_must_fit_if_taken_at_start(
    at_start, fits, memory, monkeypatch
):
    monkeypatch.setenv("NVSHMEM_DISABLE_CUDA_VMM", at_start)
    memory(40 << 30, ranks_per_gpu=2).close()
    if fits:
        memory(80 << 30, ranks_per_gpu=4).close()
    else:
        with pytest.raises(ArgumentError, match="bytes, by 4 ranks each"):
            memory(80 << 30, ranks_per_gpu=4)


def test_heap_that_cannot_grow_is_refused(memory):
    heap = memory(16 << 30)
    with pytest.raises(SymmetricMemoryError, match="bytes left on GPU 0"):
        heap.allocate(9 << 30)


def test_heaps_of_all_ranks_on_a_gpu_count_before_one_grows(memory):
    first = memory(16 << 30)
    first.free(first.allocate(3 << 30))
    first.close()
    with pytest.raises(SymmetricMemoryError, match="bytes left on GPU 0"):
        memory(16 << 30, ranks_per_gpu=4).allocate(3 << 30)


def test_shared_gpu_is_named_with_what_serves_it(memory):
    assert memory(ranks_per_gpu=4).mps
    assert describe_sharing(4, mps=True).startswith("shared by 4 ranks, under CUDA MPS")
    assert "time-sliced" in describe_sharing(2, mps=False)


def test_null_from_nvshmem_is_an_error(memory, monkeypatch):
    heap = memory()
    monkeypatch.setattr(FakeLibrary, "full", True)
    with pytest.raises(SymmetricMemoryError, match="NVSHMEM returned NULL"):
        heap.allocate(1)


def test_unmapped_peer_is_refused_and_nvshmem_ended(memory, monkeypatch):
    monkeypatch.setattr(FakeLibrary, "mapped", False)
    with pytest.raises(WorldError, match=r"no mapping of ranks \[0\]"):
        memory()
    assert gpu_memory._owner is None


def test_second_world_on_gpus_is_refused_until_the_first_is_closed(memory):
    first = memory()
    with pytest.raises(WorldError, match="close the other world first"):
        memory()
    first.close()
    memory().close()
