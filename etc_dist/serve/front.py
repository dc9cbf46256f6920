"""The process of the HTTP server, whose second thread has the event loop."""

from __future__ import annotations

import asyncio
import pickle
import signal
import socket
from contextlib import suppress
from multiprocessing.connection import Connection
from threading import Event, Thread
from typing import Any

import uvicorn

from etc_dist.serve.app import Routes
from etc_dist.serve.channel import Channel
from etc_dist.serve.clients import Clients
from etc_dist.serve.front_process import FAILURE_SECONDS, SIGNALS
from etc_dist.serve.jobs import Ended, Failure, Message, Ready, Served, TurnReport
from etc_dist.serve.metrics import Metrics
from etc_dist.serve.request_fields import BadRequest

MOST_CONNECTING = 1024
"""Connections that wait for the event loop."""
SEND_SECONDS = 2
"""In which clients get the error of the end of the server."""


def run_front(
    connection: Connection, listener: socket.socket, drain_seconds: int
) -> None:
    """Serve the model that comes first, until the connection ends. SIGTERM drains.
    `SIGNALS` are blocked."""
    channel = Channel(connection)
    try:
        front = Front(channel.receive(), channel, listener, drain_seconds)
        listener.listen(MOST_CONNECTING)
        channel.send(Ready())  # before the event loop sends any job, or its end
    except EOFError:
        return
    except OSError as error:  # another server has bound the port, and listens by now
        channel.send(Ready(str(error)))
        return
    front.start()
    signal.signal(signal.SIGTERM, lambda *_: front.drain())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS[:1])
    message: Any = None
    while not isinstance(message, Failure):
        try:
            message = channel.receive()
        except EOFError:
            message = Failure("the server has ended")
        if isinstance(message, TurnReport):
            front.deliver(message)
    front.fail(message.text)


def is_sendable(error: BaseException) -> bool:
    """Whether another process can have it."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return False
    return True


class Front:
    """An HTTP server in its own thread, which sends the engine jobs, and `Ended` when
    the thread ends. All methods are called by the main thread."""

    def __init__(
        self,
        served_model: Served,
        channel: Channel,
        listener: socket.socket,
        drain_seconds: int,
    ) -> None:
        self._channel, self._listener = channel, listener
        self._drain_seconds = drain_seconds
        self._clients = Clients(self._put, Metrics(served_model.num_pages))
        config = uvicorn.Config(
            Routes(served_model, self._clients).app(),
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=drain_seconds + SEND_SECONDS,
        )
        self._server = uvicorn.Server(config)
        self._has_loop = Event()
        self._thread = Thread(target=self._run, name="etc-dist serve", daemon=True)

    def start(self) -> None:
        """Take requests."""
        self._thread.start()
        self._has_loop.wait()

    def deliver(self, report: TurnReport) -> None:
        """Give what a turn gave to the clients."""
        with suppress(RuntimeError):  # the loop has ended, as the engine will read
            self._loop.call_soon_threadsafe(self._clients.deliver, report)

    def drain(self) -> None:
        """Take no more requests, nor bodies that have not come; the thread ends when
        all are answered, by an error after `drain_seconds`. Also for handlers of
        signals."""
        self._clients.why_closed = "is being shut down"
        error = BadRequest("the server was shut down before the end", status=503)
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._clients.end_bodies)
            self._loop.call_soon_threadsafe(
                self._loop.call_later, self._drain_seconds, self._clients.fail, error
            )
        self._server.should_exit = True

    def fail(self, text: str) -> None:
        """Answer all requests by this error, and end."""
        with suppress(RuntimeError):
            error = BadRequest(text, status=500)
            self._loop.call_soon_threadsafe(self._clients.fail, error)
        self._server.should_exit = True
        self._thread.join(FAILURE_SECONDS)

    def _put(self, message: Message) -> None:
        with suppress(EOFError):  # as the main thread reads, too
            self._channel.send(message)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._put(Ended(error if is_sendable(error) else RuntimeError(repr(error))))
        else:
            self._put(Ended())
        finally:
            self._has_loop.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._has_loop.set()
        await self._server.serve(sockets=[self._listener])
