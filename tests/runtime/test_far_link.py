"""What programs over several hosts need to be linked, and their use of NVSHMEM."""

import sys
from dataclasses import replace
from unittest.mock import MagicMock

import pytest
from cuda import pathfinder

from etc_dist.codegen import generate
from etc_dist.errors import BuildError
from etc_dist.runtime import far_link, gpu
from etc_dist.schedule import schedule_static
from tests.graphs.exchange_hosts import exchange_hosts


def test_missing_headers_are_named(monkeypatch):
    def find(library):
        raise RuntimeError("not installed")

    monkeypatch.setattr(pathfinder, "find_nvidia_header_directory", find)
    with pytest.raises(BuildError, match="the headers of nvshmem") as caught:
        far_link.nvshmem_version()
    assert caught.value.got == "not installed"


def test_a_refused_program_is_not_known_to_nvshmem(monkeypatch):
    """It is unloaded without close(), and NVSHMEM writes to all modules it knows."""
    cupy, world, library = MagicMock(), MagicMock(ranks_per_gpu=1), MagicMock()
    cupy.cuda.alloc_pinned_memory.return_value = bytearray(64)
    world.agree_done, world.broken = lambda step: step(), False
    world.settings.world_limit = 10.0
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    for name, stand_in in (
        ("library", lambda: library),
        ("_load", lambda *_: (MagicMock(ptr=5), MagicMock())),
        ("most_resident", MagicMock()),
        ("resident_workers", lambda *_, **__: 4),
        ("order_of", MagicMock()),
    ):
        monkeypatch.setattr(gpu, name, stand_in)
    plan = replace(schedule_static(exchange_hosts(2, local_size=1)), has_far=True)
    executor = gpu.GpuExecutor(plan, world, generate(plan), MagicMock())
    assert not library.mock_calls
    executor.grow({"rows": 1, "n": 4})
    executor.grow({"rows": 9, "n": 4})
    library.init_module.assert_called_once_with(5)
    executor.close()
    library.end_module.assert_called_once_with(5)
