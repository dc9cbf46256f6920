"""The interface to the processes of a job: messages between them, and their end. Above
it, the exchange of objects."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable

from etc_dist.world.processes import Backoff

CALL, HOST_CALL, LEFT, RUN = 1, 2, 3, 4
"""The kinds of messages: objects of all ranks, signatures of a host, ranks that leave
the world, and messages of a run."""


class Transport(ABC):
    """The ranks of a job, connected by the library that has started them.

    Messages arrive in order for each pair of ranks and kind."""

    rank: int
    size: int
    name: str
    """What carries the messages, for users."""
    library: str
    """The library that started the ranks, with its version."""
    group_name = ""
    """The name of a process group of torch; empty if there is none."""

    def check(self) -> None:
        """TypeError if the argument of `start` that names the ranks is wrong. The ranks
        are then all of the job, so that the error reaches every one."""
        return None

    def device(self) -> int | None:
        """The CUDA device that this process uses already; None if it has not chosen."""
        return None

    @abstractmethod
    def send(self, rank: int, kind: int, data: bytes) -> None:
        """Send a message to another rank. Does not wait."""

    @abstractmethod
    def receive(self, kind: int) -> tuple[int, bytes | bytearray] | None:
        """The next message of a kind, with its sender; None if there is none yet."""

    @abstractmethod
    def find_unsent(self, kind: int) -> set[int]:
        """Continue to send. The living ranks to which some of a kind are not sent."""

    def find_closed(self) -> set[int]:
        """Ranks known to have ended, of which all messages were received."""
        return set()

    @abstractmethod
    def close(self) -> None:
        """End the transport, after the last message. Collective."""

    @abstractmethod
    def abort(self) -> None:
        """End this process, and so all ranks, once its output is read."""

    @abstractmethod
    def abort_at_exit(self, code: int) -> None:
        """End all ranks when this process exits, with an exit code of 1 to 255. Its
        other exit handlers still run."""

    def is_finalized(self) -> bool:
        """Whether no message is possible any more in this process."""
        return False


class Exchange:
    """All-to-all exchange of picklable objects between ranks. Waits have a time limit,
    and end early if a peer is lost."""

    def __init__(self, transport: Transport, kind: int, ranks: Iterable[int]):
        """`kind`: of the messages, for this exchange alone. `ranks`: may include this
        one."""
        self.find_lost: Callable[[], frozenset[int]] = frozenset
        """Returns the ranks that will not answer."""
        self._transport, self._kind = transport, kind
        # A fast peer sends its next object before a slow one has sent this one.
        self._arrived_messages: dict[int, deque[bytes | bytearray]] = {
            rank: deque() for rank in ranks if rank != transport.rank
        }

    def gather(
        self, value: object, limit: float, *, need_all: bool = False
    ) -> dict[int, object]:
        """Each rank's value, by rank; ranks that did not answer are missing.

        Collective; orders memory between the ranks. Returns after `limit` seconds, or
        once this rank and all living ones have each other's value; with `need_all`,
        also once a missing rank is known to be lost. After a missing rank no further
        exchange is possible."""
        transport, data = self._transport, pickle.dumps(value)
        for peer in self._arrived_messages:
            transport.send(peer, self._kind, data)
        value_by_rank: dict[int, object] = {transport.rank: value}
        backoff = Backoff(limit, self.find_lost)
        while True:
            while (message := transport.receive(self._kind)) is not None:
                self._arrived_messages[message[0]].append(message[1])
            for peer, messages in self._arrived_messages.items():
                if messages and peer not in value_by_rank:
                    value_by_rank[peer] = pickle.loads(messages.popleft())
            missing = self._arrived_messages.keys() - value_by_rank.keys()
            pending = missing | transport.find_unsent(self._kind)
            lost_ranks = pending & (backoff.lost | transport.find_closed())
            hopeless = pending == lost_ranks or (
                need_all and not lost_ranks <= value_by_rank.keys()
            )
            if not pending or hopeless or not backoff.pause():
                return value_by_rank
