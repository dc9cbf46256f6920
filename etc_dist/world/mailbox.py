"""Where ranks compare one signature a call, before anything is launched.

On one host each rank owns one cache line of shared memory; a agreement is one write
and one read a peer, about a microsecond. While a world starts, the same agreement goes
by message.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from etc_dist.world.mpi import ObjectGather
from etc_dist.world.processes import Backoff, ProcessMonitor

MASK = (1 << 63) - 1
"""Signatures have 63 bits: a slot's word stays a non-negative int64."""
LOST, INTERRUPTED, FAILED, UNCLOSED = -1, -2, -3, -4
"""In a slot and in `meet`'s answer, negative: this rank has left the world; why."""

# Odd, with well-spread bits: multiples of it mark the call numbers.
_STEP = 0x1E3779B97F4A7C15
# A few microseconds of looking; more would hold up peers that share the core.
_SPINS = 50
_LINE = 64
_WORDS = _LINE // 8


class Mailbox(Protocol):
    """One agreement after the other; all ranks take part in each."""

    def match_call(self, signature: int, limit: float) -> list[int | None] | None:
        """None if every rank brought `signature` (63 bits).

        Else what each rank brought, by rank: a signature, None (had not come when
        `limit` seconds were over, or a rank was found dead), or why it left.
        """

    def leave(self, reason: int) -> None:
        """Publish, where possible, that this rank will not meet again."""

    def left(self) -> dict[int, int]:
        """The ranks that have left, and why."""

    def close(self) -> None:
        """End the use of what is shared; local, after the last agreement."""


def mailbox_bytes(size: int) -> int:
    """What a SignatureBoard of `size` ranks needs."""
    return _LINE * size


class SignatureBoard:
    """The ranks of one host: slots in shared memory, read by polling.

    A slot holds two pairs of words, used in turn by even and odd calls, so that a
    fast rank does not overwrite what a slow one has still to read: to begin call
    n + 2 it must have seen all ranks in call n + 1, and none enters that before it
    has read all of call n. A pair is (signature ^ mark, signature); mark is the call
    number times an odd constant.

    NOTE: right on x86 and on Arm. Each word is an aligned 8-byte copy, one load or
    one store, so no word is torn. Arm may show a pair's two stores in either order,
    hence a reader trusts a pair only when its words differ by the mark of this call:
    a mixture of new and old passes only if old and new signature are equal (and then
    it is right) or by a 1 in 2**63 accident. Reads of call n come before the writes
    of call n + 1 on both, since a branch on what was read lies between. Nothing else
    is ordered: for data in symmetric memory use `World.barrier`.
    """

    def __init__(self, rank: int, lines: npt.NDArray[np.uint8], living: ProcessMonitor):
        """`lines`: `mailbox_bytes` of zeroed, aligned memory that all ranks share."""
        self._rank, self._size = rank, len(lines) // _LINE
        self._monitor = living
        # A memoryview is read in half the time of a NumPy array's scalars (measured).
        self._words = lines.data.cast("q")
        self._mark = 0
        self._parity = 0
        self._own = self._rank * _WORDS
        others = [rank for rank in range(self._size) if rank != self._rank]
        self._others = tuple(
            tuple(rank * _WORDS + 2 * parity for rank in others) for parity in (0, 1)
        )

    def match_call(self, signature: int, limit: float) -> list[int | None] | None:
        self._mark = mark = (self._mark + _STEP) & MASK
        self._parity = parity = 1 - self._parity
        words, own, token = self._words, self._own + 2 * parity, signature ^ mark
        words[own + 1] = signature
        words[own] = token
        for slot in self._others[parity]:
            spins = _SPINS
            while words[slot] != token:
                spins -= 1
                if not spins:
                    return self._look(signature, limit)
        return None

    def _look(self, signature: int, limit: float) -> list[int | None] | None:
        """The patient half of `meet`: someone is late, or brought something else."""
        found: list[int | None] = [None] * self._size
        found[self._rank] = signature
        patience = Backoff(limit, self._monitor.all_dead)
        while True:
            for rank in range(self._size):
                if found[rank] is None:
                    found[rank] = self._read(rank)
            if None not in found or any(brought < 0 for brought in found if brought):
                break
            lost = any(found[rank] is None for rank in patience.lost)
            if lost or not patience.pause():
                break
        return None if found == [signature] * self._size else found

    def _read(self, rank: int) -> int | None:
        slot = rank * _WORDS + 2 * self._parity
        token, signature = self._words[slot], self._words[slot + 1]
        if token < 0:
            return token
        return signature if token ^ signature == self._mark else None

    def leave(self, reason: int) -> None:
        self._words[self._own] = self._words[self._own + 2] = reason

    def left(self) -> dict[int, int]:
        tokens = self._words[::_WORDS].tolist()
        return {rank: token for rank, token in enumerate(tokens) if token < 0}

    def close(self) -> None:
        self._words.release()


class MessageMailbox:
    """Of a world that starts: each agreement is an exchange of messages."""

    def __init__(self, exchange: ObjectGather):
        self._exchange = exchange

    def match_call(self, signature: int, limit: float) -> list[int | None] | None:
        heard = self._exchange.gather(signature, limit, need_all=True)
        found: list[int | None] = [None] * self._exchange.size
        for rank, brought in heard.items():
            assert isinstance(brought, int)
            found[rank] = brought
        return None if found == [signature] * self._exchange.size else found

    def leave(self, reason: int) -> None:
        """Nothing to write on: peers find out by its end or by their time limit."""

    def left(self) -> dict[int, int]:
        return {}

    def close(self) -> None:
        """Nothing is shared."""
