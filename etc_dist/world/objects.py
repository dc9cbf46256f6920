"""The interface to the processes of a job: the exchange of objects, and their end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

AGREEMENT, RUN = 1, 2
"""The kinds of messages on a channel."""


class Channel(Protocol):
    """Messages of bytes between far ranks, in order for each pair and kind."""

    transport: str
    """What carries them, for users."""

    def send(self, rank: int, kind: int, data: Any) -> None:
        """Send the bytes of an array, which must stay as it is. Does not wait."""

    def receive(self, kind: int) -> tuple[int, bytearray] | None:
        """The next message from any rank, with its sender; None if there is none."""

    def close(self) -> None:
        """End the channel, after the last message. Collective."""


class ObjectGather(Protocol):
    """All-to-all exchange of picklable objects between the ranks, and a barrier. Waits
    have a time limit, and end early if a peer is lost."""

    rank: int
    size: int
    find_lost: Callable[[], frozenset[int]]
    """Returns the ranks that will not answer."""

    def gather(
        self, value: object, limit: float, *, need_all: bool = False
    ) -> dict[int, object]:
        """Each rank's value, by rank; ranks that did not answer are missing.

        Collective. Returns after `limit` seconds, or once this rank and all living ones
        have each other's value; with `need_all`, also once a missing rank is known to
        be lost. After a missing rank no further exchange is possible.
        """

    def barrier(self, limit: float) -> bool:
        """Wait for all ranks; orders memory between them.

        False if some did not call within `limit` seconds, or one is lost.
        """

    def open_channel(self, limit: float) -> Channel | None:
        """A new channel between all ranks; None if they must be on one host.
        Collective."""

    def close(self) -> None:
        """End the exchange, after the last one. Collective."""

    def abort(self) -> None:
        """End this process, and so all ranks, once its output is read."""

    def abort_at_exit(self, code: int) -> None:
        """End all ranks when this process exits, with an exit code of 1 to 255. Its
        other exit handlers still run."""

    def finalized(self) -> bool:
        """Whether no exchange is possible any more in this process."""

    def library(self) -> str:
        """The library that started the ranks, with its version."""
