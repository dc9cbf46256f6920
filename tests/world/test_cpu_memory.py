import gc
import stat

import numpy as np
import pytest

from etc_dist.errors import SymmetricMemoryError
from etc_dist.settings import Settings
from etc_dist.world import cpu_memory, start


@pytest.fixture
def cpu_world():
    cpu_world = start(Settings(backend="cpu"))
    yield cpu_world
    cpu_world.close()


@pytest.mark.mpi
def test_memory_has_no_file_once_it_is_mapped(cpu_world):
    cpu_world.allocate(5000)
    assert list(cpu_memory.FOLDER.glob(f"{cpu_world._backend._stem}*")) == []


def test_file_is_private_and_never_an_existing_one(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu_memory, "FOLDER", tmp_path)
    path = tmp_path / "memory"
    cpu_memory._create(path, 4096)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        cpu_memory._create(path, 4096)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError, match="link"):
        cpu_memory._map(tmp_path / "link", 4096)


@pytest.mark.mpi
def test_array_over_freed_memory_can_still_be_read(cpu_world):
    memory = cpu_world.allocate(4096)
    array = memory.local
    array[:] = 7
    memory.free()
    del memory
    gc.collect()
    cpu_world.barrier()
    assert (array == np.uint8(7)).all()


@pytest.mark.mpi
def test_full_shared_memory_is_refused_on_all_ranks(cpu_world, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(cpu_memory.os, "posix_fallocate", fail)
        with pytest.raises(SymmetricMemoryError, match="No space left on device"):
            cpu_world.allocate(4096)
    assert list(cpu_memory.FOLDER.glob(f"{cpu_world._backend._stem}*")) == []
    cpu_world.allocate(4096).free()
