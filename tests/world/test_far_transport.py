"""NVSHMEM's transport between hosts, before NVSHMEM starts."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from etc_dist.errors import WorldError
from etc_dist.world.far_transport import VARIABLE, prepare
from etc_dist.world.nvshmem import NvshmemLibrary

HOSTS = ["a", "a", "b", "b"]


def test_ranks_with_one_host_name_need_no_transport(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert prepare(["a", "a"], "libnvshmem_host.so.3") == "mapped memory"
    assert os.environ[VARIABLE] == "none"


@pytest.mark.parametrize(
    ("value", "reason"), [("none", "none, as"), (None, "nvshmem_transport_ibrc.so.3")]
)
def test_a_missing_transport_is_named(value, reason, monkeypatch, tmp_path):
    monkeypatch.delenv(VARIABLE, raising=False)
    if value:
        monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(WorldError, match="no transport to other hosts") as caught:
        prepare(HOSTS, str(tmp_path / "libnvshmem_host.so.3"))
    assert reason in caught.value.got


@pytest.mark.parametrize("status", [1, 2, 3, 4])
def test_nvshmem_that_reaches_no_far_rank_did_not_start(status):
    calls = dict.fromkeys(
        (
            "nvshmemx_set_attr_uniqueid_args",
            "nvshmemx_hostlib_init_attr",
            "nvshmemx_vendor_get_version_info",
        ),
        lambda *arguments: 0,
    )
    library = object.__new__(NvshmemLibrary)
    library._library = SimpleNamespace(**calls, nvshmemx_init_status=lambda: status)
    if status > 1:
        library.start(0, 2, bytes(128))
        return
    with pytest.raises(WorldError, match="NVSHMEM did not start") as caught:
        library.start(0, 2, bytes(128))
    assert (caught.value.got, VARIABLE in caught.value.fix) == ("return code 1", True)


@pytest.mark.parametrize(
    ("end", "is_named"),
    [
        ("Thread(target=libc.exit, args=(-1,)).start(); time.sleep(60)", True),
        ("far_transport.withdraw(); libc.exit(-1)", False),
        ("sys.exit(255)", False),
    ],
)
def test_a_process_that_native_code_ends_names_the_error(end, is_named):
    program = f"""
import ctypes, sys, time
from threading import Thread
from etc_dist.world import far_transport
libc = ctypes.CDLL(None)
far_transport.announce(3, "host-1", "100% of ibrc")
{end}
"""
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert process.returncode == 255
    if is_named:
        lines = process.stdout.splitlines()
        assert "WorldError: the process of this rank was ended by exit()" in lines[0]
        assert "rank 3, host host-1" in lines[1] and "100% of ibrc" in lines[2]
    else:
        assert process.stdout == ""
