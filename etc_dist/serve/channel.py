"""Messages between the engine's process and that of the HTTP server."""

from __future__ import annotations

import pickle
import select
from multiprocessing.connection import Connection
from typing import Any


class Channel:
    """An end of a connection, for messages of any type. One thread sends, and one
    receives. EOFError if the other end is closed."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._poll = connection, select.poll()
        self._poll.register(connection, select.POLLIN)

    def send(self, message: Any) -> None:
        """Send a message, and wait while the other end has many."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        try:
            self._connection.send_bytes(data)
        except OSError as error:
            raise EOFError from error

    def has_message(self, seconds: float | None) -> bool:
        """Whether one, or the end, comes within this time; None: without a limit."""
        # NOTE: takes a microsecond; `Connection.poll` takes many.
        return bool(self._poll.poll(None if seconds is None else 1e3 * seconds))

    def receive(self) -> Any:
        """The next message."""
        try:
            data = self._connection.recv_bytes()
        except OSError as error:
            raise EOFError from error
        return pickle.loads(data)

    def close(self) -> None:
        """End the connection."""
        self._connection.close()
