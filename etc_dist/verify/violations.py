"""The faults of a plan, collected and then raised as one error."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from etc_dist.errors import DeadlockError, GraphError, RaceError

SHOWN = 20
"""Faults that one message lists; the rest is counted."""


@dataclass(frozen=True)
class Fault:
    """One mistake: a counterexample as text, the number of such cases, the fix."""

    error: type[GraphError]
    text: str
    fix: str
    count: int = 1

    def __str__(self) -> str:
        more = f" (and {self.count - 1} more like it)" if self.count > 1 else ""
        return self.text + more


@dataclass
class Tally:
    """Faults by cause: the first counterexample and the number of cases."""

    found: dict[Any, Fault] = field(default_factory=dict)

    def add(self, cause: object, fault: Fault) -> None:
        """Counts a fault with the first one of the same cause."""
        first = self.found.get(cause)
        if first is not None:
            total = first.count + fault.count
            fault = Fault(first.error, first.text, first.fix, total)
        self.found[cause] = fault

    def faults(self) -> list[Fault]:
        """The first fault of each cause, with the number of all."""
        return list(self.found.values())


def refuse(subject: str, where: str, faults: Sequence[Fault]) -> None:
    """Raise the most specific error that fits all `faults`, or nothing for none."""
    if not faults:
        return
    kinds = {f.error for f in faults}
    error = kinds.pop() if len(kinds) == 1 else GraphError
    wanted = {
        GraphError: "a correct program",
        DeadlockError: "waits that are all met",
        RaceError: "an order between any two tasks that share memory",
    }[error]
    raise error(
        f"{subject} is not correct: {_number(len(faults))}",
        where=where,
        wanted=wanted,
        got=_listed(str(f) for f in faults),
        fix=_listed(dict.fromkeys(f.fix for f in faults)),
    )


def _number(count: int) -> str:
    return "1 fault" if count == 1 else f"{count} faults"


def _listed(texts: Iterable[str]) -> str:
    every = list(texts)
    lines = every[:SHOWN]
    if len(every) > SHOWN:
        lines.append(f"and {len(every) - SHOWN} more")
    return "".join(f"\n    - {line}" for line in lines)
