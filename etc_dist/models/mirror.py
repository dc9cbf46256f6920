"""Small arrays that the host and the backend exchange in each step."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


class Mirror:
    """An int32 array in the memory of the backend, and its copy on the host: on GPUs in
    pinned memory, so that copies take their place in a stream; on the CPU backend both
    are the same array."""

    def __init__(self, shape: tuple[int, ...], backend: str, value: int) -> None:
        if backend == "cpu":
            self.host = np.full(shape, value, np.int32)
            self.device: Any = self.host
            self._cupy: Any = None
            return
        import cupy

        self._cupy, count = cupy, int(np.prod(shape))
        self._pinned = cupy.cuda.alloc_pinned_memory(4 * count)
        self.host = np.frombuffer(self._pinned, np.int32, count).reshape(shape)
        self.host[...] = value
        self.device = cupy.asarray(self.host)
        self._places = self.device.data.ptr, self.host.ctypes.data
        self._stream: Any = None

    def send(self) -> None:
        """Copy to the backend, before later work of the current stream. The host's
        copy may change once that work has ended."""
        if self._cupy is not None:
            to, source = self._places
            self._copy(to, source, self._cupy.cuda.runtime.memcpyHostToDevice)

    def fetch(self) -> None:
        """Copy to the host, after earlier work of the current stream."""
        if self._cupy is not None:
            source, to = self._places
            self._copy(to, source, self._cupy.cuda.runtime.memcpyDeviceToHost)

    def wait(self) -> Array:
        """The host's copy, once what was begun last has ended."""
        if self._cupy is not None:
            self._stream.synchronize()
        return self.host

    def _copy(self, to: int, source: int, kind: int) -> None:
        # NOTE: the runtime's function; methods of arrays take several microseconds.
        self._stream = self._cupy.cuda.get_current_stream()
        self._cupy.cuda.runtime.memcpyAsync(
            to, source, self.host.nbytes, kind, self._stream.ptr
        )
