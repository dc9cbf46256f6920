"""Tables in Markdown: the records that they show, and the texts of their cells."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from benchmarks.records import Record

R = TypeVar("R", bound=Record)
Row = Mapping[str, str]
"""Cells by the titles of their columns."""


def latest(records: Iterable[R], key: Callable[[R], Any]) -> list[R]:
    """The last record for each key, sorted by key."""
    last: dict[Any, R] = {}
    for r in sorted(records, key=lambda r: r.date):
        last[key(r)] = r
    return [last[k] for k in sorted(last)]


def titled(title: str, rows: Sequence[Row]) -> str:
    """A section of one table; "" without rows."""
    return f"\n## {title}\n{table(rows)}" if rows else ""


def table(rows: Sequence[Row]) -> str:
    """Markdown of `rows`. Columns of numbers are aligned to the right."""
    titles = list(rows[0])
    left = [not re.match(r"[\d.]|-$", rows[0][title]) for title in titles]
    lines = [
        line(titles),
        "|" + "".join("---|" if aligned else "--:|" for aligned in left),
        *(line(row.values()) for row in rows),
    ]
    return "\n".join(["", *lines, ""])


def line(texts: Iterable[str]) -> str:
    return "|" + "".join(f" {text} |" if text else " |" for text in texts)


def span(texts: Sequence[str]) -> str:
    return texts[0] if len(texts) == 1 else f"{texts[0]} to {texts[-1]}"


def ranks(r: Record) -> str:
    return f"{r.world_size} rank" + "s" * (r.world_size > 1)


def short(commit: str) -> str:
    head, dash, state = commit.partition("-")
    return head[:10] + dash + state
