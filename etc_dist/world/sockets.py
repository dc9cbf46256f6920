"""The exchange of objects over Unix sockets, between processes of one host."""

from __future__ import annotations

import atexit
import os
import pickle
import secrets
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from etc_dist.messages import flush_output
from etc_dist.world.processes import Backoff

_LENGTH = struct.Struct("<q")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def listen(size: int) -> tuple[socket.socket, str]:
    """A socket that `size` peers can connect to, and its name on this host."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # NOTE: a name that begins with a zero byte makes no file, and needs no removal.
    name = f"etc_dist-{secrets.token_hex(16)}"
    listener.bind(f"\0{name}")
    listener.listen(size)
    listener.setblocking(False)
    return listener, name


def connect_all(
    rank: int, names: list[str], listener: socket.socket, limit: float
) -> dict[int, socket.socket]:
    """A connection to each other rank, of which `names` are by rank; fewer if a peer
    does not connect within `limit` seconds. OSError if one refuses."""
    found: dict[int, socket.socket] = {}
    for peer in range(rank):
        found[peer] = made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            made.settimeout(limit)
            made.connect(f"\0{names[peer]}")
            if not _is_own(made):
                raise PermissionError(f"rank {peer} is a process of another user")
            made.sendall(_LENGTH.pack(rank))
        except OSError:
            for one in found.values():
                one.close()
            raise
    backoff = Backoff(limit)
    while len(found) < len(names) - 1:
        try:
            accepted = listener.accept()[0]
        except BlockingIOError:
            if not backoff.pause():
                break
            continue
        if not _is_own(accepted):
            accepted.close()
            continue
        accepted.settimeout(limit)
        (peer,) = _LENGTH.unpack(accepted.recv(_LENGTH.size, socket.MSG_WAITALL))
        found[peer] = accepted
    return found


def _is_own(connection: socket.socket) -> bool:
    """Whether the peer is a process of the same user: messages are unpickled."""
    option = socket.SO_PEERCRED
    packed = connection.getsockopt(socket.SOL_SOCKET, option, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(packed)
    return bool(user == os.geteuid())


@dataclass
class _Messages:
    """The message to one peer, and that from it, of one exchange."""

    rest: memoryview
    """What is still to be sent."""
    head: bytearray = field(default_factory=bytearray)
    body: bytearray = field(default_factory=bytearray)

    def missing(self) -> int:
        """The bytes that are still to be received; 0 at the end."""
        if len(self.head) < _LENGTH.size:
            return _LENGTH.size - len(self.head)
        return int(_LENGTH.unpack(self.head)[0]) - len(self.body)

    def progress(self, connection: socket.socket) -> bool:
        """Send and receive without waiting; False if the peer has ended."""
        try:
            with suppress(BlockingIOError):
                while self.rest:
                    self.rest = self.rest[connection.send(self.rest) :]
        except OSError:
            # The peer reads no more, but may have sent its message before.
            self.rest = self.rest[:0]
        try:
            while missing := self.missing():
                part = connection.recv(min(missing, 1 << 20))
                if not part:
                    return False
                own = self.head if len(self.head) < _LENGTH.size else self.body
                own += part
        except BlockingIOError:
            pass
        except OSError:
            return False
        return True


class SocketGather:
    """`ObjectGather` over one connection to each peer.

    The kernel orders memory between a send and its receive. It closes the connections
    of a process that ends, after it has delivered their messages.
    """

    def __init__(
        self, rank: int, connections: dict[int, socket.socket], library: str = ""
    ):
        """Takes over the `connections`, by peer."""
        self.rank, self.size = rank, len(connections) + 1
        self.find_lost: Callable[[], frozenset[int]] = frozenset
        self._connections, self._library = connections, library
        for connection in connections.values():
            connection.setblocking(False)
        self._ended: set[int] = set()
        self._exit_code = 0
        # NOTE: handlers run in the reverse order, so those of later users before this.
        atexit.register(self._exit)

    def gather(
        self, value: object, limit: float, *, need_all: bool = False
    ) -> dict[int, object]:
        payload = pickle.dumps(value)
        message = _LENGTH.pack(len(payload)) + payload
        exchanges = {peer: _Messages(memoryview(message)) for peer in self._connections}
        received: dict[int, object] = {self.rank: value}
        backoff = Backoff(limit, self.find_lost)
        while True:
            for peer, one in exchanges.items():
                if not one.progress(self._connections[peer]):
                    self._ended.add(peer)
                if peer not in received and not one.missing():
                    received[peer] = pickle.loads(one.body)
            pending = {
                peer
                for peer, one in exchanges.items()
                if peer not in received or (one.rest and peer not in self._ended)
            }
            lost = pending & (backoff.lost | self._ended)
            hopeless = pending == lost or (need_all and not lost <= received.keys())
            if not pending or hopeless or not backoff.pause():
                return received

    def barrier(self, limit: float) -> bool:
        return len(self.gather(None, limit, need_all=True)) == self.size

    def open_channel(self, limit: float) -> None:
        return None

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        atexit.unregister(self._exit)

    def abort(self) -> None:
        self.abort_at_exit(1)
        self._exit()

    def abort_at_exit(self, code: int) -> None:
        self._exit_code = code

    def finalized(self) -> bool:
        return False

    def library(self) -> str:
        return self._library

    def _exit(self) -> None:
        if self._exit_code:
            flush_output()
            os._exit(self._exit_code)
