"""Messages over Unix sockets, between processes of one host."""

from __future__ import annotations

import atexit
import os
import secrets
import socket
import struct
from collections import defaultdict, deque
from dataclasses import dataclass, field

from etc_dist.messages import flush_output
from etc_dist.world.processes import Backoff
from etc_dist.world.transport import Transport

_RANK = struct.Struct("<q")
_HEADER = struct.Struct("<qq")  # the kind and the length of a message
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
    sockets: dict[int, socket.socket] = {}
    for peer in range(rank):
        sockets[peer] = connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(limit)
            connection.connect(f"\0{names[peer]}")
            if not _is_own(connection):
                raise PermissionError(f"rank {peer} is a process of another user")
            connection.sendall(_RANK.pack(rank))
        except OSError:
            for connection in sockets.values():
                connection.close()
            raise
    backoff = Backoff(limit)
    while len(sockets) < len(names) - 1:
        try:
            connection = listener.accept()[0]
        except BlockingIOError:
            if not backoff.pause():
                break
            continue
        if not _is_own(connection):
            connection.close()
            continue
        connection.settimeout(limit)
        (peer,) = _RANK.unpack(connection.recv(_RANK.size, socket.MSG_WAITALL))
        sockets[peer] = connection
    return sockets


def _is_own(connection: socket.socket) -> bool:
    """Whether the peer is a process of the same user: messages are unpickled."""
    option = socket.SO_PEERCRED
    packed = connection.getsockopt(socket.SOL_SOCKET, option, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(packed)
    return bool(user == os.geteuid())


@dataclass
class _Connection:
    """The bytes to one peer, and those from it that are not a whole message yet."""

    socket: socket.socket
    unsent: bytearray = field(default_factory=bytearray)
    buffer: bytearray = field(default_factory=bytearray)
    is_closed: bool = False

    def send(self) -> None:
        """Send without waiting."""
        try:
            while self.unsent:
                del self.unsent[: self.socket.send(self.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            # The peer reads no more, but may have sent messages before.
            self.unsent.clear()

    def receive(self) -> None:
        """Receive without waiting."""
        try:
            while data := self.socket.recv(1 << 20):
                self.buffer += data
            self.is_closed = True
        except BlockingIOError:
            pass
        except OSError:
            self.is_closed = True

    def take_message(self) -> tuple[int, bytes] | None:
        """The kind and the bytes of the next message; None if it is not complete."""
        if len(self.buffer) < _HEADER.size:
            return None
        kind, length = _HEADER.unpack_from(self.buffer)
        end = _HEADER.size + length
        if len(self.buffer) < end:
            return None
        data = bytes(self.buffer[_HEADER.size : end])
        del self.buffer[:end]
        return kind, data


class SocketTransport(Transport):
    """`Transport` over one connection to each peer.

    The kernel orders memory between a send and its receive. It closes the connections
    of a process that ends, after it has delivered their messages."""

    name = "Unix sockets"

    def __init__(self, rank: int, sockets: dict[int, socket.socket]):
        """Takes over the `sockets`, by peer."""
        self.rank, self.size = rank, len(sockets) + 1
        self._connections = {
            peer: _Connection(peer_socket) for peer, peer_socket in sockets.items()
        }
        self._messages: defaultdict[int, deque[tuple[int, bytes]]] = defaultdict(deque)
        for connection in sockets.values():
            connection.setblocking(False)
        self._exit_code = 0
        # NOTE: handlers run in the reverse order, so those of later users before this.
        atexit.register(self._exit)

    def send(self, rank: int, kind: int, data: bytes) -> None:
        connection = self._connections[rank]
        connection.unsent += _HEADER.pack(kind, len(data)) + data
        connection.send()

    def receive(self, kind: int) -> tuple[int, bytes] | None:
        for peer, connection in self._connections.items():
            connection.send()
            connection.receive()
            while (message := connection.take_message()) is not None:
                self._messages[message[0]].append((peer, message[1]))
        messages = self._messages[kind]
        return messages.popleft() if messages else None

    def find_unsent(self, kind: int) -> set[int]:
        for connection in self._connections.values():
            connection.send()
        return {peer for peer, c in self._connections.items() if c.unsent}

    def find_closed(self) -> set[int]:
        return {peer for peer, c in self._connections.items() if c.is_closed}

    def close(self) -> None:
        for connection in self._connections.values():
            connection.socket.close()
        atexit.unregister(self._exit)

    def abort(self) -> None:
        self.abort_at_exit(1)
        self._exit()

    def abort_at_exit(self, code: int) -> None:
        self._exit_code = code

    def _exit(self) -> None:
        if self._exit_code:
            flush_output()
            os._exit(self._exit_code)
