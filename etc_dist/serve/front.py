"""The thread of the event loop, which has the HTTP server."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Thread
from typing import Any

import uvicorn

from etc_dist.serve.app import Routes, Served
from etc_dist.serve.clients import Clients
from etc_dist.serve.jobs import Ended, Progress
from etc_dist.serve.metrics import Metrics
from etc_dist.serve.request_fields import BadRequest

FAILURE_SECONDS = 5.0
"""In which clients get the error of a broken step."""
SEND_SECONDS = 2
"""In which they get that of the end of the server."""


class Front:
    """An HTTP server in its own thread. put: gives the engine jobs, and `Ended`
    when the thread ends. All methods are called by the main thread."""

    def __init__(
        self,
        served_model: Served,
        put: Callable[[Any], None],
        metrics: Metrics,
        listener: socket.socket,
        drain_seconds: int,
    ) -> None:
        self._put, self._listener = put, listener
        self._drain_seconds = drain_seconds
        self._clients = Clients(put, metrics)
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

    @property
    def address(self) -> str:
        """The URL of the server."""
        host, port, *_ = self._listener.getsockname()
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def start(self) -> None:
        """Listen, and take requests."""
        self._listener.listen(1024)
        self._thread.start()
        self._has_loop.wait()

    def deliver(self, news: list[Progress]) -> None:
        """Give what a step gave to the clients."""
        with suppress(RuntimeError):  # the loop has ended, as the engine will read
            self._loop.call_soon_threadsafe(self._clients.deliver, news)

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

    def fail(self, error: BaseException) -> None:
        """Answer all requests by this error, and end."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._clients.fail, error)
        self._server.should_exit = True
        self._thread.join(FAILURE_SECONDS)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._put(Ended(error))
        else:
            self._put(Ended())
        finally:
            self._has_loop.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._has_loop.set()
        await self._server.serve(sockets=[self._listener])
