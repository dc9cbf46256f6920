"""Agreement of ranks: all make the same call, or all raise the same error.

A rank that does not make a call breaks the world: the ranks that waited raise
`WorldError`, and every later call raises at once instead of hanging."""

from __future__ import annotations

import hashlib
import pickle
import platform
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn, TypeVar, cast

from etc_dist.errors import EtcDistError, WorldError
from etc_dist.world import rank_errors
from etc_dist.world.board import MASK, HostsBoard, SignatureBoard
from etc_dist.world.processes import Backoff, Process, ProcessMonitor, is_forked
from etc_dist.world.rank_errors import ENDED, LOST, REASONS, SILENT
from etc_dist.world.transport import CALL, Exchange, Transport

T = TypeVar("T")

END_SECONDS = 2.0
"""How long a rank that a peer has left waits for the end of that peer's process."""
ORDERED = ("x86_64", "AMD64")
"""Processors whose stores become visible to other cores in the order of the program."""
NUMBER_BITS = 28
"""Of a signature, where ranks agree on the largest of a number."""
# The signature of a rank whose own arguments are bad; no call has it.
_REFUSED = 0


def sign(text: str) -> int:
    """A 63-bit signature of `text`, the same in every process (unlike `hash`)."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & MASK


class Agreement:
    """The agreement of all ranks on each call. `World` documents its methods."""

    def __init__(self, transport: Transport, limit: float):
        """Collective. WorldError where a rank does not answer."""
        self.rank, self.size = transport.rank, transport.size
        self.limit = limit
        """Seconds that a call waits for the other ranks."""
        self._objects = Exchange(transport, CALL, range(self.size))
        self.monitor = self._monitor_processes()
        self._objects.find_lost = self.find_lost
        self.report: Callable[[BaseException], None] = lambda error: None
        """Called with each error that all ranks raise."""
        self._board: SignatureBoard | HostsBoard | None = None
        self._calls = 0
        self._unusable = ""
        self.broken = False
        """No further call is possible: why is in `_unusable`."""
        self._left_before: frozenset[int] = frozenset()
        """The ranks that left before this one, and whose processes had not ended."""

    def _monitor_processes(self) -> ProcessMonitor:
        processes = self._objects.gather(Process.own(), self.limit)
        if len(processes) == self.size:
            every = [cast("Process | None", processes[r]) for r in range(self.size)]
            monitor = ProcessMonitor(every)
            self._objects.find_lost = monitor.find_ended
            # No rank may end before all have received the processes of all.
            replies = self._objects.gather(None, self.limit, need_all=True)
            if len(replies) == self.size:
                return monitor
        raise rank_errors.not_together(self.rank, self.size, self.limit)

    def use_board(self, board: SignatureBoard | HostsBoard) -> None:
        """Compare calls on `board` from now on, not by messages. Collective."""
        self._board = board

    @property
    def lost_process(self) -> bool:
        """The world broke and some rank's process has ended."""
        far = {ENDED, SILENT}.intersection(self._left().values())
        return self.broken and bool(far or self.monitor.find_ended())

    def find_lost(self) -> frozenset[int]:
        """The ranks whose processes have ended, or that have left the world."""
        return self.monitor.find_ended() | frozenset(self._left())

    def why_lost(self, rank: int) -> str:
        """The known reason why `rank` did not answer, in a few words."""
        reasons = self._left()
        if self._ended(rank, reasons):
            return REASONS[ENDED]
        if reasons.get(rank, SILENT) != SILENT:
            return f"it left the world: {REASONS[reasons[rank]]}"
        if self.monitor.stopped(rank):
            return "its process is stopped, by a signal or a debugger"
        return "it did not answer"

    def match_call(self, signature: int, describe: Callable[[], str]) -> None:
        """Make sure that every rank makes the same call. Collective."""
        signatures = self._compare(signature & MASK or 1)
        if signatures is not None:
            self._raise_difference(signatures, describe, None)

    def largest(self, signature: int, number: int, describe: Callable[[], str]) -> int:
        """As `match_call`; the largest `number` of all ranks."""
        if number >> NUMBER_BITS:
            self.refuse(rank_errors.too_large(number, 1 << NUMBER_BITS, describe()))
        call = (signature & MASK) >> NUMBER_BITS or 1
        signatures = self._compare(call << NUMBER_BITS | number)
        if signatures is None:
            return number
        calls = [value >> NUMBER_BITS for value in signatures]
        if calls != [call] * self.size:
            self._raise_difference(calls, describe, None)
        return max(value & (1 << NUMBER_BITS) - 1 for value in signatures)

    def call(self, text: str) -> None:
        """`match_call` for the call that `text` fully describes."""
        self.match_call(sign(text), lambda: text)

    def follow_first(self, choices: Sequence[str], choice: int) -> int:
        """The choice of rank 0 among calls with these texts. Collective."""
        if self.size == 1:
            return choice
        signatures = [sign(text) for text in choices]
        own_choice = choice if self.rank == 0 else 0
        received_signatures = self._compare(signatures[own_choice])
        if received_signatures is None:
            return own_choice
        first, *other_signatures = received_signatures
        if first not in signatures or {*other_signatures} != {signatures[0]}:
            self._raise_difference(
                received_signatures, lambda: choices[own_choice], None
            )
        return signatures.index(first)

    def refuse(self, error: EtcDistError) -> NoReturn:
        """Raise on all ranks, in place of a call. Collective."""
        if self.broken or self.size == 1:
            raise error
        signatures = self._compare(_REFUSED) or [_REFUSED] * self.size
        self._raise_difference(signatures, lambda: error.what, error)

    def agree(self, step: Callable[[], T]) -> list[T]:
        """The results of `step` on all ranks, or one error on all. Collective."""
        # Pickled within the step: a result that cannot be pickled is its fault.
        result = self._run(lambda: pickle.dumps(step()), "world.agree")
        return [pickle.loads(pickled) for pickled in self._gather_values(result, None)]

    def agree_done(self, step: Callable[[], object]) -> None:
        """As `agree`, without results."""
        self._run(step, "world.agree_done")

    def gather(self, value: object) -> list[object | None]:
        """Each rank's value; None for ranks that did not answer. Collective."""
        self._begin()
        value_by_rank = self._objects.gather(value, self.limit)
        missing = [rank for rank in range(self.size) if rank not in value_by_rank]
        if missing:
            self._lose(missing)
        return [value_by_rank.get(rank) for rank in range(self.size)]

    def barrier(self) -> None:
        """Wait for all ranks, whose writes are visible then. Collective."""
        self.call("world.barrier()")
        # The board orders memory only where the processor keeps the order of stores.
        if self._board is not None and platform.machine() not in ORDERED:
            self._exchange(None)

    def leave(self, text: str, reason: int = LOST) -> None:
        """Leave the world: later calls here, and the peers' next ones, raise."""
        # A forked child shares the board of its parent, which stays.
        if not self.broken and not is_forked():
            reasons = self._left()
            self._left_before = frozenset(
                r for r in reasons if not self._ended(r, reasons)
            )
            if self._board is not None:
                self._board.leave(reason)
            self._unusable, self.broken = text, True

    def await_ends(self) -> None:
        """Wait, up to END_SECONDS, for the ends of the processes of the ranks that left
        before this one: the job ends with the exit code of the first."""
        backoff = Backoff(END_SECONDS)
        while not all(map(self.monitor.ended, self._left_before)):
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
        signatures: list[int | None] | None
        if self._board is not None:
            signatures = self._board.compare(signature, self.limit)
        else:
            signatures = self._exchange(signature)
        if signatures is None or signatures == [signature] * self.size:
            return None
        missing = [
            rank for rank, value in enumerate(signatures) if value is None or value < 0
        ]
        if missing:
            raise self._lose(missing)
        return cast("list[int]", signatures)

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
        pairs = self._exchange((value, error))
        errors = {
            rank: fault for rank, (_, fault) in enumerate(pairs) if fault is not None
        }
        if errors:
            # NOTE: this rank's own error is not the cause: it has the same text.
            cause = None if error is None else error.__cause__
            refusal = rank_errors.refusal(errors, self.size)
            self.report(refusal)
            raise refusal from cause
        return [result for result, _ in pairs]

    def _exchange(self, value: T) -> list[T]:
        """Every rank's value, by rank. WorldError if any does not answer."""
        value_by_rank = self._objects.gather(value, self.limit, need_all=True)
        missing = [rank for rank in range(self.size) if rank not in value_by_rank]
        if missing:
            raise self._lose(missing)
        return [cast("T", value_by_rank[rank]) for rank in range(self.size)]

    def _ended(self, rank: int, reasons: Mapping[int, int]) -> bool:
        """Whether the process of `rank` is the cause: it ended without leaving."""
        return reasons.get(rank, ENDED) == ENDED and (
            rank in reasons or self.monitor.ended(rank)
        )

    def _left(self) -> dict[int, int]:
        return {} if self._board is None else self._board.left()

    def _lose(self, missing: list[int]) -> WorldError:
        """Break the world, which did not receive from these ranks; the error."""
        where = self._where()
        # Name all that left: the first may have answered this call before. Ranks also
        # leave because another one has ended: then its end is the cause.
        reasons = {r: why for r, why in self._left().items() if why != SILENT}
        ended_ranks = [r for r in missing if self._ended(r, reasons)]
        if not reasons.keys().isdisjoint(missing) and not ended_ranks:
            return self._break(rank_errors.left_ranks(where, reasons))
        stopped = [rank for rank in missing if self.monitor.stopped(rank)]
        return self._break(
            rank_errors.missing_ranks(where, missing, self.limit, ended_ranks, stopped)
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
