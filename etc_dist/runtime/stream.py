"""Streams of any library as CuPy streams."""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any


class _Foreign:
    """A stream handle that speaks CUDA's stream protocol."""

    def __init__(self, handle: int):
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self._handle)


@lru_cache(maxsize=64)
def _from_handle(handle: int) -> Any:
    import cupy

    if hasattr(cupy.cuda.Stream, "from_external"):
        return cupy.cuda.Stream.from_external(_Foreign(handle))
    return cupy.cuda.ExternalStream(handle)


def stream_for(stream: Any, array: Any) -> Any | None:
    """The CuPy stream to launch on: `stream` if given (a handle, a CuPy or a torch
    stream), else torch's current one for torch arrays, else None: CuPy's current
    one."""
    if stream is None:
        if type(array).__module__.partition(".")[0] != "torch":
            return None
        torch = sys.modules["torch"]
        return _from_handle(torch.cuda.current_stream().cuda_stream)
    if isinstance(stream, int):
        return _from_handle(stream)
    if hasattr(stream, "cuda_stream"):
        return _from_handle(stream.cuda_stream)
    return stream
