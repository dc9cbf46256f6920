"""Small arrays that the host and the backend exchange in each step."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


class Mirror:
    """An int32 array in the memory of the backend, and its copy on the host: on GPUs in
    pinned memory, so that copies take their place in a stream; on the CPU backend both
    are the same array. is_sent: whether the backend has the host's copy."""

    def __init__(self, shape: tuple[int, ...], backend: str, value: int) -> None:
        self.is_sent = True
        if backend == "cpu":
            self.host = np.full(shape, value, np.int32)
            self.device: Any = self.host
            self._cupy: Any = None
            return
        import cupy

        self._cupy = cupy
        self.host, _ = _pinned(cupy, shape, value)
        self.device = cupy.asarray(self.host)
        self._places = self.device.data.ptr, self.host.ctypes.data

    def send(self) -> None:
        """Copy to the backend, before later work of the current stream. The host's
        copy may change once that work has ended."""
        if self._cupy is not None:
            # NOTE: the runtime's function; methods of arrays take several microseconds.
            cuda = self._cupy.cuda
            stream = cuda.get_current_stream().ptr
            kind = cuda.runtime.memcpyHostToDevice
            cuda.runtime.memcpyAsync(*self._places, self.host.nbytes, kind, stream)
        self.is_sent = True


class HostArray:
    """An int32 array on the host, which the backend reads or writes in place: on GPUs
    through mapped memory, without a copy. What a run writes is complete, and what
    it reads may be changed, only after it has ended. device: the program's array."""

    def __init__(self, shape: tuple[int, ...], backend: str, value: int) -> None:
        if backend == "cpu":
            self.host = np.full(shape, value, np.int32)
            self.device: Any = self.host
            return
        import cupy

        self.host, memory = _pinned(cupy, shape, value)
        device = cupy.cuda.runtime.getDevice()
        place = cupy.cuda.UnownedMemory(memory.ptr, self.host.nbytes, memory, device)
        pointer = cupy.cuda.MemoryPointer(place, 0)
        self.device = cupy.ndarray(shape, np.int32, pointer)


def _pinned(cupy: Any, shape: tuple[int, ...], value: int) -> tuple[Array, Any]:
    """An array in pinned memory, and that memory."""
    count = int(np.prod(shape))
    memory = cupy.cuda.alloc_pinned_memory(4 * count)
    host = np.frombuffer(memory, np.int32, count).reshape(shape)
    host[...] = value
    return host, memory
