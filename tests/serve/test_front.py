"""What the process of the HTTP server sends to that of the steps."""

from __future__ import annotations

import signal
import socket
from multiprocessing import Pipe
from types import SimpleNamespace

import pytest

from etc_dist.serve.channel import Channel
from etc_dist.serve.front import Front, run_front
from etc_dist.serve.jobs import Failure, Ready


@pytest.fixture
def handlers():
    """Restores what handles SIGTERM."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_no_job_comes_before_the_server_is_ready(handlers, monkeypatch):
    monkeypatch.setattr(Front, "start", lambda front: front._put(7))  # at once
    monkeypatch.setattr(Front, "fail", lambda front, text: None)
    own_end, other_end = map(Channel, pipe := Pipe())
    own_end.send(SimpleNamespace(num_pages=1))
    own_end.send(Failure("a step"))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        run_front(pipe[1], listener, 1)
    assert [own_end.receive() for _ in range(2)] == [Ready(), 7]
    own_end.close()
    other_end.close()
