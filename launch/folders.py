"""Private folders with short paths, for the sockets of a job."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator

LONGEST = 100
"""Bytes of a socket's path; Linux takes 107, and programs add a suffix to it."""


@contextlib.contextmanager
def private_folder(prefix: str, longest_name: str) -> Iterator[str]:
    """A folder of mode 0700 that can hold a socket of this name, until the end.

    It is in the folder of temporary files, or in /tmp where that path is too long.
    """
    tried = []
    for parent in dict.fromkeys((tempfile.gettempdir(), "/tmp")):
        try:
            folder = tempfile.mkdtemp(prefix=prefix, dir=parent)
        except OSError as error:
            tried.append(f"{parent}: {error.strerror}")
            continue
        if len(os.fsencode(f"{folder}/{longest_name}")) <= LONGEST:
            break
        os.rmdir(folder)
        tried.append(f"{parent}: the path of a socket there is over {LONGEST} bytes")
    else:
        sys.exit(
            "launch/mpirun: no folder for the sockets of the job\n"
            f"  tried: {'; '.join(tried)}\n"
            "  to do: set TMPDIR to a writable folder with a short path"
        )
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
