from collections.abc import Iterator
from pathlib import Path

import pytest

from etc_dist.settings import Settings
from etc_dist.world import World, start


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Files that import torch are read only where it is installed."""
    return None if config.getoption("--torch") else True


@pytest.fixture(scope="session")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """The world of one rank over torch's default process group."""
    from torch import distributed as dist

    store = dist.FileStore(str(Path(tmp_path_factory.mktemp("store")) / "file"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    with start(Settings(backend="cpu"), process_group=dist.group.WORLD) as world:
        yield world
    dist.destroy_process_group()
