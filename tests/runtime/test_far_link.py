"""What programs over several hosts need to be linked."""

import pytest
from cuda import pathfinder

from etc_dist.errors import BuildError
from etc_dist.runtime import far_link


def test_missing_headers_are_named(monkeypatch):
    def find(library):
        raise RuntimeError("not installed")

    monkeypatch.setattr(pathfinder, "find_nvidia_header_directory", find)
    with pytest.raises(BuildError, match="the headers of nvshmem") as caught:
        far_link.nvshmem_version()
    assert caught.value.got == "not installed"
