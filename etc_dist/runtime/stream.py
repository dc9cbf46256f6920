"""Streams of any library as CuPy streams, and the order of launches over them."""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from etc_dist.errors import ArgumentError
from etc_dist.ir.expr import is_whole
from etc_dist.runtime.arrays import library_of

if TYPE_CHECKING:
    from etc_dist.world import World


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


def stream_for(backend: str, stream: Any, array: Any) -> Any | None:
    """The CuPy stream to launch on: `stream` if given (a handle, a CuPy or a torch
    stream), else torch's current one for torch arrays, else None: CuPy's current
    one, or none on the CPU backend. ArgumentError for what is no stream there."""
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
    if is_whole(stream):
        return _from_handle(int(stream))
    if hasattr(stream, "cuda_stream"):
        return _from_handle(stream.cuda_stream)
    if not hasattr(stream, "ptr"):
        raise _no_stream(stream, "a CuPy or a torch stream, its handle, or None")
    return stream


def _no_stream(stream: Any, wanted: str) -> ArgumentError:
    return ArgumentError(
        "argument stream is no stream to run on",
        where="argument stream",
        wanted=wanted,
        got=repr(stream),
        fix="leave it out, or pass such a stream; nothing was launched",
    )


class LaunchOrder:
    """All runs of a world one after the other, in the order of the calls.

    A program's workers take whole SMs and wait for peers: two programs at once, each on
    half of the SMs or each first on another rank, would wait for ever. Ranks make their
    calls in the same order, so that order is safe whatever streams are used.
    """

    def __init__(self) -> None:
        self._last: Any = None

    def enter(self, stream: Any) -> None:
        """Let what is launched on `stream` next come after the last launch."""
        if self._last is not None and self._last.ptr != stream.ptr:
            import cupy

            event = cupy.cuda.Event(disable_timing=True)
            event.record(self._last)
            stream.wait_event(event)
        self._last = stream


_orders: WeakKeyDictionary[World, LaunchOrder] = WeakKeyDictionary()


def order_of(world: World) -> LaunchOrder:
    """The launch order of `world`, shared by its programs."""
    return _orders.setdefault(world, LaunchOrder())
