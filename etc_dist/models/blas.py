"""The threads of NumPy's products, for commands on the CPU backend."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

PREFIXES = "scipy_openblas_", "openblas_"
SUFFIXES = "64_", ""


def use_one_thread() -> None:
    """Let OpenBLAS compute products by one thread: those of tasks are so small that its
    threads mostly wait for each other, for a multiple of the time on a busy machine.
    No effect with other libraries, and on systems without Linux's /proc."""
    for library in _libraries():
        function = _function(library, "set_num_threads")
        if function is not None:
            function(1)


def count_threads() -> list[int]:
    """The threads of each OpenBLAS that is loaded."""
    functions = (_function(library, "get_num_threads") for library in _libraries())
    return [function() for function in functions if function is not None]


def _libraries() -> list[ctypes.CDLL]:
    try:
        maps = Path("/proc/self/maps").read_text(errors="replace")
    except OSError:
        return []
    lines = (line.split(maxsplit=5) for line in maps.splitlines())
    paths = {line[5] for line in lines if len(line) == 6}
    return [ctypes.CDLL(path) for path in sorted(paths) if "openblas" in path]


def _function(library: ctypes.CDLL, name: str) -> Any:
    names = (f"{begin}{name}{end}" for begin in PREFIXES for end in SUFFIXES)
    return next((getattr(library, n) for n in names if hasattr(library, n)), None)
