"""Agreement of ranks: all make the same call, or all raise the same error.

A rank that does not make a call breaks the world: the ranks that waited raise
`WorldError`, and every later call raises at once instead of hanging.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Mapping
from typing import NoReturn, Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt

from etc_dist.errors import EtcDistError, WorldError
from etc_dist.world import rank_errors
from etc_dist.world.objects import ObjectGather
from etc_dist.world.processes import Backoff, ProcessMonitor, is_forked
from etc_dist.world.rank_errors import ENDED, LOST, REASONS, SILENT

T = TypeVar("T")

END_SECONDS = 2.0
"""How long a rank that a peer has left waits for the end of that peer's process."""
MASK = (1 << 63) - 1
"""Signatures have 63 bits: on the board they are non-negative int64."""
# The signature of a rank whose own arguments are bad; no call has it.
_REFUSED = 0
# Odd, with well-spread bits: multiples of it mark the call numbers.
_STEP = 0x1E3779B97F4A7C15
# A few microseconds of polling; more would delay peers on the same core.
_SPINS = 50
_LINE = 64
_WORDS = _LINE // 8


def sign(text: str) -> int:
    """A 63-bit signature of `text`, the same in every process (unlike `hash`)."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & MASK


class Board(Protocol):
    """Compares one signature per call between all ranks."""

    def compare(self, signature: int, limit: float) -> list[int | None] | None:
        """None if every rank has `signature` (63 bits). Collective.

        Otherwise each rank's signature, None for a rank that did not call within
        `limit` seconds or has ended, or the negative reason why it left.
        """

    def leave(self, reason: int) -> None:
        """Publish the reason why this rank makes no further call."""

    def left(self) -> dict[int, int]:
        """The ranks that have left, and why."""

    def close(self) -> None:
        """End the comparisons."""


class Agreement:
    """The agreement of all ranks on each call. `World` documents its methods."""

    def __init__(self, objects: ObjectGather, monitor: ProcessMonitor, limit: float):
        self.rank, self.size = objects.rank, objects.size
        self.limit = limit
        """Seconds that a call waits for the other ranks."""
        self._objects, self._monitor = objects, monitor
        objects.find_lost = self.find_lost
        self.report: Callable[[BaseException], None] = lambda error: None
        """Called with each error that all ranks raise."""
        self._board: Board | None = None
        self._calls = 0
        self._unusable = ""
        self.broken = False
        """No further call is possible: why is in `_unusable`."""
        self._left_before: frozenset[int] = frozenset()
        """The ranks that left before this one, and whose processes had not ended."""

    def use_board(self, board: Board) -> None:
        """Compare calls on `board` from now on, not by messages. Collective."""
        self._board = board

    @property
    def lost_process(self) -> bool:
        """The world broke and some rank's process has ended."""
        far = {ENDED, SILENT}.intersection(self._left().values())
        return self.broken and bool(far or self._monitor.find_ended())

    def find_lost(self) -> frozenset[int]:
        return self._monitor.find_ended() | frozenset(self._left())

    def why_lost(self, rank: int) -> str:
        left = self._left()
        if self._ended(rank, left):
            return REASONS[ENDED]
        if left.get(rank, SILENT) != SILENT:
            return f"it left the world: {REASONS[left[rank]]}"
        if self._monitor.stopped(rank):
            return "its process is stopped, by a signal or a debugger"
        return "it did not answer"

    def match_call(self, signature: int, describe: Callable[[], str]) -> None:
        found = self._compare(signature & MASK or 1)
        if found is not None:
            self._raise_difference(found, describe, None)

    def call(self, text: str) -> None:
        """`match_call` for the call that `text` fully describes."""
        self.match_call(sign(text), lambda: text)

    def refuse(self, error: EtcDistError) -> NoReturn:
        if self.broken or self.size == 1:
            raise error
        found = self._compare(_REFUSED) or [_REFUSED] * self.size
        self._raise_difference(found, lambda: error.what, error)

    def agree(self, step: Callable[[], T]) -> list[T]:
        # Pickled within the step: a result that cannot be pickled is its fault.
        result = self._run(lambda: pickle.dumps(step()), "world.agree")
        return [pickle.loads(one) for one in self._gather_values(result, None)]

    def agree_done(self, step: Callable[[], object]) -> None:
        self._run(step, "world.agree_done")

    def gather(self, value: object) -> list[object | None]:
        self._begin()
        received = self._objects.gather(value, self.limit)
        missing = [rank for rank in range(self.size) if rank not in received]
        if missing:
            self._lose(missing)
        return [received.get(rank) for rank in range(self.size)]

    def barrier(self) -> None:
        self.call("world.barrier()")
        # The calls are compared; the barrier of messages orders memory as well.
        if not self._objects.barrier(self.limit):
            raise self._lose([rank for rank in range(self.size) if rank != self.rank])

    def leave(self, text: str, reason: int = LOST) -> None:
        """Leave the world: later calls here, and the peers' next ones, raise."""
        # A forked child shares the board of its parent, which stays.
        if not self.broken and not is_forked():
            left = self._left()
            self._left_before = frozenset(r for r in left if not self._ended(r, left))
            if self._board is not None:
                self._board.leave(reason)
            self._unusable, self.broken = text, True

    def await_ends(self) -> None:
        """Wait, up to END_SECONDS, for the ends of the processes of the ranks that left
        before this one: the job ends with the exit code of the first."""
        backoff = Backoff(END_SECONDS)
        while not all(map(self._monitor.ended, self._left_before)):
            if not backoff.pause():
                break

    def close(self) -> None:
        """End all calls. Local, after the last call."""
        self._unusable, self.broken = "it was closed", True
        if self._board is not None:
            self._board.close()
            self._board = None

    def _begin(self) -> None:
        if self.broken:
            raise rank_errors.unusable(self._where(), self._unusable)
        self._calls += 1

    def _compare(self, signature: int) -> list[int] | None:
        """The ranks' signatures if they differ from this one; raises if any is lost."""
        self._begin()
        found: list[int | None] | None
        if self._board is not None:
            found = self._board.compare(signature, self.limit)
        else:
            received = self._objects.gather(signature, self.limit, need_all=True)
            found = [cast("int | None", received.get(r)) for r in range(self.size)]
            found = None if found == [signature] * self.size else found
        if found is None:
            return None
        missing = [rank for rank, one in enumerate(found) if one is None or one < 0]
        if missing:
            raise self._lose(missing)
        return cast("list[int]", found)

    def _raise_difference(
        self,
        signatures: list[int],
        describe: Callable[[], str],
        error: EtcDistError | None,
    ) -> NoReturn:
        """The ranks made different calls: exchange texts, raise one error on all."""
        texts = self._gather_values(_text(describe), error)
        difference = rank_errors.mismatch(self._where(), texts, signatures)
        self.report(difference)
        raise difference

    def _run(self, step: Callable[[], T], text: str) -> T:
        """This rank's result of a step that succeeded on every rank."""
        if self.broken:
            raise rank_errors.unusable(self._where(), self._unusable)
        try:
            result = step()
        except EtcDistError as error:
            self.refuse(error)
        except Exception as fault:
            self.refuse(rank_errors.failed_step(fault, text))
        self.call(text)
        return result

    def _gather_values(self, value: T, error: EtcDistError | None) -> list[T]:
        """Every rank's value, by rank; raises on all ranks if any has an error."""
        if self.size == 1:
            if error is not None:
                raise error
            return [value]
        received = self._objects.gather((value, error), self.limit, need_all=True)
        missing = [rank for rank in range(self.size) if rank not in received]
        if missing:
            raise self._lose(missing)
        pairs = [
            cast("tuple[T, EtcDistError | None]", received[rank])
            for rank in range(self.size)
        ]
        errors = {rank: one for rank, (_, one) in enumerate(pairs) if one is not None}
        if errors:
            # NOTE: this rank's own error is not the cause: it has the same text.
            cause = None if error is None else error.__cause__
            refusal = rank_errors.refusal(errors, self.size)
            self.report(refusal)
            raise refusal from cause
        return [one for one, _ in pairs]

    def _ended(self, rank: int, left: Mapping[int, int]) -> bool:
        """Whether the process of `rank` is the cause: it ended without leaving."""
        return left.get(rank, ENDED) == ENDED and (
            rank in left or self._monitor.ended(rank)
        )

    def _left(self) -> dict[int, int]:
        return {} if self._board is None else self._board.left()

    def _lose(self, missing: list[int]) -> WorldError:
        """Break the world, which did not receive from these ranks; the error."""
        where = self._where()
        # Name all that left: the first may have answered this call before. Ranks also
        # leave because another one has ended: then its end is the cause.
        left = {r: why for r, why in self._left().items() if why != SILENT}
        ended = [r for r in missing if self._ended(r, left)]
        if not left.keys().isdisjoint(missing) and not ended:
            return self._break(rank_errors.left_ranks(where, left))
        stopped = [rank for rank in missing if self._monitor.stopped(rank)]
        return self._break(
            rank_errors.missing_ranks(where, missing, self.limit, ended, stopped)
        )

    def _break(self, error: WorldError) -> WorldError:
        self.leave(f"it is broken: {error.what}, {error.got}")
        return error

    def _where(self) -> str:
        return f"call {self._calls} of this world, seen by rank {self.rank}"


