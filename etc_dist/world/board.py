"""Boards compare one signature per call between the ranks: by shared memory on each
host, and between hosts by one message to each partner of a rank."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import cast

import numpy as np
import numpy.typing as npt

from etc_dist.world.hosts import Hosts
from etc_dist.world.processes import Backoff, ProcessMonitor
from etc_dist.world.rank_errors import ENDED, LOST, SILENT
from etc_dist.world.transport import HOST_CALL, LEFT, Exchange, Transport

MASK = (1 << 63) - 1
"""Signatures have 63 bits: on the board they are non-negative int64."""
FAR_SECONDS = 1.0
"""The time that a host has, after its own limit, to report which rank it misses."""
# Odd, with well-spread bits: multiples of it mark the call numbers.
_STEP = 0x1E3779B97F4A7C15
# A few microseconds of polling; more would delay peers on the same core.
_SPINS = 50
_LINE = 64
_WORDS = _LINE // 8


def board_bytes(size: int) -> int:
    """The bytes of a SignatureBoard of `size` ranks."""
    return _LINE * size


class SignatureBoard:
    """Compares one signature per call between the ranks of a host, in a microsecond.

    Each rank owns one cache line of shared memory. It holds two pairs of words, used in
    turn by even and odd calls, so that a fast rank does not overwrite a pair that a
    slow one has still to read: it begins call n + 2 after it has read all ranks' call
    n + 1, which they begin after reading all of call n. A pair is
    (signature ^ mark, signature); mark is the call number times an odd constant.

    NOTE: correct on x86 and on Arm. Each word is an aligned 8-byte copy, one load or
    one store, so no word is torn. On Arm a pair's two stores may become visible
    in either order, so a reader accepts a pair only if its words differ by the mark
    of this call: a mixture of new and old passes only if both signatures are equal
    (then it is right), or with probability 2**-63. Reads of call n precede the writes
    of call n + 1 on both, since a branch on the read value lies between. Nothing else
    is ordered: for data in symmetric memory use `World.barrier`."""

    def __init__(
        self,
        rank: int,
        lines: npt.NDArray[np.uint8],
        find_ended: Callable[[], frozenset[int]],
    ):
        """`lines`: `board_bytes` of zeroed, aligned memory that all ranks share.
        Ranks count from 0 on this host."""
        self._rank, self._size = rank, len(lines) // _LINE
        self._find_ended = find_ended
        # A memoryview is read in half the time of a NumPy array's scalars (measured).
        self._words = lines.data.cast("q")
        self._mark = 0
        self._parity = 0
        self._is_complete = True
        """Whether all ranks took part in the last call, which is not under way."""
        self._own_idx = self._rank * _WORDS
        other_ranks = [rank for rank in range(self._size) if rank != self._rank]
        self._peer_slots = tuple(
            tuple(rank * _WORDS + 2 * parity for rank in other_ranks)
            for parity in (0, 1)
        )

    def compare(self, signature: int, limit: float) -> list[int | None] | None:
        """None if every rank has `signature` (63 bits). Collective.

        Otherwise each rank's signature, None for a rank that did not call within
        `limit` seconds or has ended, or the negative reason why it left."""
        self._is_complete = False
        self._mark = mark = (self._mark + _STEP) & MASK
        self._parity = parity = 1 - self._parity
        words, own_idx, token = (
            self._words,
            self._own_idx + 2 * parity,
            signature ^ mark,
        )
        words[own_idx + 1] = signature
        words[own_idx] = token
        for slot in self._peer_slots[parity]:
            spins = _SPINS
            while words[slot] != token:
                spins -= 1
                if not spins:
                    return self._wait(signature, limit)
        self._is_complete = True
        return None

    def leave(self, reason: int, is_complete: bool = True) -> None:
        """Publish the reason why this rank makes no further call. Slow ranks may still
        read its last call, if that is complete, here and by `is_complete`."""
        self._words[self._own_idx + 2 * (1 - self._parity)] = reason
        if not (self._is_complete and is_complete):
            self._words[self._own_idx + 2 * self._parity] = reason

    def left(self) -> dict[int, int]:
        """The ranks that have left, and why."""
        pairs = (self._words[first::_WORDS].tolist() for first in (0, 2))
        tokens = enumerate(map(min, *pairs))
        return {rank: token for rank, token in tokens if token < 0}

    def close(self) -> None:
        """End the comparisons."""
        self._words.release()

    def _wait(self, signature: int, limit: float) -> list[int | None] | None:
        """The slow half of `compare`: a rank is late, or has another signature."""
        signatures: list[int | None] = [None] * self._size
        signatures[self._rank] = signature
        backoff = Backoff(limit, self._find_ended)
        while True:
            for rank in range(self._size):
                if signatures[rank] is None:
                    signatures[rank] = self._read(rank)
            if None not in signatures or any(word < 0 for word in signatures if word):
                break
            has_lost = any(signatures[rank] is None for rank in backoff.lost)
            if has_lost or not backoff.pause():
                break
        self._is_complete = _is_complete(signatures)
        return None if signatures == [signature] * self._size else signatures

    def _read(self, rank: int) -> int | None:
        slot = rank * _WORDS + 2 * self._parity
        token, signature = self._words[slot], self._words[slot + 1]
        if token < 0:
            return token
        return signature if token ^ signature == self._mark else None


def _is_complete(signatures: list[int | None]) -> bool:
    """Whether all ranks have a signature: none is late or has left."""
    return all(word is not None and word >= 0 for word in signatures)


class HostsBoard:
    """The `SignatureBoard` of a world over several hosts.

    Each rank first compares with its near ranks, then exchanges their signatures with
    its partners. A rank that leaves sends a message to all far ranks, also of the near
    ranks that it misses."""

    def __init__(
        self,
        hosts: Hosts,
        near: SignatureBoard,
        transport: Transport,
        monitor: ProcessMonitor,
    ):
        self._hosts, self._near, self._transport = hosts, near, transport
        self._monitor = monitor
        self._calls = 0
        self._is_complete = True
        """Whether all ranks took part in the last call, which is not under way."""
        self._last_calls: dict[int, int] = {}
        """Far ranks that make no further call, and the last one in which they took
        part, as far as is known."""
        self._silent: set[int] = set()
        """Near ranks that did not make the last call."""
        self._far: dict[int, int] = {}
        """Far ranks that have left or did not answer, and why."""
        self._partners = Exchange(transport, HOST_CALL, hosts.partners)
        self._partners.find_lost = self._find_lost

    def compare(self, signature: int, limit: float) -> list[int | None] | None:
        """As `SignatureBoard.compare`, for all ranks of the world."""
        hosts = self._hosts
        self._calls += 1
        self._is_complete = False
        near = self._near.compare(signature, limit) or [signature] * hosts.local_size
        # Ranks that nothing is known of count as alike: others are the cause.
        signatures: list[int | None] = [signature] * hosts.size
        signatures[hosts.near.start : hosts.near.stop] = near
        self._silent = {
            rank for rank, word in zip(hosts.near, near, strict=True) if word is None
        }
        if _is_complete(near):
            self._receive_calls(signatures, near, limit)
        self._is_complete = _is_complete(signatures)
        return None if signatures.count(signature) == hosts.size else signatures

    def leave(self, reason: int) -> None:
        """Publish the reason why this rank makes no further call."""
        self._near.leave(reason, self._is_complete)
        hosts = self._hosts
        reasons = {rank: SILENT for rank in self._silent}
        reasons |= dict.fromkeys(self._monitor.find_ended(), ENDED)
        last_call = self._calls if self._is_complete else self._calls - 1
        message = pickle.dumps((reasons | {hosts.rank: reason}, last_call))
        for rank in range(hosts.size):
            if not hosts.is_near(rank) and rank not in self._far:
                self._transport.send(rank, LEFT, message)

    def left(self) -> dict[int, int]:
        """The ranks that have left or did not answer, and why."""
        while (message := self._transport.receive(LEFT)) is not None:
            self._learn(*pickle.loads(message[1]))
        for rank in self._transport.find_closed().difference(self._hosts.near):
            self._far.setdefault(rank, ENDED)
            self._last_calls.setdefault(rank, 0)
        near = self._near.left()
        return {self._hosts.near[local]: why for local, why in near.items()} | self._far

    def close(self) -> None:
        """End the comparisons."""
        self._near.close()

    def _learn(self, reasons: dict[int, int], last_call: int) -> None:
        """Add the reasons of the ranks of one far host, and their last call."""
        self._last_calls |= dict.fromkeys(reasons, last_call)
        host = {self._hosts.host(rank) for rank in reasons}
        # The cause first: a rank that was lost because of another one is not named.
        for rank, reason in sorted(reasons.items(), key=lambda item: item[1]):
            is_first = host.isdisjoint(map(self._hosts.host, self._far))
            if reason < LOST or is_first:
                self._far[rank] = min(reason, self._far.get(rank, reason))

    def _find_lost(self) -> frozenset[int]:
        """All ranks of the hosts with a rank that does not take part in this call."""
        self.left()
        hosts = {
            self._hosts.host(rank)
            for rank, last_call in self._last_calls.items()
            if last_call < self._calls
        }
        return frozenset(rank for host in hosts for rank in self._hosts.ranks(host))

    def _receive_calls(
        self, signatures: list[int | None], near: list[int | None], limit: float
    ) -> None:
        """Exchange the signatures `near` with those of the other hosts, for
        `signatures`."""
        hosts = self._hosts
        signatures_of_hosts = self._partners.gather(
            near, limit + FAR_SECONDS, need_all=True
        )
        pending: list[int] = []
        for partner in hosts.partners:
            ranks = hosts.ranks(hosts.host(partner))
            if partner in signatures_of_hosts:
                far = cast("list[int | None]", signatures_of_hosts[partner])
                signatures[ranks.start : ranks.stop] = far
            else:
                pending += ranks
        if self.left().keys().isdisjoint(pending):  # the limit has passed
            self._far |= dict.fromkeys(pending, SILENT)
        for rank in pending:
            reason = self._far.get(rank, signatures[rank])
            signatures[rank] = None if reason in (ENDED, SILENT) else reason
