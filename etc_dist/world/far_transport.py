"""NVSHMEM's transport between hosts: one of its plug-ins, named by a variable."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

from etc_dist.errors import WorldError

VARIABLE = "NVSHMEM_REMOTE_TRANSPORT"
DEFAULT, NONE = "ibrc", "none"
"""NVSHMEM's default; the value for no transport."""
MAPPED = "mapped memory"


def prepare(names: Sequence[str], library: str) -> str:
    """Choose the transport before NVSHMEM starts. `names`: of the hosts, by rank;
    `library`: the path of NVSHMEM's host library. Returns its description.

    NVSHMEM maps the memory of ranks with the same host name, so pretended hosts need no
    transport. Raises WorldError where one is needed and missing.
    """
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
