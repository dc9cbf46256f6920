"""The error for a process that native code ends by exit().

NVSHMEM does so where its transport to other hosts fails: in a separate thread, in
which no Python code can run safely. So C's printf prints the text.
"""

from __future__ import annotations

import atexit
import ctypes

from etc_dist.errors import WorldError

_text = 0
"""The address of what is printed when C ends the process: C's memory, since Python's
is gone by then. It stays registered, possibly empty."""


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
