"""The order of launches over streams, with a stand-in for CuPy that records calls."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from etc_dist.runtime.stream import LaunchOrder


class Stream:
    """A stream of CuPy on device 0, or an external one without a device."""

    def __init__(self, ptr: int, device_id: int = 0):
        self.ptr, self.device_id = ptr, device_id
        self.waits = 0

    def wait_event(self, event: Event) -> None:
        self.waits += 1
        event.awaited.append(self.ptr)


class Event:
    ptr = 77

    def __init__(self, **_: Any):
        self.recorded: list[int] = []
        self.awaited: list[int] = []

    def record(self, stream: Stream) -> None:
        self.recorded.append(stream.ptr)


class Fault(Exception):
    """The stand-in's CUDARuntimeError."""


@pytest.fixture
def runtime() -> SimpleNamespace:
    return SimpleNamespace(
        streamQuery=lambda ptr: 600, eventQuery=lambda ptr: 0, CUDARuntimeError=Fault
    )


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch, runtime: SimpleNamespace) -> LaunchOrder:
    cuda = SimpleNamespace(Stream=Stream, Event=Event, runtime=runtime)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    return LaunchOrder()


def launch(order: LaunchOrder, stream: Stream) -> int:
    """One launch; the number of waits of its stream so far."""
    order.enter(stream)
    order.leave(stream)
    return stream.waits


def test_launches_on_one_stream_of_cupy_do_not_wait(order):
    stream = Stream(5)
    assert [launch(order, stream) for _ in range(3)] == [0, 0, 0]
    assert order._event.recorded == []


def test_a_launch_on_another_stream_waits_for_the_last_one(order):
    first, second = Stream(5), Stream(6)
    assert [launch(order, s) for s in (first, second, second, first)] == [0, 1, 1, 1]
    assert (order._event.recorded, order._event.awaited) == ([5, 6], [6, 5])


def test_a_handle_that_cuda_gave_to_a_new_stream_waits_for_the_old_one(order):
    old, new = Stream(5, device_id=-1), Stream(5, device_id=-1)
    assert launch(order, old) == 0 and launch(order, new) == 1
    # Recorded while the handle is valid, not after the stream may be destroyed.
    assert order._event.recorded == [5, 5]


def test_cuda_s_own_streams_are_never_destroyed(order):
    null, again = Stream(0, device_id=-1), Stream(0, device_id=-1)
    assert launch(order, null) == launch(order, again) == 0


def test_the_end_of_a_launch_is_queried_by_stream_or_event(order, runtime):
    stream, raw = Stream(5), Stream(6, device_id=-1)
    assert not order.is_done(stream) and order.is_done(raw)
    runtime.streamQuery = lambda ptr: 700
    with pytest.raises(Fault, match="700"):
        order.is_done(stream)
