"""How ranks agree: all make the same call, or all raise the same error.

A agreement that a rank does not come to breaks the world: the ranks that waited raise
`WorldError`, and every later call raises at once rather than hang.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from typing import NoReturn, TypeVar, cast

from etc_dist.errors import EtcDistError, WorldError
from etc_dist.world import rank_errors
from etc_dist.world.mailbox import LOST, MASK, Mailbox
from etc_dist.world.mpi import ObjectGather
from etc_dist.world.processes import ProcessMonitor

T = TypeVar("T")

# Brought to a agreement by a rank whose own arguments are bad; no call may sign so.
_REFUSED = 0


def sign(text: str) -> int:
    """A 63-bit signature of `text`, the same in every process (unlike `hash`)."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & MASK


class Agreement:
    """The ranks' agreement over one mailbox and one exchange; `limit` in seconds."""

    def __init__(
        self,
        exchange: ObjectGather,
        mailbox: Mailbox,
        living: ProcessMonitor,
        limit: float,
    ):
        self.rank, self.size = exchange.rank, exchange.size
        self._exchange, self._mailbox, self.limit = exchange, mailbox, limit
        self._monitor = living
        exchange.find_lost = self.find_lost
        self._calls = 0
        self._unusable: str | None = None

    def use(self, mailbox: Mailbox) -> None:
        """Compare calls in `mailbox` from now on; collective."""
        self._mailbox = mailbox

    def find_lost(self) -> frozenset[int]:
        """The ranks that will not come to any call any more."""
        return self._monitor.all_dead() | frozenset(self._mailbox.left())

    def why_lost(self, rank: int) -> str:
        """Why `rank` did not answer, as far as it is known."""
        if self._monitor.dead(rank):
            return "its process has ended"
        left = self._mailbox.left()
        if rank in left:
            return f"it gave up: {rank_errors.GONE[left[rank]]}"
        if self._monitor.stopped(rank):
            return "its process is stopped, by a signal or a debugger"
        return "it did not answer"

    @property
    def lost_process(self) -> bool:
        """The world broke and some rank's process has ended."""
        return self.broken and bool(self._monitor.all_dead())

    @property
    def broken(self) -> bool:
        """A rank was lost, or the world was closed: no call can succeed."""
        return self._unusable is not None

    def match_call(self, signature: int, describe: Callable[[], str]) -> None:
        """See `World.meet`."""
        if self._unusable is not None:
            self._raise_unusable()
        self._calls += 1
        found = self._mailbox.match_call(signature & MASK or 1, self.limit)
        if found is not None:
            self._check(found, self.limit)
            self._settle(found, describe, None)

    def call(self, text: str, limit: float | None = None) -> None:
        """Meet for the call that `text` fully describes, with a limit of its own."""
        if self._unusable is not None:
            self._raise_unusable()
        self._calls += 1
        limit = self.limit if limit is None else limit
        found = self._mailbox.match_call(sign(text) or 1, limit)
        if found is not None:
            self._check(found, limit)
            self._settle(found, lambda: text, None)

    def refuse(self, error: EtcDistError) -> NoReturn:
        """See `World.refuse`."""
        if self._unusable is not None or self.size == 1:
            raise error
        self._calls += 1
        found = self._mailbox.match_call(_REFUSED, self.limit)
        found = [_REFUSED] * self.size if found is None else found
        self._check(found, self.limit)
        self._settle(found, lambda: error.what, error)

    def agree(self, step: Callable[[], T]) -> list[T]:
        """Run `step` on every rank; its results by rank, or an error on all ranks.

        Collective. If `step` raises on any rank, all ranks raise that rank's error
        (see `rank_errors.refusal`); other exceptions become a `WorldError`.
        """
        # Pickled within the step: a result that cannot travel is a fault of the step.
        result = self._take(lambda: pickle.dumps(step()), "world.agree")
        return [pickle.loads(one) for one in self._hear_all(result, None)]

    def agree_done(self, step: Callable[[], object]) -> None:
        """As `agree`, without results: costs as little as `meet` where all succeed."""
        self._take(step, "world.agree_done")

    def _take(self, step: Callable[[], T], text: str) -> T:
        """This rank's result of a step that succeeded on every rank."""
        if self._unusable is not None:
            self._raise_unusable()
        try:
            result = step()
        except EtcDistError as error:
            self.refuse(error)
        except Exception as fault:
            unexpected = _unexpected(fault, text)
            unexpected.__cause__ = fault
            self.refuse(unexpected)
        self.call(text)
        return result

    def gather(self, value: object, limit: float | None = None) -> list[object | None]:
        """See `World.gather`."""
        if self._unusable is not None:
            self._raise_unusable()
        self._calls += 1
        limit = self.limit if limit is None else limit
        heard = self._exchange.gather(value, limit)
        missing = [rank for rank in range(self.size) if rank not in heard]
        if missing:
            self._lose(missing, limit)
        return [heard.get(rank) for rank in range(self.size)]

    def barrier(self, limit: float | None = None) -> None:
        """See `World.barrier`."""
        self.call("world.barrier()", limit)
        limit = self.limit if limit is None else limit
        # The mailbox has compared the calls; MPI's barrier orders memory as well.
        if not self._exchange.barrier(limit):
            peers = [rank for rank in range(self.size) if rank != self.rank]
            raise self._lose(peers, limit)

    def leave(self, text: str, reason: int = LOST) -> None:
        """Give up on the world: later calls here, and the peers' next ones, raise."""
        if self._unusable is None:
            self._mailbox.leave(reason)
            self._unusable = text

    def close(self) -> None:
        """End all meetings; after a last one."""
        self._unusable = "it was closed"
        self._mailbox.close()

    def _check(self, found: list[int | None], limit: float) -> None:
        """Raise unless every rank came."""
        gone = {
            r: brought for r, brought in enumerate(found) if brought and brought < 0
        }
        missing = [rank for rank, brought in enumerate(found) if brought is None]
        # Ranks give up where another has ended: then its end is the cause.
        if gone and not any(map(self._monitor.dead, missing)):
            raise self._break(rank_errors.left(self._where(), gone))
        if missing:
            raise self._lose(missing, limit)

    def _settle(
        self,
        found: list[int | None],
        describe: Callable[[], str],
        error: EtcDistError | None,
    ) -> NoReturn:
        """All came, and not alike: tell each other why, raise alike."""
        texts = self._hear_all(_say(describe), error)
        signatures = [brought or 0 for brought in found]
        raise rank_errors.mismatch(self._where(), texts, signatures)

    def _hear_all(self, value: T, error: EtcDistError | None) -> list[T]:
        """Every rank's value by rank; raises on all ranks if any brings an error."""
        if self.size == 1:
            if error is not None:
                raise error
            return [value]
        parts = None if error is None else rank_errors.take_apart(error)
        heard = self._exchange.gather((value, parts), self.limit, need_all=True)
        missing = [rank for rank in range(self.size) if rank not in heard]
        if missing:
            raise self._lose(missing, self.limit)
        values, errors = [], {}
        for rank in range(self.size):
            said, theirs = cast("tuple[T, rank_errors.Parts | None]", heard[rank])
            values.append(said)
            if theirs is not None:
                errors[rank] = rank_errors.rebuild(*theirs)
        if errors:
            # NOTE: this rank's own error is not the cause: it has the same text.
            cause = None if error is None else error.__cause__
            raise rank_errors.refusal(errors, self.size) from cause
        return values

    def _lose(self, missing: list[int], limit: float) -> WorldError:
        dead = [rank for rank in missing if self._monitor.dead(rank)]
        left = self._mailbox.left()
        gone = {rank: left[rank] for rank in missing if rank in left}
        if gone and not dead:
            return self._break(rank_errors.left(self._where(), gone))
        stopped = [rank for rank in missing if self._monitor.stopped(rank)]
        where = self._where()
        return self._break(rank_errors.unheard(where, missing, limit, dead, stopped))

    def _break(self, fault: WorldError) -> WorldError:
        self.leave(f"it is broken: {fault.what}, {fault.got}")
        return fault

    def _raise_unusable(self) -> NoReturn:
        raise rank_errors.unusable(self._where(), cast(str, self._unusable))

    def _where(self) -> str:
        return f"call {self._calls} of this world, seen by rank {self.rank}"


def _say(describe: Callable[[], str]) -> str:
    # The peers wait for a text: a fault in making it must not leave them waiting.
    try:
        return describe()
    except Exception as fault:
        return f"(no description: {type(fault).__name__}: {fault})"


def _unexpected(fault: Exception, where: str) -> WorldError:
    return WorldError(
        "a step that all ranks take failed",
        where=where,
        wanted="the step to succeed on every rank",
        got=f"{type(fault).__name__}: {fault}",
        fix="see the cause above on the rank that failed",
    )
