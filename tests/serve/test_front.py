"""What the process of the HTTP server sends to that of the steps."""

from __future__ import annotations

import signal
import socket
from contextlib import closing
from multiprocessing import Pipe
from types import SimpleNamespace

import pytest

from etc_dist.errors import ArgumentError
from etc_dist.serve.channel import Channel
from etc_dist.serve.front import Front, run_front
from etc_dist.serve.front_process import FrontProcess
from etc_dist.serve.jobs import Ended, Failure, Ready, Served
from etc_dist.serve.serve_command import bound_socket


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


def test_a_port_on_which_another_server_listens_by_now_is_refused():
    served_model = Served("name", None, None, 16, 1, True, 1)
    with closing(bound_socket("127.0.0.1", 0)) as other_socket:
        port = other_socket.getsockname()[1]
        with FrontProcess(bound_socket("127.0.0.1", port), 1) as front:
            other_socket.listen()
            with pytest.raises(ArgumentError) as caught:
                front.serve(served_model)
    assert "in use" in caught.value.got
    assert caught.value.where == f"etc-dist serve at http://127.0.0.1:{port}"


def test_an_error_of_the_event_loop_that_no_process_can_have_is_sent_as_text(
    monkeypatch,
):
    class OwnError(Exception):
        """Not the name of a module: another process cannot load it."""

    async def fail(front: Front) -> None:
        raise OwnError("a text")

    monkeypatch.setattr(Front, "_serve", fail)
    own_end, other_end = map(Channel, Pipe())
    with closing(own_end), closing(other_end), socket.socket() as listener:
        front = Front(SimpleNamespace(num_pages=1), other_end, listener, 1)
        front.start()
        end = own_end.receive()
    assert isinstance(end, Ended) and repr(end.error) == (
        "RuntimeError(\"OwnError('a text')\")"
    )
