"""The errors of collective calls, the same on every rank."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from etc_dist.errors import ArgumentError, EtcDistError, WorldError

LOST, INTERRUPTED, FAILED, UNCLOSED, BLOCK_LEFT = -1, -2, -3, -4, -5
SILENT, ENDED = -6, -7
"""The published reason why a rank left the world: negative, unlike signatures. The last
two are what the ranks of its host report of it."""
REASONS = {
    LOST: "an earlier call there timed out or failed",
    INTERRUPTED: "a call there was interrupted by an exception",
    FAILED: "it ended with an error",
    UNCLOSED: "it ended before the other ranks closed the world",
    BLOCK_LEFT: "an exception left its with block",
    ENDED: "its process has ended",
    SILENT: "it did not answer",
}
PARTS = ("what", "where", "wanted", "got", "fix")

# A further line of a part of a message.
_NEXT_LINE = "\n" + " " * 10


def name_ranks(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 0, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def by_rank(texts: Mapping[int, str]) -> str:
    """One line for each different text, with the ranks that gave it."""
    groups: dict[str, list[int]] = {}
    for rank in sorted(texts):
        groups.setdefault(texts[rank], []).append(rank)
    return _NEXT_LINE.join(f"{name_ranks(r)}: {text}" for text, r in groups.items())


def expect_alike(
    values: Sequence[object],
    what: str,
    where: str,
    fix: str,
    kind: type[EtcDistError] = WorldError,
) -> None:
    """Raise an error on all ranks unless their `values` have the same text."""
    texts = [str(value) for value in values]
    if len(set(texts)) > 1:
        raise kind(
            f"the ranks have different {what}",
            where=where,
            wanted=f"the same {what} on every rank",
            got=by_rank(dict(enumerate(texts))),
            fix=fix,
        )


# ------------------------------------------------------------------------------ start


def not_a_member(name: str, value: str) -> ArgumentError:
    """`start` was called on a rank that its argument does not contain."""
    return ArgumentError(
        f"the argument {name} does not contain this rank",
        where="start of the world",
        wanted=f"{name}: one that contains this rank, or None",
        got=f"{name} = {value}",
        fix="call start only on the ranks of the argument",
    )


def not_together(rank: int | str, size: int | str, limit: float) -> WorldError:
    """Not all ranks of the communicator or process group called `start`."""
    return WorldError(
        "not all ranks called start",
        where=f"start of the world, rank {rank} of {size}",
        wanted=f"all ranks of the communicator or process group in {limit:g} s",
        got="not all of them",
        fix="call start on all of its ranks, with the same argument; check that the "
        "launcher has started them, on every host",
    )


# -------------------------------------------------------------------- arguments, steps


def mismatch(
    where: str, texts: Sequence[str], signatures: Sequence[int]
) -> EtcDistError:
    """The ranks made different calls; `texts` and `signatures` by rank."""
    if len(set(texts)) == 1:
        # The descriptions are equal, so show the signatures.
        texts = [
            f"{text} (signature {signature:#x})"
            for text, signature in zip(texts, signatures, strict=True)
        ]
    return ArgumentError(
        "the ranks do not make the same call",
        where=where,
        wanted="the same operation, shapes, dtypes and options on every rank",
        got=by_rank(dict(enumerate(texts))),
        fix="make this call alike on every rank; nothing was launched",
    )


def too_large(number: int, limit: int, call: str) -> ArgumentError:
    """A number of which the ranks cannot agree on the largest."""
    return ArgumentError(
        "a rank passes too many rows",
        where=call,
        wanted=f"fewer than {limit}",
        got=str(number),
        fix="split the call into several",
    )


def refusal(errors: Mapping[int, EtcDistError], size: int) -> EtcDistError:
    """One error for all ranks, of the lowest failing rank's class. It names the ranks
    that failed, unless all `size` ranks failed with the same error."""
    first = errors[min(errors)]
    parts = {}
    for part in PARTS:
        texts = {rank: getattr(error, part) for rank, error in errors.items()}
        is_alike = len(set(texts.values())) == 1
        has_one_text = is_alike and (part != "where" or len(texts) == size)
        parts[part] = getattr(first, part) if has_one_text else by_rank(texts)
    error_of_ranks = type(first)(**parts)
    vars(error_of_ranks).update({**vars(first), **parts})
    return error_of_ranks


def failed_step(fault: Exception, where: str) -> WorldError:
    """A step of all ranks raised something unexpected."""
    error = WorldError(
        "a step that all ranks take failed",
        where=where,
        wanted="the step to succeed on every rank",
        got=f"{type(fault).__name__}: {fault}",
        fix="see the cause above on the rank that failed",
    )
    error.__cause__ = fault
    return error


# ------------------------------------------------------------------------- lost ranks


def missing_ranks(
    where: str,
    missing: Sequence[int],
    limit: float,
    ended_ranks: Sequence[int] = (),
    stopped_ranks: Sequence[int] = (),
) -> WorldError:
    """Some ranks did not make a call within `limit` seconds.

    If processes of missing ranks have ended, only these are named: they are the cause.
    """
    got = f"{name_ranks(ended_ranks or missing)} did not take part"
    fix = "check those ranks for an error, or another path through the program; "
    fix += "raise ETC_DIST_WORLD_LIMIT if they are only slow"
    if ended_ranks:
        got += (
            ": its process has" if len(ended_ranks) == 1 else ": their processes have"
        )
        got += " ended"
        fix = "see the last output there, and whether a signal or a lack of memory "
        fix += "ended it; then end all ranks and start again"
    elif stopped_ranks:
        got += f"; stopped by a signal or a debugger: {name_ranks(stopped_ranks)}"
    return WorldError(
        "not all ranks made the same call",
        where=where,
        wanted="every rank to take part"
        if ended_ranks
        else f"every rank within {limit:g} s",
        got=got,
        fix=fix,
    )


def left_ranks(where: str, reasons: Mapping[int, int]) -> WorldError:
    """Some ranks had already left the world; `reasons` by rank."""
    # Ranks that left because of others are named only if no other rank left.
    first = {rank: why for rank, why in reasons.items() if why != LOST} or reasons
    return WorldError(
        "the world lost ranks",
        where=where,
        wanted="every rank to take part",
        got=by_rank(
            {rank: f"left the world: {REASONS[why]}" for rank, why in first.items()}
        ),
        fix="read the error of those ranks first; then end all ranks and start again",
    )


def unusable(where: str, reason: str) -> WorldError:
    """A call on a world that is broken or closed."""
    return WorldError(
        f"the world cannot be used: {reason}",
        where=where,
        wanted="an open world with all its ranks",
        got=reason,
        fix="end all ranks and start the program again, or start a new world if this "
        "one was closed",
    )


# ---------------------------------------------------------------------- threads, forks


def second_thread(owner: str, caller: str) -> WorldError:
    """Thread `caller` made a call during a call of thread `owner`."""
    return WorldError(
        "two threads use one world at the same time",
        where=caller,
        wanted="one call at a time; several threads may call in turn",
        got=f"{caller} called while {owner} was inside a call",
        fix="order the calls by a lock, alike on every rank, or make them all in one "
        "thread; this call did nothing, the other one continues",
    )


def nested(caller: str) -> WorldError:
    """The function `caller` of a user made a call inside another call."""
    return WorldError(
        "a call was made inside another call",
        where=caller,
        wanted="one call at a time",
        got="a call from the body of a device function, a signal handler or a "
        "finalizer, while the same thread was inside a call",
        fix="make the call after the other one has returned; this one did nothing",
    )


def forked() -> WorldError:
    """A call in a child process."""
    return WorldError(
        "the world cannot be used: this process is a fork of the one that started it",
        where=f"process {os.getpid()}",
        wanted="calls from the process that called start",
        got="a call from a child that os.fork() made of it",
        fix="make the calls in the parent, or start processes by the method spawn; "
        "the parent's world is unharmed",
    )
