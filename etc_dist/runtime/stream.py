"""Streams of any library as CuPy streams, and the order of launches over them."""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from etc_dist.errors import ArgumentError
from etc_dist.ir.expr import is_integer
from etc_dist.runtime.arrays import library_of

if TYPE_CHECKING:
    from etc_dist.world import World


class _Foreign:
    """A stream handle with CUDA's stream protocol."""

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


def stream_for(backend: str, stream: Any, array: Any) -> Any | None:
    """The CuPy stream to launch on: `stream` if given (a handle, a CuPy or a torch
    stream), else torch's current one for torch arrays, else None: CuPy's current
    one, or none on the CPU backend. ArgumentError for anything else."""
    if backend == "cpu":
        if stream is not None:
            raise _no_stream(stream, "None on the CPU backend")
        return None
    if stream is None:
        if library_of(type(array)) != "torch":
            return None
        # NOTE: the handle alone; torch.cuda.current_stream takes microseconds.
        current_handle = sys.modules["torch"]._C._cuda_getCurrentRawStream
        return _from_handle(current_handle(array.get_device()))
    if is_integer(stream):
        return _from_handle(int(stream))
    if hasattr(stream, "cuda_stream"):
        return _from_handle(stream.cuda_stream)
    if not hasattr(stream, "ptr"):
        raise _no_stream(stream, "a CuPy or a torch stream, its handle, or None")
    return stream


def _no_stream(stream: Any, wanted: str) -> ArgumentError:
    return ArgumentError(
        "argument stream is not a stream of this backend",
        where="argument stream",
        wanted=wanted,
        got=repr(stream),
        fix="omit it, or pass such a stream; nothing was launched",
    )


def is_capturing(backend: str, stream: Any | None) -> bool:
    """Whether a run on `stream`, as `stream_for` returns it, would be captured."""
    if backend == "cpu":
        return False
    import cupy

    return bool((stream or cupy.cuda.get_current_stream()).is_capturing())


class LaunchOrder:
    """Serialises all runs of a world, in the order of the calls.

    A program's workers take whole SMs and wait for peers. Two concurrent programs, each
    on half of the SMs or in another order on another rank, would deadlock. Ranks make
    their calls in the same order, so this order is safe with any streams."""

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy
        self._last: Any = None
        """The stream of the last launch."""
        self._is_kept = True
        """Whether that stream lives as long as its Python object."""
        self._event = cupy.cuda.Event(disable_timing=True)
        """Recorded after the last launch on a stream that others may destroy."""

    def enter(self, stream: Any) -> None:
        """Order the next launch on `stream` after the last launch."""
        last = self._last
        if last is None:
            return
        if self._is_kept:
            if last.ptr == stream.ptr:
                return
            self._event.record(last)
        # NOTE: CUDA reuses the handles of destroyed streams. If others may destroy the
        # last stream, equal handles do not mean the same stream.
        stream.wait_event(self._event)

    def leave(self, stream: Any) -> None:
        """Record the launch that was just made on `stream`."""
        if stream is not self._last:
            self._is_kept = self._keeps(stream)
            self._last = stream
        if not self._is_kept:
            self._event.record(stream)

    def forget(self) -> None:
        """All launches have ended."""
        self._last = None

    def is_done(self, stream: Any) -> bool:
        """Whether the last launch on `stream` has ended; raises its error."""
        runtime = self._cupy.cuda.runtime
        if self._keeps(stream):
            status = runtime.streamQuery(stream.ptr)
        else:
            status = runtime.eventQuery(self._event.ptr)
        if status == 0:
            return True
        if status != _NOT_READY:
            raise runtime.CUDARuntimeError(status)
        return False

    def _keeps(self, stream: Any) -> bool:
        """Whether a stream lives as long as its CuPy object: CuPy made it, or it is a
        default stream. CuPy has no device id for external streams."""
        if stream.ptr in _DEFAULT_STREAMS:
            return True
        return isinstance(stream, self._cupy.cuda.Stream) and stream.device_id != -1


_NOT_READY = 600
"""The driver's cudaErrorNotReady."""
_DEFAULT_STREAMS = (0, 1, 2)
"""Handles of CUDA's default streams: null, legacy, per thread."""
_orders: WeakKeyDictionary[World, LaunchOrder] = WeakKeyDictionary()


def order_of(world: World) -> LaunchOrder:
    """The launch order of `world`, shared by its programs."""
    if world not in _orders:
        _orders[world] = LaunchOrder()
    return _orders[world]
