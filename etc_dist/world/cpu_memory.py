"""Memory that all ranks of a host map: a file that is unlinked once it is mapped.

It is the symmetric memory of the backend "cpu", and holds the SignatureBoard."""

from __future__ import annotations

import mmap
import os
import secrets
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from etc_dist.errors import SymmetricMemoryError
from etc_dist.world.agreement import Agreement
from etc_dist.world.hosts import Hosts
from etc_dist.world.memory import Allocation, Backend

FOLDER = Path("/dev/shm")
"""Where Linux keeps shared memory."""
PAGE = mmap.PAGESIZE


def machine_key() -> str:
    """Equal exactly on ranks of one machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def host_key() -> str:
    """Equal exactly on ranks that share the files in `FOLDER`."""
    return f"{machine_key()} {FOLDER.stat().st_dev}"


class CpuMemory(Backend):
    """Shared memory for the ranks of each host. Collective, on all hosts together."""

    name = "cpu"
    device: int | str = "cpu"

    def __init__(self, agreement: Agreement, hosts: Hosts):
        self._agreement, self._hosts = agreement, hosts
        # Unpredictable, and known to every rank before the first file exists: each
        # rank can remove a file, also if the rank that created it has ended.
        token = agreement.agree(lambda: secrets.token_hex(16))[0]
        # Pretended hosts share the folder.
        self._stem = f"etc_dist-{token}-{hosts.own}"
        self._files = 0

    def map(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Zeroed memory, the same on every rank of the host; it begins with a page.

        It is freed with the last array over it, on any rank. SymmetricMemoryError on
        every rank where the host does not have enough memory."""
        self._files += 1
        path = FOLDER / f"{self._stem}-{self._files}"
        mapped: list[npt.NDArray[np.uint8]] = []
        try:
            if self._hosts.local_rank == 0:
                self._agreement.agree_done(lambda: _create(path, nbytes))
            else:
                self._agreement.agree_done(lambda: None)
            self._agreement.agree_done(lambda: mapped.append(_map(path, nbytes)))
        finally:
            path.unlink(missing_ok=True)
        return mapped[0]

    def allocate(self, nbytes: int) -> Allocation:
        stride = -(-max(nbytes, 1) // PAGE) * PAGE
        hosts = self._hosts
        whole = self.map(stride * hosts.local_size)
        first = int(whole.ctypes.data)
        addresses: list[int] = [0] * hosts.size
        peers: list[Any] = [None] * hosts.size
        for local_rank, rank in enumerate(hosts.near):
            start = local_rank * stride
            addresses[rank] = first + start
            peers[rank] = whole[start : start + nbytes]
        return Allocation(tuple(addresses), tuple(peers), None)

    def free_bytes(self) -> int:
        lines = Path("/proc/meminfo").read_text().splitlines()
        sizes = {
            name: size for name, _, size in (line.partition(":") for line in lines)
        }
        available = int(sizes["MemAvailable"].removesuffix("kB"))
        return 1024 * available // self._hosts.local_size

    def show(self) -> str:
        return "shared memory of the host"


def _create(path: Path, nbytes: int) -> None:
    """Create a file with all its pages: writes to missing ones may raise SIGBUS."""
    status = os.statvfs(FOLDER)
    available = status.f_bavail * status.f_frsize
    if nbytes > available:
        raise _exhausted(nbytes, f"{available} bytes left")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.open(path, flags, 0o600)
    try:
        os.posix_fallocate(file, 0, nbytes)
    except OSError as fault:
        raise _exhausted(nbytes, str(fault)) from fault
    finally:
        os.close(file)


def _map(path: Path, nbytes: int) -> npt.NDArray[np.uint8]:
    file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return np.frombuffer(mmap.mmap(file, nbytes), dtype=np.uint8)
    finally:
        os.close(file)


def _exhausted(total: int, got: str) -> SymmetricMemoryError:
    return SymmetricMemoryError(
        "the host's shared memory cannot hold this allocation",
        where=f"shared memory of the ranks in {FOLDER}",
        wanted=f"{total} bytes for all ranks of this host together",
        got=got,
        fix="allocate less, free symmetric memory that is unused, or give the "
        f"host a larger {FOLDER} (docker: --shm-size)",
    )
