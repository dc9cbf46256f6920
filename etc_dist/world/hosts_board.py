"""Compares calls over several hosts: by shared memory on each, and between them by one
message to each partner of a rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from etc_dist.world.agreement import SignatureBoard
from etc_dist.world.hosts import Hosts
from etc_dist.world.objects import AGREEMENT, Channel
from etc_dist.world.processes import Backoff
from etc_dist.world.rank_errors import ENDED, LOST, SILENT

FAR_SECONDS = 1.0
"""The time that a host has, after its own limit, to report which rank it misses."""
_CALL, _LEAVES = 0, 1


class HostsBoard:
    """`agreement.Board` of a world over several hosts.

    Each rank first compares with its near ranks, then exchanges the result with its
    partners: [kind, a word for each rank of the host], a signature or the reason why
    there is none. `known` is shared by the near ranks: what the partners of any of
    them have reported, by rank.
    """

    def __init__(
        self,
        hosts: Hosts,
        near: SignatureBoard,
        known: npt.NDArray[np.int64],
        channel: Channel,
        ended: Callable[[int], bool],
    ):
        """`known`: a zeroed word for each rank. `ended`: whether the process of a near
        rank has ended."""
        self._hosts, self._near, self._channel = hosts, near, channel
        self._known: npt.NDArray[np.int64] | None = known
        self._ended = ended
        others = [host for host in range(hosts.count) if host != hosts.own]
        self._calls: dict[int, deque[list[int]]] = {host: deque() for host in others}

    def compare(self, signature: int, limit: float) -> list[int | None] | None:
        """As `SignatureBoard.compare`, for all ranks of the world."""
        hosts = self._hosts
        near = self._near.compare(signature, limit)
        words = [signature] * hosts.local_size
        if near is not None:
            words = [self._word(local, one) for local, one in enumerate(near)]
        self._send(_CALL, words)
        # Ranks that nothing is known of count as alike: others are the cause.
        found = [signature] * hosts.size
        found[hosts.near.start : hosts.near.stop] = words
        if min(words) >= 0:
            for host, far in self._receive_calls(signature, limit).items():
                found[hosts.ranks(host).start : hosts.ranks(host).stop] = far
        if found.count(signature) == hosts.size:
            return None
        return [None if one in (ENDED, SILENT) else one for one in found]

    def leave(self, reason: int) -> None:
        """Publish the reason why this rank makes no further call."""
        self._near.leave(reason)
        hosts = self._hosts
        words = [ENDED * self._ended(rank) for rank in hosts.near]
        words[hosts.local_rank] = reason
        self._send(_LEAVES, words)

    def left(self) -> dict[int, int]:
        """The ranks that have left or did not answer, and why."""
        if self._known is None:
            return {}
        self._receive()
        near = self._near.left()
        far = {
            int(rank): int(self._known[rank]) for rank in np.flatnonzero(self._known)
        }
        return {self._hosts.near[local]: why for local, why in near.items()} | far

    def close(self) -> None:
        self._near.close()
        self._known = None
        self._channel.close()

    def _word(self, local: int, found: int | None) -> int:
        if found is not None:
            return found
        return ENDED if self._ended(self._hosts.near[local]) else SILENT

    def _send(self, kind: int, words: list[int]) -> None:
        message = np.array([kind, *words], np.int64)
        for partner in self._hosts.partners:
            self._channel.send(partner, AGREEMENT, message)

    def _receive(self) -> None:
        """Take the messages that have arrived."""
        while (message := self._channel.receive(AGREEMENT)) is not None:
            source, data = message
            kind, *words = np.frombuffer(data, np.int64).tolist()
            host = self._hosts.host(source)
            self._learn(self._hosts.ranks(host), words)
            if kind == _CALL:
                self._calls[host].append(words)

    def _learn(self, ranks: range, words: list[int]) -> None:
        """Add the reasons among the `words` of a host to what is known of it."""
        assert self._known is not None
        known = self._known[ranks.start : ranks.stop]
        # The cause first: a rank that was lost because of another one is not named.
        for local, word in sorted(enumerate(words), key=lambda one: one[1]):
            if word < LOST or (word == LOST and not known.any()):
                known[local] = min(known[local], word)

    def _receive_calls(self, signature: int, limit: float) -> dict[int, list[int]]:
        """The words of each other host."""
        found: dict[int, list[int]] = {}
        backoff = Backoff(limit + FAR_SECONDS, lambda: frozenset(self.left()))
        while True:
            self._receive()
            for host, calls in self._calls.items():
                if host not in found and calls:
                    found[host] = calls.popleft()
            pending = self._calls.keys() - found.keys()
            if not pending:
                return found
            if pending & {self._hosts.host(rank) for rank in backoff.lost}:
                break
            if not backoff.pause():
                self._mark_silent(pending)
                break
        # Of a host whose partner did not answer, what the near ranks have learned.
        assert self._known is not None
        for host in pending:
            ranks = self._hosts.ranks(host)
            words = self._known[ranks.start : ranks.stop].tolist()
            found[host] = [word or signature for word in words]
        return found

    def _mark_silent(self, hosts: set[int]) -> None:
        assert self._known is not None
        for host in hosts:
            ranks = self._hosts.ranks(host)
            if not self._known[ranks.start : ranks.stop].any():
                self._known[ranks.start : ranks.stop] = SILENT
