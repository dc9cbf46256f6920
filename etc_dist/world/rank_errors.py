"""The errors of a agreement of ranks, built alike on every rank from the same facts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from etc_dist.errors import ArgumentError, EtcDistError, WorldError
from etc_dist.world.mailbox import FAILED, INTERRUPTED, LOST, UNCLOSED

GONE = {
    LOST: "an earlier call there timed out or failed",
    INTERRUPTED: "a call there was interrupted by an exception",
    FAILED: "it ends by an error",
    UNCLOSED: "it ends, and made another call than its peers before",
}
"""Why a rank has left a world, by what it publishes."""
PARTS = ("what", "where", "wanted", "got", "fix")

Parts = tuple[type[EtcDistError], dict[str, object]]

# Continues a message's part under its first line.
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


def mismatch(
    where: str, texts: Sequence[str], signatures: Sequence[int]
) -> EtcDistError:
    """The ranks made different calls; `texts` and `signatures` by rank."""
    if len(set(texts)) == 1:
        # The callers' words do not show the difference; their signatures do.
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


def refusal(errors: Mapping[int, EtcDistError], size: int) -> EtcDistError:
    """One error for all: of the lowest failing rank's class. It names the ranks that
    failed, unless all ranks of the world, `size` of them, did so alike."""
    first = errors[min(errors)]
    parts = {}
    for part in PARTS:
        texts = {rank: getattr(error, part) for rank, error in errors.items()}
        alike = len(set(texts.values())) == 1
        one_text = alike and (part != "where" or len(texts) == size)
        parts[part] = getattr(first, part) if one_text else by_rank(texts)
    return rebuild(type(first), {**vars(first), **parts})


def take_apart(error: EtcDistError) -> Parts:
    """What of an error travels between ranks: not its traceback, nor its cause."""
    return type(error), dict(vars(error))


def rebuild(kind: type[EtcDistError], state: Mapping[str, object]) -> EtcDistError:
    """An error of this class with these attributes; its message comes from them."""
    error = kind(**{part: str(state[part]) for part in PARTS})
    vars(error).update(state)
    return error


def unheard(
    where: str,
    missing: Sequence[int],
    limit: float,
    dead: Sequence[int] = (),
    stopped: Sequence[int] = (),
) -> WorldError:
    """Some ranks did not come to a agreement within `limit` seconds, or are dead.

    Of the missing only the dead are named, if there are any: they are the cause.
    """
    what = "not all ranks came to the same call"
    if dead:
        ended = "its process has" if len(dead) == 1 else "their processes have"
        return WorldError(
            what,
            where=where,
            wanted="every rank to take part",
            got=f"{name_ranks(dead)} did not come: {ended} ended",
            fix="look at the last output there and for what may have ended it (a "
            "signal, no memory left); then end all ranks and start again",
        )
    return WorldError(
        what,
        where=where,
        wanted=f"every rank within {limit:g} s",
        got=f"{name_ranks(missing)} did not come"
        + f"; stopped by a signal or a debugger: {name_ranks(stopped)}" * bool(stopped),
        fix="look at what those ranks were doing (an error, or another path through "
        "the program); raise ETC_DIST_WORLD_LIMIT if they are only slow",
    )


def left(where: str, gone: Mapping[int, int]) -> WorldError:
    """Some ranks had already left the world; `gone`: why, by rank."""
    # Ranks that gave up because of others are named only where nobody else did.
    first = {rank: why for rank, why in gone.items() if why != LOST} or gone
    return WorldError(
        "the world lost ranks",
        where=where,
        wanted="every rank to take part",
        got=by_rank({rank: f"gave up: {GONE[why]}" for rank, why in first.items()}),
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
