"""The process of the HTTP server, as the engine's process has it."""

from __future__ import annotations

import signal
import socket
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Self

from etc_dist.errors import ArgumentError, WorldError
from etc_dist.serve.channel import Channel
from etc_dist.serve.jobs import Failure, Served

SIGNALS = signal.SIGTERM, signal.SIGINT
"""Blocked in the process, the first one only until it can drain: a terminal sends the
second one to the engine's process, too."""

FAILURE_SECONDS = 5.0
"""In which clients get the error of a broken step."""
END_SECONDS = 2.0
"""In which the process ends after that."""


class FrontProcess:
    """The HTTP server in a separate process, so that it and the steps do not wait for
    each other: of two threads of Python, one runs at a time. It starts while the model
    is loaded. A context manager, which ends it. url: of the server. channel: of jobs
    from it, and of reports to it."""

    def __init__(self, listener: socket.socket, drain_seconds: int) -> None:
        host, port, *_ = listener.getsockname()
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        context = get_context("spawn")
        own_end, other_end = context.Pipe()
        self.channel = Channel(own_end)
        arguments = other_end, listener, drain_seconds
        self._process = context.Process(target=_run, args=arguments, daemon=True)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        self._process.start()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        other_end.close()
        listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()
        self._process.join(FAILURE_SECONDS + END_SECONDS)
        self._process.kill()

    def serve(self, served_model: Served) -> None:
        """Take requests for a model from now on. ArgumentError if another process has
        begun to listen on the port."""
        try:
            self.channel.send(served_model)
            ready = self.channel.receive()
        except EOFError as error:
            raise self._ended() from error
        if ready.error:
            raise ArgumentError(
                "the server cannot listen",
                where=f"etc-dist serve at {self.url}",
                wanted="a port on which no other process listens",
                got=ready.error,
                fix="choose another --port, or end the process that has it",
            )

    def drain(self) -> None:
        """Take no more requests; the event loop ends when all are answered. Also for
        handlers of signals."""
        self._process.terminate()

    def fail(self, error: BaseException) -> None:
        """Answer all requests by this error, and end. WorldError if the process has
        ended."""
        try:
            self.channel.send(Failure(f"{type(error).__name__}: {error}"))
        except EOFError:
            raise self._ended() from error

    def _ended(self) -> WorldError:
        self._process.join(END_SECONDS)
        return WorldError(
            "the process of the HTTP server has ended",
            where="etc-dist serve",
            wanted="a process that takes requests",
            got=f"exit code {self._process.exitcode}",
            fix="look at its messages before this one, and start the server again",
        )


def _run(connection: Connection, listener: socket.socket, drain_seconds: int) -> None:
    # NOTE: here, since no other process needs the packages of the extra `serve`.
    from etc_dist.serve.front import run_front

    run_front(connection, listener, drain_seconds)
