"""NVSHMEM's transport between hosts, before NVSHMEM starts."""

import os

import pytest

from etc_dist.errors import WorldError
from etc_dist.world.far_transport import VARIABLE, expect_equal, prepare

HOSTS = ["a", "a", "b", "b"]


def test_ranks_with_one_host_name_need_no_transport(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert prepare(["a", "a"], "libnvshmem_host.so.3") == "mapped memory"
    assert os.environ[VARIABLE] == "none"


@pytest.mark.parametrize(
    ("value", "got"), [("none", "none, as"), (None, "nvshmem_transport_ibrc.so.3")]
)
def test_a_missing_transport_is_named(value, got, monkeypatch, tmp_path):
    monkeypatch.delenv(VARIABLE, raising=False)
    if value:
        monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(WorldError, match="no transport to other hosts") as caught:
        prepare(HOSTS, str(tmp_path / "libnvshmem_host.so.3"))
    assert got in caught.value.got


def test_versions_that_differ_are_named():
    expect_equal(["3.4.5"] * 4)
    with pytest.raises(WorldError, match="different versions of NVSHMEM") as caught:
        expect_equal(["3.4.5", "3.4.5", "3.5.0", "3.5.0"])
    assert caught.value.got.splitlines()[0].startswith("ranks 0, 1: 3.4.5")
