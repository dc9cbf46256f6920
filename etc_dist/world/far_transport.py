"""NVSHMEM's transport between hosts: one of its plug-ins, named by a variable; and the
error where it fails: NVSHMEM then ends the process by exit(), in a separate thread, in
which no Python code can run safely. So C's printf prints the text."""

from __future__ import annotations

import atexit
import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

from etc_dist.errors import WorldError

VARIABLE = "NVSHMEM_REMOTE_TRANSPORT"
DEFAULT, NONE = "ibrc", "none"
"""NVSHMEM's default; the value for no transport."""
MAPPED = "mapped memory"
_text = 0
"""The address of what is printed when C ends the process: C's memory, since Python's
is gone by then. It stays registered, possibly empty."""


def prepare(names: Sequence[str], library: str) -> str:
    """Choose the transport before NVSHMEM starts. `names`: of the hosts, by rank;
    `library`: the path of NVSHMEM's host library. Returns its description.

    NVSHMEM maps the memory of ranks with the same host name, so pretended hosts need no
    transport. Raises WorldError where one is needed and missing."""
    if len(set(names)) == 1:
        os.environ.setdefault(VARIABLE, NONE)
        return MAPPED
    name = os.environ.get(VARIABLE, DEFAULT).strip().lower()
    missing = "none, as the variable says" if name == NONE else _fault(name, library)
    if missing:
        raise WorldError(
            "NVSHMEM has no transport to other hosts",
            where=f"host {os.uname().nodename}, {VARIABLE}={name}",
            wanted="one of NVSHMEM's transports, which loads: ibrc, ibdevx, ucx, "
            "libfabric",
            got=missing,
            fix=f"set {VARIABLE} to one that this host's network supports and install "
            "its libraries, start all ranks on one host, or set ETC_DIST_BACKEND=cpu",
        )
    return f"NVSHMEM's {name}"


def _fault(name: str, library: str) -> str:
    """Why the plug-in of a transport does not load; empty if it does."""
    folder, stem = Path(library).parent, f"nvshmem_transport_{name}.so."
    # NOTE: in newer versions of NVSHMEM plug-ins have another number than the library.
    installed = sorted(path.name for path in folder.glob(f"{stem}*"))
    number = library.rpartition(".so.")[2].partition(".")[0]
    for file in installed or [stem + number]:
        # By its name first: NVSHMEM, too, takes one that is loaded already.
        for place in (file, str(folder / file)):
            try:
                ctypes.CDLL(place)
                return ""
            except OSError as error:
                fault = str(error)
    return fault


def announce(rank: int, host: str, transport: str) -> None:
    """From now on, print an error if the process is ended other than by Python."""
    global _text
    error = WorldError(
        "the process of this rank was ended by exit() in native code",
        where=f"rank {rank}, host {host}",
        wanted=f"a transport to other hosts that works ({transport})",
        got="exit(), by NVSHMEM where its transport fails, or by MPI where another "
        "rank has ended the job; see the messages before",
        fix="look for a rank that ended before; else set NVSHMEM_DEBUG=WARN, and check "
        "the network",
    )
    text = f"etc_dist: WorldError: {error}\n".encode().replace(b"%", b"%%")
    libc, address = ctypes.CDLL(None), ctypes.c_void_p
    libc.strdup.restype = address
    _text = libc.strdup(text)
    register = getattr(libc, "__cxa_atexit")
    register.argtypes = [address] * 3
    register(ctypes.cast(libc.printf, address), _text, None)
    atexit.register(withdraw)


def withdraw() -> None:
    """Print nothing at the end of the process."""
    if _text:
        ctypes.memset(_text, 0, 1)