def _text(describe: Callable[[], str]) -> str:
    # The peers wait for the text, also if it cannot be made.
    try:
        return describe()
    except Exception as fault:
        return f"(no description: {type(fault).__name__}: {fault})"


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
    is ordered: for data in symmetric memory use `World.barrier`.
    """

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
        self._own = self._rank * _WORDS
        others = [rank for rank in range(self._size) if rank != self._rank]
        self._others = tuple(
            tuple(rank * _WORDS + 2 * parity for rank in others) for parity in (0, 1)
        )

    def compare(self, signature: int, limit: float) -> list[int | None] | None:
        """See `Board`."""
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
                    return self._wait(signature, limit)
        return None

    def leave(self, reason: int) -> None:
        """Publish the reason why this rank makes no further call."""
        self._words[self._own] = self._words[self._own + 2] = reason

    def left(self) -> dict[int, int]:
        """The ranks that have left, and why."""
        tokens = self._words[::_WORDS].tolist()
        return {rank: token for rank, token in enumerate(tokens) if token < 0}

    def close(self) -> None:
        self._words.release()

    def _wait(self, signature: int, limit: float) -> list[int | None] | None:
        """The slow half of `compare`: a rank is late, or has another signature."""
        found: list[int | None] = [None] * self._size
        found[self._rank] = signature
        backoff = Backoff(limit, self._find_ended)
        while True:
            for rank in range(self._size):
                if found[rank] is None:
                    found[rank] = self._read(rank)
            if None not in found or any(one < 0 for one in found if one):
                break
            lost = any(found[rank] is None for rank in backoff.lost)
            if lost or not backoff.pause():
                break
        return None if found == [signature] * self._size else found

    def _read(self, rank: int) -> int | None:
        slot = rank * _WORDS + 2 * self._parity
        token, signature = self._words[slot], self._words[slot + 1]
        if token < 0:
            return token
        return signature if token ^ signature == self._mark else None
